// Reads boxes of tensors from the files of a snapshot, independent of how it was sharded.
//
// Threads: one. Blocking: reads a disk. Lifetime: keeps the files open that prepare() needed.
// Errors: open(), check_digests() and prepare() throw kCorruption or kInvalidArgument with the file
// and the tensor. read() of prepared boxes throws only kUnavailable for errors of the disk, and
// kCorruption if a file has been cut short since prepare().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/wire/snapshot_manifest.h"
#include "cadre/tensor/mesh/placement.h"
#include "cadre/train/checkpoint/safetensors.h"

namespace cadre {

class CADRE_EXPORT SnapshotReader {
 public:
  // Opens the folder of a snapshot, whose manifest is compared with its digest, or one safetensors
  // file.
  static SnapshotReader open(const std::string& path);
  // Copies are deleted, because the maps point into the object's own manifest.
  SnapshotReader(const SnapshotReader&) = delete;
  SnapshotReader& operator=(const SnapshotReader&) = delete;
  SnapshotReader(SnapshotReader&&) = default;
  SnapshotReader& operator=(SnapshotReader&&) = default;

  const std::string& path() const { return path_; }
  const SnapshotManifest& manifest() const { return manifest_; }
  // Returns a text that is equal on ranks that have opened the same snapshot. For a folder it is a
  // digest of B2SUMS, which includes the manifest's digest. For a single safetensors file it is a
  // digest of the header.
  const std::string& fingerprint() const { return fingerprint_; }
  // Return the tensors of the model by name, and the states of the optimizer by parameter.
  const std::map<std::string, const ManifestTensor*>& model() const { return model_; }
  const std::map<std::string, std::vector<const ManifestTensor*>>& optimizer() const {
    return optimizer_;
  }

  // Compares files, given by their indices in the manifest, with their digests. Does nothing for a
  // single safetensors file, which has no digest.
  void check_digests(std::span<const size_t> files) const;
  void check_all_digests() const;
  bool has_digests() const { return is_folder_; }
  // Returns a digest of the content of a file.
  std::string content_digest(size_t file) const;
  // Returns a digest of this machine's identity and of the device and inode of each file of the
  // manifest. Processes with an equal digest see the same files.
  std::string sight() const;
  // Returns the indices of the manifest's files that prepare() has opened, in ascending order.
  std::vector<size_t> open_files() const;
  // Opens the files that contain the boxes, and compares their headers with the manifest.
  void prepare(const ManifestTensor& tensor, std::span<const Box> boxes);
  // Throws if a file that prepare() opened was changed since. Call it after the last read().
  void check_unchanged() const;
  // Copies the elements of the boxes, one box after the other, to `flat`, which is contiguous, of
  // shape (n) and of the tensor's dtype. REQUIRES: prepare() for these boxes.
  void read(const ManifestTensor& tensor, std::span<const Box> boxes, const at::Tensor& flat) const;

 private:
  SnapshotReader(std::string path, std::string fingerprint, SnapshotManifest manifest,
                 bool is_folder);

  std::string path_of(const ManifestFile& file) const;
  void check_piece(const ManifestTensor& tensor, const ManifestPiece& piece);

  std::string path_;
  std::string fingerprint_;
  SnapshotManifest manifest_;
  bool is_folder_;
  std::map<std::string, const ManifestTensor*> model_;
  std::map<std::string, std::vector<const ManifestTensor*>> optimizer_;
  std::map<size_t, SafetensorsFile> files_;  // maps an index in manifest_.files to the open file
};

}  // namespace cadre
