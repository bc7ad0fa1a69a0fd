#include "cadre/os/files/durable_file.h"

#include "cadre/os/files/file.h"
#include "cadre/os/files/native_file_system.h"

namespace cadre::os {
namespace {

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

Status write_and_sync(FileSystem& files, const std::string& path,
                      std::span<const ConstBytes> pieces) {
  auto file = files.create(path);
  if (!file.ok()) return file.error();
  for (const ConstBytes piece : pieces) CADRE_RETURN_IF_ERROR((*file)->write(piece));
  return (*file)->sync();
}

}  // namespace

Status write_file(FileSystem& files, const std::string& path, std::span<const ConstBytes> pieces) {
  const Status status = write_and_sync(files, path, pieces);
  if (!status.ok()) (void)files.remove(path);  // the first error is the one to report
  return status;
}

Status rename_path(FileSystem& files, const std::string& from, const std::string& to) {
  CADRE_RETURN_IF_ERROR(files.sync(from));
  CADRE_RETURN_IF_ERROR(files.rename(from, to));
  return files.sync(folder_of(to));
}

Status exchange_paths(FileSystem& files, const std::string& from, const std::string& to) {
  CADRE_RETURN_IF_ERROR(files.sync(from));
  CADRE_RETURN_IF_ERROR(files.exchange(from, to));
  return files.sync(folder_of(to));
}

Status replace_file(FileSystem& files, const std::string& path, ConstBytes content) {
  const Result<std::string> temporary = files.create_beside(path);
  if (!temporary.ok()) return temporary.error();
  CADRE_RETURN_IF_ERROR(write_file(files, *temporary, {&content, 1}));
  const Status renamed = files.rename(*temporary, path);
  if (!renamed.ok()) (void)files.remove(*temporary);
  return renamed.ok() ? files.sync(folder_of(path)) : renamed;
}

Status write_file(const std::string& path, std::span<const ConstBytes> pieces) {
  NativeFileSystem files;
  return write_file(files, path, pieces);
}

Result<std::string> create_file_beside(const std::string& path) {
  return NativeFileSystem().create_beside(path);
}

Status rename_path(const std::string& from, const std::string& to) {
  NativeFileSystem files;
  return rename_path(files, from, to);
}

Status exchange_paths(const std::string& from, const std::string& to) {
  NativeFileSystem files;
  return exchange_paths(files, from, to);
}

Status replace_file(const std::string& path, ConstBytes content) {
  NativeFileSystem files;
  return replace_file(files, path, content);
}

}  // namespace cadre::os
