#include "cadre/train/checkpoint/snapshot_reader.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <optional>
#include <system_error>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/files/regular_file.h"
#include "cadre/core/os/host/host_info.h"
#include "cadre/core/wire/blake2b.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/mesh/layout.h"
#include "cadre/train/checkpoint/file_digests.h"
#include "cadre/train/checkpoint/snapshot_folder.h"
#include "cadre/train/checkpoint/snapshot_parts.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;

// If only parts of rows are needed, whole rows are read into a buffer of this size.
constexpr int64_t kBufferBytes = int64_t{16} << 20;

Box box_of(const ManifestPiece& piece) {
  return {piece.offsets, piece.sizes};
}

Error damaged(const std::string& path, const std::string& what) {
  return Error(ErrorCode::kCorruption, cadre::format("{}: {}", path, what));
}

// Describes a safetensors file of whole tensors as a snapshot that consists of one file.
SnapshotManifest manifest_of(const SafetensorsFile& file, const std::string& path) {
  SnapshotManifest manifest;
  manifest.files = {{.name = fs::path(path).filename().string()}};
  for (const std::string& name : file.names()) {
    const wire::SafetensorsEntry& entry = *file.find(name);
    ManifestTensor tensor{.name = name, .dtype = entry.dtype, .shape = entry.shape};
    tensor.pieces = {
        {.file = 0, .offsets = std::vector<int64_t>(entry.shape.size(), 0), .sizes = entry.shape}};
    manifest.tensors.push_back(std::move(tensor));
  }
  return manifest;
}

// Reads into the tensor's memory. Tells autograd that the tensor was changed in place.
void read_into(const at::Tensor& tensor, const SafetensorsFile& file,
               const wire::SafetensorsEntry& entry, size_t offset) {
  file.read_bytes(entry, offset,
                  {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()});
  tensor.unsafeGetTensorImpl()->bump_version();
}

// Copies the elements of the box `common`. The stored tensor covers the box `held`, `target` covers
// `box`. Reads whole rows, kBufferBytes at a time: directly into the target if all their elements
// are wanted and the target is contiguous, otherwise through a buffer.
void copy_from_file(const SafetensorsFile& file, const wire::SafetensorsEntry& entry,
                    const Box& held, const at::Tensor& target, const Box& box, const Box& common) {
  if (held.sizes.empty()) return read_into(target, file, entry, 0);
  const auto row_bytes = static_cast<int64_t>(entry.end - entry.begin) / held.sizes[0];
  const int64_t rows_at_once = std::max<int64_t>(1, kBufferBytes / std::max<int64_t>(1, row_bytes));
  Box part = held;
  const int64_t end = common.offsets[0] + common.sizes[0];
  for (int64_t row = common.offsets[0]; row < end; row += rows_at_once) {
    part.offsets[0] = row;
    part.sizes[0] = std::min(rows_at_once, end - row);
    const auto offset = static_cast<size_t>((row - held.offsets[0]) * row_bytes);
    const Box wanted = intersection(part, common);
    const at::Tensor to = slice_of(target, box, wanted);
    if (wanted.sizes == part.sizes && to.is_contiguous()) {
      read_into(to, file, entry, offset);
      continue;
    }
    const at::Tensor rows = at::empty(part.sizes, target.scalar_type());
    read_into(rows, file, entry, offset);
    to.copy_(slice_of(rows, part, wanted));
  }
}

// Explains what a path without a manifest is, and which path to load instead.
std::string what_it_is(const std::string& path) {
  std::error_code failure;
  if (!fs::exists(path, failure)) return "there is no such file or folder";
  if (const auto latest = SnapshotFolder(path).latest()) {
    return cadre::format("it is the folder of a run; load one of its snapshots, for example {}",
                         *latest);
  }
  if (fs::exists(path + "/model.safetensors", failure)) {
    return cadre::format(
        "it is a snapshot of the trainer, whose tensors are whole and not sharded; load the file "
        "{}/model.safetensors, which has the parameters without the optimizer's state",
        path);
  }
  return cadre::format("it has no {}", kSnapshotManifestName);
}

}  // namespace

SnapshotReader::SnapshotReader(std::string path, std::string fingerprint, SnapshotManifest manifest,
                               bool is_folder)
    : path_(std::move(path)),
      fingerprint_(std::move(fingerprint)),
      manifest_(std::move(manifest)),
      is_folder_(is_folder) {
  for (const ManifestTensor& tensor : manifest_.tensors) {
    if (tensor.state.empty()) {
      model_.emplace(tensor.name, &tensor);
    } else {
      optimizer_[tensor.name].push_back(&tensor);
    }
  }
}

SnapshotReader SnapshotReader::open(const std::string& path) {
  std::error_code failure;
  if (fs::is_regular_file(path, failure)) {
    const SafetensorsFile file = SafetensorsFile::open(path);
    SnapshotManifest manifest = manifest_of(file, path);
    const std::string text = encode_snapshot_manifest(manifest).value_or_throw();
    std::string digest = wire::blake2b_hex(std::as_bytes(std::span(text))).value_or_throw();
    return SnapshotReader(path, std::move(digest), std::move(manifest), /*is_folder=*/false);
  }
  const std::string manifest_path = cadre::format("{}/{}", path, kSnapshotManifestName);
  const std::array<std::string_view, 1> names = {kSnapshotManifestName};
  if (!fs::exists(manifest_path, failure)) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("{} is no sharded snapshot: {}", path, what_it_is(path)));
  }
  cadre::check_digests(path, names).value_or_throw();
  const std::string text = os::read_file(manifest_path, kMaxSnapshotManifestBytes).value_or_throw();
  Result<SnapshotManifest> manifest = parse_snapshot_manifest(text);
  if (!manifest.ok()) throw manifest.error().with_context(manifest_path);
  const std::string list = cadre::format("{}/{}", path, kDigestsName);
  return SnapshotReader(path, digest_of(list).value_or_throw(), std::move(manifest).value(),
                        /*is_folder=*/true);
}

std::string SnapshotReader::path_of(const ManifestFile& file) const {
  return is_folder_ ? cadre::format("{}/{}", path_, file.name) : path_;
}

void SnapshotReader::check_digests(std::span<const size_t> files) const {
  if (!is_folder_) return;
  std::vector<std::string_view> names;
  for (const size_t file : files) names.push_back(manifest_.files[file].name);
  cadre::check_digests(path_, names).value_or_throw();
}

void SnapshotReader::check_all_digests() const {
  std::vector<size_t> all(manifest_.files.size());
  std::iota(all.begin(), all.end(), size_t{0});
  check_digests(all);
}

std::string SnapshotReader::content_digest(size_t file) const {
  return digest_of(path_of(manifest_.files[file])).value_or_throw();
}

std::string SnapshotReader::sight() const {
  std::string text = os::read_host_info().boot_id;
  for (const ManifestFile& file : manifest_.files) {
    const auto identity = os::file_identity(path_of(file));
    // A missing file is no error here: the rank that reads it reports it.
    text += identity.ok() ? cadre::format("\n{} {}", identity->device, identity->inode) : "\n-";
  }
  return wire::blake2b_hex(std::as_bytes(std::span(text))).value_or_throw();
}

std::vector<size_t> SnapshotReader::open_files() const {
  std::vector<size_t> files;
  for (const auto& [file, opened] : files_) files.push_back(file);
  return files;
}

void SnapshotReader::prepare(const ManifestTensor& tensor, std::span<const Box> boxes) {
  for (const ManifestPiece& piece : tensor.pieces) {
    const Box held = box_of(piece);
    for (const Box& box : boxes) {
      if (intersection(held, box).numel() == 0) continue;
      check_piece(tensor, piece);
      break;
    }
  }
}

void SnapshotReader::check_piece(const ManifestTensor& tensor, const ManifestPiece& piece) {
  const ManifestFile& file = manifest_.files[piece.file];
  const std::string path = path_of(file);
  auto opened = files_.find(piece.file);
  if (opened == files_.end()) {
    std::error_code failure;
    if (!fs::exists(path, failure)) {
      throw Error(ErrorCode::kCorruption, cadre::format("{} is missing", path));
    }
    const uintmax_t bytes = fs::file_size(path, failure);
    if (is_folder_ && !failure && bytes != file.bytes) {
      throw damaged(path,
                    cadre::format("it has {} bytes; the manifest says {}", bytes, file.bytes));
    }
    opened = files_.emplace(piece.file, SafetensorsFile::open(path)).first;
  }
  const std::string name = name_in_files(tensor);
  const wire::SafetensorsEntry* entry = opened->second.find(name);
  if (entry == nullptr) {
    throw damaged(
        path,
        cadre::format("it has no tensor '{}', although the manifest lists it for this file", name));
  }
  if (entry->dtype != tensor.dtype || entry->shape != piece.sizes) {
    throw damaged(path, cadre::format("'{}' is {} {}; the manifest says {} {}", name, entry->dtype,
                                      list_of(entry->shape), tensor.dtype, list_of(piece.sizes)));
  }
}

void SnapshotReader::check_unchanged() const {
  for (const auto& [index, file] : files_) file.check_unchanged();
}

void SnapshotReader::read(const ManifestTensor& tensor, std::span<const Box> boxes,
                          const at::Tensor& flat) const {
  const std::string name = name_in_files(tensor);
  int64_t begin = 0;
  for (const Box& box : boxes) {
    const at::Tensor target = flat.narrow(0, begin, box.numel()).view(box.sizes);
    begin += box.numel();
    for (const ManifestPiece& piece : tensor.pieces) {
      const Box held = box_of(piece);
      const Box common = intersection(held, box);
      if (common.numel() == 0) continue;
      const SafetensorsFile& file = files_.at(piece.file);
      copy_from_file(file, *file.find(name), held, target, box, common);
    }
  }
}

}  // namespace cadre
