#include "cadre/train/checkpoint/full_state.h"

#include <ATen/ops/from_blob.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/files/durable_file.h"
#include "cadre/core/os/files/native_file_system.h"
#include "cadre/core/wire/safetensors_header.h"
#include "cadre/train/checkpoint/on_file_system.h"
#include "cadre/train/checkpoint/safetensors.h"
#include "cadre/train/checkpoint/snapshot_reader.h"

namespace cadre {
namespace {

std::vector<Box> whole_box(const ManifestTensor& tensor) {
  return {{std::vector<int64_t>(tensor.shape.size(), 0), tensor.shape}};
}

// Checks all tensors before it writes the first byte of the file.
void write_whole(SnapshotReader& reader, const std::vector<const ManifestTensor*>& tensors,
                 os::FileSystem& files, const std::string& path) {
  std::map<std::string, const ManifestTensor*> by_name;
  std::vector<wire::SafetensorsEntry> entries;
  for (const ManifestTensor* tensor : tensors) {
    if (!scalar_type_of(tensor->dtype)) {
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("{}: tensor '{}' has dtype {}, which this library cannot hold",
                                reader.path(), name_in_files(*tensor), tensor->dtype));
    }
    reader.prepare(*tensor, whole_box(*tensor));
    entries.push_back(
        {.name = name_in_files(*tensor), .dtype = tensor->dtype, .shape = tensor->shape});
    by_name.emplace(name_in_files(*tensor), tensor);
  }
  reader.check_all_digests();
  const wire::SafetensorsHeader header =
      wire::lay_out_safetensors(std::move(entries), {{"format", "pt"}});
  const std::string encoded = wire::encode_safetensors_header(header);
  const size_t data_bytes = header.tensors.empty() ? 0 : header.tensors.back().end;
  const std::unique_ptr<os::SizedFile> file =
      files.create_sized(path, encoded.size() + data_bytes).value_or_throw();
  std::memcpy(file->bytes().data(), encoded.data(), encoded.size());
  for (const wire::SafetensorsEntry& entry : header.tensors) {
    if (entry.begin == entry.end) continue;
    const ManifestTensor& tensor = *by_name.at(entry.name);
    const at::ScalarType dtype = *scalar_type_of(entry.dtype);
    const auto numel = static_cast<int64_t>((entry.end - entry.begin) / c10::elementSize(dtype));
    std::byte* start = file->bytes().data() + encoded.size() + entry.begin;
    reader.read(tensor, whole_box(tensor), at::from_blob(start, {numel}, dtype));
  }
}

}  // namespace

void write_full_state(const std::string& snapshot, const std::string& path,
                      SnapshotContent content) {
  os::NativeFileSystem files;
  write_full_state(snapshot, files, path, content);
}

void write_full_state(const std::string& snapshot, os::FileSystem& files, const std::string& path,
                      SnapshotContent content) {
  SnapshotReader reader = SnapshotReader::open(snapshot);
  std::vector<const ManifestTensor*> tensors;
  for (const ManifestTensor& tensor : reader.manifest().tensors) {
    if (tensor.state.empty() == (content == SnapshotContent::kModel)) tensors.push_back(&tensor);
  }
  const std::string temporary = files.create_beside(path).value_or_throw();
  try {
    write_whole(reader, tensors, files, temporary);
    os::rename_path(files, temporary, path).value_or_throw();
  } catch (const Error&) {
    (void)os::remove_all(files, temporary);  // ignored, because the first error is thrown
    throw;
  }
}

}  // namespace cadre
