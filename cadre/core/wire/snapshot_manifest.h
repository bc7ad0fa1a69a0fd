// The manifest of a sharded snapshot: which file holds which part of which tensor.
//
// Threads: plain values. Blocking: never. Lifetime: a manifest owns its texts.
// Errors: kCorruption with what is wrong for a text that is not a valid manifest, kInvalidArgument
// for one of another version. An accepted manifest names files of its own folder only, and the
// pieces of each tensor cover it exactly, without overlap. Format:
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
// A longer text is an error before it is parsed.
inline constexpr size_t kMaxSnapshotManifestBytes = size_t{256} << 20;

struct ManifestFile {
  std::string name;
  uint64_t bytes = 0;

  friend bool operator==(const ManifestFile&, const ManifestFile&) = default;
};

// The range of elements along each dimension of the tensor goes from offsets[dim] to offsets[dim] +
// sizes[dim] - 1. A file has at most one piece of the tensor, under the tensor's name.
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
  // The state has one value for the whole parameter, such as the number of steps. Otherwise its
  // shape is the parameter's.
  bool is_scalar = false;
  std::string dtype;  // the dtype's name in safetensors, for example "F32"
  std::vector<int64_t> shape;
  std::vector<ManifestPiece> pieces;

  friend bool operator==(const ManifestTensor&, const ManifestTensor&) = default;
};

struct SnapshotManifest {
  int64_t step = 0;
  int64_t world_size = 1;
  // Properties of the run that wrote the snapshot. People read them; loading does not depend on
  // them.
  std::string strategy;
  std::string mesh;
  std::vector<ManifestFile> files;
  std::vector<ManifestTensor> tensors;
  std::string extra = "{}";  // a JSON object, which the program that saved the snapshot has added

  friend bool operator==(const SnapshotManifest&, const SnapshotManifest&) = default;
};

// Returns the tensor's name in the files: "fc.weight", or "state.fc.weight.exp_avg", as
// torch.distributed.checkpoint flattens an optimizer's state.
CADRE_EXPORT std::string name_in_files(const ManifestTensor& tensor);

// Returns kCorruption, with what is wrong, unless the pieces lie within the shape, do not overlap
// and cover it. A tensor without elements has exactly one piece, without elements.
CADRE_EXPORT Status check_pieces(std::span<const int64_t> shape,
                                 std::span<const ManifestPiece> pieces);

CADRE_EXPORT Result<SnapshotManifest> parse_snapshot_manifest(std::string_view text);
// Returns kInvalidArgument for a text that is not UTF-8, and for an `extra` that is no JSON object.
CADRE_EXPORT Result<std::string> encode_snapshot_manifest(const SnapshotManifest& manifest);

}  // namespace cadre
