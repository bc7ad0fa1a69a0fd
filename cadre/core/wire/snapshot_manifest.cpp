#include "cadre/core/wire/snapshot_manifest.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/safetensors_header.h"

namespace cadre {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kFormatName = "cadre sharded snapshot";
constexpr std::string_view kFileSuffix = ".safetensors";
constexpr size_t kMaxFileNameBytes = 255;
// The largest nesting of the JSON. The format itself has six levels; the rest is left to `extra`.
constexpr int kMaxDepth = 64;
// The largest number of pairs of pieces of one tensor that are compared. No layout of ranks comes
// near it.
constexpr uint64_t kMaxPairs = 200'000'000;

Error bad_manifest(const std::string& what) {
  return Error(ErrorCode::kCorruption, what);
}

// Thrown for an invalid manifest. If a field is missing or has a wrong type, nlohmann's library
// throws an exception of its own. parse_snapshot_manifest() converts both exceptions to a Result.
class Malformed : public std::exception {
 public:
  explicit Malformed(std::string what) : what_(std::move(what)) {}
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

// Returns the number of elements; nullopt if it does not fit into 63 bits.
std::optional<int64_t> elements_in(std::span<const int64_t> sizes) {
  if (std::ranges::find(sizes, 0) != sizes.end()) return 0;
  int64_t total = 1;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(total, size, &total)) return std::nullopt;
  }
  return total;
}

bool overlap(const ManifestPiece& a, const ManifestPiece& b) {
  for (size_t dim = 0; dim < a.sizes.size(); ++dim) {
    if (a.offsets[dim] + a.sizes[dim] <= b.offsets[dim] ||
        b.offsets[dim] + b.sizes[dim] <= a.offsets[dim]) {
      return false;
    }
  }
  return true;
}

// Returns the dimension along which the pieces begin at the largest number of different offsets.
size_t most_divided_dim(size_t num_dims, std::span<const ManifestPiece> pieces) {
  size_t best = 0;
  size_t most = 0;
  for (size_t dim = 0; dim < num_dims; ++dim) {
    std::set<int64_t> begins;
    for (const ManifestPiece& piece : pieces) begins.insert(piece.offsets[dim]);
    if (begins.size() > most) {
      most = begins.size();
      best = dim;
    }
  }
  return best;
}

// Checks that no two pieces overlap. Sorts them by their offset along one dimension, and compares
// each piece only with earlier ones that end behind its offset.
Status check_disjoint(size_t num_dims, std::span<const ManifestPiece> pieces) {
  if (pieces.size() < 2) return {};
  if (num_dims == 0) return bad_manifest("it has several pieces, but only one element");
  const size_t dim = most_divided_dim(num_dims, pieces);
  std::vector<const ManifestPiece*> sorted;
  for (const ManifestPiece& piece : pieces) sorted.push_back(&piece);
  std::ranges::sort(sorted, {}, [dim](const ManifestPiece* piece) { return piece->offsets[dim]; });
  std::vector<const ManifestPiece*> open;
  uint64_t num_pairs = 0;
  for (const ManifestPiece* piece : sorted) {
    std::erase_if(open, [&](const ManifestPiece* earlier) {
      return earlier->offsets[dim] + earlier->sizes[dim] <= piece->offsets[dim];
    });
    num_pairs += open.size();
    if (num_pairs > kMaxPairs)
      return bad_manifest(cadre::format("it has {} pieces, which are too many", pieces.size()));
    for (const ManifestPiece* earlier : open) {
      if (overlap(*earlier, *piece)) return bad_manifest("two of its pieces overlap");
    }
    open.push_back(piece);
  }
  return {};
}

Status check_piece(std::span<const int64_t> shape, const ManifestPiece& piece) {
  if (piece.offsets.size() != shape.size() || piece.sizes.size() != shape.size()) {
    return bad_manifest(
        cadre::format("a piece has {} offsets and {} sizes, but the tensor {} dimensions",
                      piece.offsets.size(), piece.sizes.size(), shape.size()));
  }
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const int64_t offset = piece.offsets[dim];
    const int64_t size = piece.sizes[dim];
    if (offset < 0 || size < 0 || offset > shape[dim] || size > shape[dim] - offset) {
      return bad_manifest(
          cadre::format("a piece has the elements [{}, {} + {}) of a dimension of size {}", offset,
                        offset, size, shape[dim]));
    }
  }
  return {};
}

// Returns whether the name is that of a file in the snapshot's own folder, on every file system.
bool is_plain_file_name(std::string_view name) {
  const auto is_plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.';
  };
  return name.size() <= kMaxFileNameBytes && name.size() > kFileSuffix.size() &&
         !name.starts_with('.') && name.ends_with(kFileSuffix) &&
         std::ranges::all_of(name, is_plain);
}

std::vector<int64_t> integers(const Json& json) {
  std::vector<int64_t> values;
  for (const Json& item : json.get_ref<const Json::array_t&>()) {
    // get<int64_t>() would accept a fraction, and would overflow for a number of 64 bits.
    const bool fits =
        item.is_number_integer() &&
        (!item.is_number_unsigned() ||
         item.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
    if (!fits) throw Malformed(cadre::format("{} is no number of elements", item.dump()));
    values.push_back(item.get<int64_t>());
  }
  return values;
}

int64_t integer(const Json& json, const char* key) {
  return integers(Json::array({json.at(key)})).front();
}

std::vector<ManifestFile> read_files(const Json& json) {
  std::vector<ManifestFile> files;
  std::set<std::string_view> names;
  files.reserve(json.size());  // so that `files` never moves: the set has views of the names
  for (const Json& item : json.get_ref<const Json::array_t&>()) {
    ManifestFile file{.name = item.at("name").get<std::string>()};
    const int64_t bytes = integer(item, "bytes");
    if (!is_plain_file_name(file.name)) {
      throw Malformed(
          cadre::format("'{}' is not the plain name of a .safetensors file",
                        Json(file.name).dump(-1, ' ', true, Json::error_handler_t::replace)));
    }
    if (bytes < 0) throw Malformed(cadre::format("file {} has {} bytes", file.name, bytes));
    file.bytes = static_cast<uint64_t>(bytes);
    files.push_back(std::move(file));
    if (!names.insert(files.back().name).second) {
      throw Malformed(cadre::format("file {} is listed twice", files.back().name));
    }
  }
  return files;
}

void check_tensor(const ManifestTensor& tensor, size_t num_files) {
  const size_t element_bytes = wire::safetensors_dtype_bytes(tensor.dtype);
  if (element_bytes == 0) throw Malformed("it has an unknown dtype");
  if (std::ranges::any_of(tensor.shape, [](int64_t size) { return size < 0; })) {
    throw Malformed("its shape has a negative size");
  }
  const auto numel = elements_in(tensor.shape);
  if (!numel ||
      *numel > std::numeric_limits<int64_t>::max() / static_cast<int64_t>(element_bytes)) {
    throw Malformed("its shape has more bytes than 63 bits can count");
  }
  std::set<size_t> files;
  for (const ManifestPiece& piece : tensor.pieces) {
    if (piece.file >= num_files) {
      throw Malformed(
          cadre::format("a piece is in file {} of {}, counted from 0", piece.file, num_files));
    }
    if (!files.insert(piece.file).second) throw Malformed("one file has two pieces of it");
  }
  const Status status = check_pieces(tensor.shape, tensor.pieces);
  if (!status.ok()) throw Malformed(status.error().message());
}

ManifestTensor read_tensor(const Json& json, const std::string& name, const std::string& state,
                           size_t num_files) {
  ManifestTensor tensor{.name = name, .state = state};
  try {
    tensor.is_scalar = json.contains("scalar") && json.at("scalar").get<bool>();
    tensor.dtype = json.at("dtype").get<std::string>();
    tensor.shape = integers(json.at("shape"));
    for (const Json& item : json.at("pieces").get_ref<const Json::array_t&>()) {
      const int64_t file = integer(item, "file");
      if (file < 0) throw Malformed(cadre::format("a piece is in file {}", file));
      tensor.pieces.push_back({.file = static_cast<size_t>(file),
                               .offsets = integers(item.at("offsets")),
                               .sizes = integers(item.at("sizes"))});
    }
    check_tensor(tensor, num_files);
  } catch (const std::exception& error) {
    throw Malformed(cadre::format("tensor '{}': {}", name_in_files(tensor), error.what()));
  }
  return tensor;
}

SnapshotManifest read_manifest(const Json& json) {
  SnapshotManifest manifest;
  manifest.step = integer(json, "step");
  manifest.world_size = integer(json, "world_size");
  manifest.strategy = json.at("strategy").get<std::string>();
  manifest.mesh = json.at("mesh").get<std::string>();
  manifest.files = read_files(json.at("files"));
  const size_t num_files = manifest.files.size();
  for (const auto& [name, tensor] : json.at("model").get_ref<const Json::object_t&>()) {
    manifest.tensors.push_back(read_tensor(tensor, name, "", num_files));
  }
  for (const auto& [name, states] : json.at("optimizer").get_ref<const Json::object_t&>()) {
    for (const auto& [state, tensor] : states.get_ref<const Json::object_t&>()) {
      if (state.empty()) throw Malformed(cadre::format("a state of '{}' has no name", name));
      manifest.tensors.push_back(read_tensor(tensor, name, state, num_files));
    }
  }
  manifest.extra = Json(json.at("extra").get_ref<const Json::object_t&>()).dump();
  return manifest;
}

Json parse_json(std::string_view text, int max_depth) {
  return Json::parse(text, [max_depth](int depth, Json::parse_event_t, Json&) {
    if (depth > max_depth) throw Malformed("it is nested too deeply");
    return true;
  });
}

Json json_of(const ManifestTensor& tensor) {
  Json json = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"pieces", Json::array()}};
  if (tensor.is_scalar) json["scalar"] = true;
  for (const ManifestPiece& piece : tensor.pieces) {
    json["pieces"].push_back(
        {{"file", piece.file}, {"offsets", piece.offsets}, {"sizes", piece.sizes}});
  }
  return json;
}

}  // namespace

std::string name_in_files(const ManifestTensor& tensor) {
  if (tensor.state.empty()) return tensor.name;
  return cadre::format("state.{}.{}", tensor.name, tensor.state);
}

Status check_pieces(std::span<const int64_t> shape, std::span<const ManifestPiece> pieces) {
  const auto numel = elements_in(shape);
  if (!numel) return bad_manifest("its shape has more elements than 63 bits can count");
  int64_t covered = 0;
  for (const ManifestPiece& piece : pieces) {
    CADRE_RETURN_IF_ERROR(check_piece(shape, piece));
    // The piece lies within the shape, so its number of elements fits into 63 bits, too.
    const int64_t size = *elements_in(piece.sizes);
    if (size == 0 && (*numel != 0 || pieces.size() > 1)) return bad_manifest("a piece is empty");
    if (__builtin_add_overflow(covered, size, &covered)) return bad_manifest("its pieces overlap");
  }
  if (covered < *numel || pieces.empty()) {
    return bad_manifest(cadre::format("its pieces cover {} of {} elements", covered, *numel));
  }
  CADRE_RETURN_IF_ERROR(check_disjoint(shape.size(), pieces));
  if (covered > *numel) return bad_manifest("its pieces overlap");
  return {};
}

Result<SnapshotManifest> parse_snapshot_manifest(std::string_view text) {
  if (text.size() > kMaxSnapshotManifestBytes) {
    return bad_manifest(cadre::format("it has {} bytes; at most {} are allowed", text.size(),
                                      kMaxSnapshotManifestBytes));
  }
  try {
    const Json json = parse_json(text, kMaxDepth);
    if (json.at("format") != kFormatName) throw Malformed("it is no manifest of a snapshot");
    const int64_t version = integer(json, "version");
    if (version != kSnapshotManifestVersion) {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("it has version {}; this program reads version {}", version,
                                 kSnapshotManifestVersion));
    }
    return read_manifest(json);
  } catch (const std::exception& error) {
    return bad_manifest(error.what());
  }
}

Result<std::string> encode_snapshot_manifest(const SnapshotManifest& manifest) {
  try {
    nlohmann::ordered_json json = {
        {"format", kFormatName},         {"version", kSnapshotManifestVersion},
        {"step", manifest.step},         {"world_size", manifest.world_size},
        {"strategy", manifest.strategy}, {"mesh", manifest.mesh},
        {"files", Json::array()},        {"model", Json::object()},
        {"optimizer", Json::object()},   {"extra", parse_json(manifest.extra, kMaxDepth - 1)}};
    if (!json["extra"].is_object()) throw Malformed("`extra` is no JSON object");
    for (const ManifestFile& file : manifest.files) {
      json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}});
    }
    for (const ManifestTensor& tensor : manifest.tensors) {
      auto& place = tensor.state.empty() ? json["model"][tensor.name]
                                         : json["optimizer"][tensor.name][tensor.state];
      place = json_of(tensor);
    }
    std::string text = json.dump() + "\n";
    if (text.size() > kMaxSnapshotManifestBytes) {
      throw Malformed(cadre::format("it would have {} bytes; at most {} are allowed", text.size(),
                                    kMaxSnapshotManifestBytes));
    }
    return text;
  } catch (const std::exception& error) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("the manifest cannot be written: {}", error.what()));
  }
}

}  // namespace cadre
