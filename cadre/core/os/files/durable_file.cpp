#include "cadre/core/os/files/durable_file.h"

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/files/native_file_system.h"

namespace cadre::os {
namespace {

// Returns the folder of a path: "/" for "/a" and "." for "a".
std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

Status write_and_sync(OutputFile& file, std::span<const ConstBytes> pieces) {
  for (const ConstBytes piece : pieces) CADRE_RETURN_IF_ERROR(file.write(piece));
  return file.sync();
}

}  // namespace

Status write_file(FileSystem& files, const std::string& path, std::span<const ConstBytes> pieces) {
  auto file = files.create(path);
  if (!file.ok()) return file.error();
  const Status status = write_and_sync(**file, pieces);
  if (!status.ok()) (void)files.remove(path);  // `status` is the error to report
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

Status make_folders(FileSystem& files, const std::string& path) {
  if (path.empty() || path == "." || path == "/") return {};
  if (path.ends_with('/')) return make_folders(files, path.substr(0, path.size() - 1));
  const auto kind = files.kind_of(path);
  if (!kind.ok()) return kind.error();
  if (*kind == FileKind::kFolder || *kind == FileKind::kLink) return {};
  const std::string above = folder_of(path);
  CADRE_RETURN_IF_ERROR(make_folders(files, above));
  const Status made = files.make_folder(path);
  if (!made.ok()) {
    const auto now = files.kind_of(path);  // another process may have made the folder
    if (!now.ok() || *now != FileKind::kFolder) return made;
  }
  return files.sync(above);
}

Status remove_all(FileSystem& files, const std::string& path) {
  const auto is_gone = [&] {  // returns whether another process has removed the path
    const auto kind = files.kind_of(path);
    return kind.ok() && !*kind;
  };
  const auto kind = files.kind_of(path);
  if (!kind.ok()) return kind.error();
  if (!*kind) return {};
  if (*kind == FileKind::kFolder) {
    const auto names = files.list(path);
    if (!names.ok()) return is_gone() ? Status() : Status(names.error());
    for (const std::string& name : *names) {
      CADRE_RETURN_IF_ERROR(remove_all(files, cadre::format("{}/{}", path, name)));
    }
  }
  const Status removed = files.remove(path);
  return removed.ok() || !is_gone() ? removed : Status();
}

Status replace_file(FileSystem& files, const std::string& path, ConstBytes content) {
  const Result<std::string> temporary = files.create_beside(path);
  if (!temporary.ok()) return temporary.error();
  Status status = write_file(files, *temporary, {&content, 1});
  if (status.ok()) status = files.rename(*temporary, path);
  if (!status.ok()) (void)files.remove(*temporary);
  return status.ok() ? files.sync(folder_of(path)) : status;
}

Status write_file(const std::string& path, std::span<const ConstBytes> pieces) {
  NativeFileSystem files;
  return write_file(files, path, pieces);
}

Status replace_file(const std::string& path, ConstBytes content) {
  NativeFileSystem files;
  return replace_file(files, path, content);
}

}  // namespace cadre::os
