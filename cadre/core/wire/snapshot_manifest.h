// The manifest of a sharded snapshot (checkpoint): it lists which file has which part of which
// tensor.
//
// Threads: plain values. Blocking: never. Lifetime: a manifest owns its texts.
// Errors: kCorruption, which says what is wrong, if the text is not a valid manifest;
// kInvalidArgument if it is of another version. A manifest that is accepted names only files in its
// own folder, and the pieces of each tensor cover it exactly, without overlap. Format:
// docs/formats/sharded-snapshot.md.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre {

inline constexpr int64_t kSnapshotManifestVersion = 1;
inline constexpr std::string_view kSnapshotManifestName = "manifest.json";
// The largest manifest. The size is checked before the text is parsed.
inline constexpr size_t kMaxSnapshotManifestBytes = size_t{256} << 20;

struct ManifestFile {
  std::string name;
  uint64_t bytes = 0;

  friend bool operator==(const ManifestFile&, const ManifestFile&) = default;
};

// The part of a tensor that one file has: along each dimension the elements offsets[dim] to
// offsets[dim] + sizes[dim] - 1. A file has at most one piece of a tensor; name_in_files() is its
// name there.
struct ManifestPiece {
  size_t file = 0;  // the index of the file in SnapshotManifest::files
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;

  friend bool operator==(const ManifestPiece&, const ManifestPiece&) = default;
};

struct ManifestTensor {
  std::string name;  // the name of the parameter or buffer
  // The name of a state of the parameter's optimizer; empty for the tensor itself.
  std::string state;
  // True if the state is one value for the whole parameter, such as the number of steps. Otherwise
  // it has the shape of the parameter.
  bool is_scalar = false;
  std::string dtype;  // the dtype's name in safetensors, for example "F32"
  std::vector<int64_t> shape;
  std::vector<ManifestPiece> pieces;

  friend bool operator==(const ManifestTensor&, const ManifestTensor&) = default;
};

struct SnapshotManifest {
  int64_t step = 0;
  int64_t world_size = 1;
  // The strategy and mesh of the run that saved the snapshot. They are information for people;
  // loading does not depend on them.
  std::string strategy;
  std::string mesh;
  std::vector<ManifestFile> files;
  std::vector<ManifestTensor> tensors;
  std::string extra = "{}";  // a JSON object with data of the program that saved the snapshot

  friend bool operator==(const SnapshotManifest&, const SnapshotManifest&) = default;
};

// Returns the tensor's name in the files: "fc.weight", or "state.fc.weight.exp_avg", as
// torch.distributed.checkpoint flattens an optimizer's state.
CADRE_EXPORT std::string name_in_files(const ManifestTensor& tensor);

// Checks that the pieces lie within the shape, do not overlap and cover it; if not, returns
// kCorruption, which says what is wrong. A tensor without elements must have exactly one piece,
// which has none either.
CADRE_EXPORT Status check_pieces(std::span<const int64_t> shape,
                                 std::span<const ManifestPiece> pieces);

CADRE_EXPORT Result<SnapshotManifest> parse_snapshot_manifest(std::string_view text);
// Returns kInvalidArgument if a text is not UTF-8 or `extra` is not a JSON object.
CADRE_EXPORT Result<std::string> encode_snapshot_manifest(const SnapshotManifest& manifest);

}  // namespace cadre
