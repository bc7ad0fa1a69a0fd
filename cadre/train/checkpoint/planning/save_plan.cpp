#include "cadre/train/checkpoint/planning/save_plan.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/safetensors_header.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/mesh/layout.h"

namespace cadre {
namespace {

constexpr size_t kMaxTextBytes = size_t{1} << 20;

void write_integers(wire::ByteWriter& out, std::span<const int64_t> values) {
  out.integer(static_cast<uint32_t>(values.size()));
  for (const int64_t value : values) out.integer(value);
}

std::vector<int64_t> read_integers(wire::ByteReader& in) {
  std::vector<int64_t> values;
  const auto size = in.integer<uint32_t>();
  for (uint32_t i = 0; i < size && in.ok(); ++i) values.push_back(in.integer<int64_t>());
  return values;
}

struct BoxOrder {
  bool operator()(const Box& a, const Box& b) const {
    return std::tie(a.offsets, a.sizes) < std::tie(b.offsets, b.sizes);
  }
};

// Maps each box of a tensor to the ranks that hold it, in ascending order.
using Holders = std::map<Box, std::vector<int>, BoxOrder>;

// What is known of one tensor: the boxes that ranks hold, and the ranks that have its name, in
// ascending order.
struct Known {
  const HeldTensor* first = nullptr;
  int first_rank = 0;
  Holders boxes;
  std::vector<int> ranks;
};

bool is_within(const Box& box, std::span<const int64_t> shape) {
  if (box.offsets.size() != shape.size() || box.sizes.size() != shape.size()) return false;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const int64_t offset = box.offsets[dim];
    const int64_t size = box.sizes[dim];
    if (offset < 0 || size < 0 || offset > shape[dim] || size > shape[dim] - offset) return false;
  }
  return true;
}

// Returns boxes that cover the elements of `box` outside of `taken`: for each dim, the slab before
// the intersection and the slab after it.
std::vector<Box> without(Box box, const Box& taken) {
  const Box common = intersection(box, taken);
  if (common.numel() == 0) return {std::move(box)};
  std::vector<Box> rest;
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    const int64_t end = box.offsets[dim] + box.sizes[dim];
    const int64_t common_end = common.offsets[dim] + common.sizes[dim];
    for (const auto& [from, to] :
         {std::pair(box.offsets[dim], common.offsets[dim]), std::pair(common_end, end)}) {
      if (from == to) continue;
      Box slab = box;
      slab.offsets[dim] = from;
      slab.sizes[dim] = to - from;
      rest.push_back(std::move(slab));
    }
    box.offsets[dim] = common.offsets[dim];
    box.sizes[dim] = common.sizes[dim];
  }
  return rest;
}

// Returns a rank that holds two boxes with common elements; nullopt if there is none.
std::optional<int> find_rank_with_overlap(const Holders& boxes) {
  for (auto a = boxes.begin(); a != boxes.end(); ++a) {
    for (auto b = std::next(a); b != boxes.end(); ++b) {
      if (intersection(a->first, b->first).numel() == 0) continue;
      const auto both = std::ranges::find_first_of(a->second, b->second);
      if (both != a->second.end()) return *both;
    }
  }
  return std::nullopt;
}

// Cuts boxes that overlap into disjoint ones that cover the same elements, each with all ranks that
// hold it. Boxes of different ranks overlap if the ranks divide a tensor in several ways: for
// example into flat shards along one mesh axis, where the flat buffers differ in size along another
// axis. Larger boxes are cut and small ones stay whole: more ranks hold the elements of small
// boxes, so the work of writing them is divided better. The cost is quadratic in the number of
// boxes, which is small, because most flat shards contain no element of a given tensor.
Holders cut_apart(const Holders& overlapping) {
  std::vector<Box> by_size;
  for (const auto& [box, ranks] : overlapping) by_size.push_back(box);
  std::ranges::stable_sort(by_size, {}, &Box::numel);
  std::vector<Box> taken;
  for (const Box& box : by_size) {
    std::vector<Box> rest = {box};
    for (const Box& earlier : taken) {
      std::vector<Box> left;
      for (Box& part : rest) std::ranges::move(without(part, earlier), std::back_inserter(left));
      rest = std::move(left);
    }
    taken.insert(taken.end(), rest.begin(), rest.end());
  }
  Holders disjoint;
  for (const Box& part : taken) {
    std::vector<int>& ranks = disjoint[part];
    for (const auto& [box, holders] : overlapping) {
      if (intersection(box, part) == part)
        ranks.insert(ranks.end(), holders.begin(), holders.end());
    }
    std::ranges::sort(ranks);
  }
  return disjoint;
}

Error mismatch(const Known& known, const HeldTensor& other, int rank) {
  const ManifestTensor& a = known.first->tensor;
  const ManifestTensor& b = other.tensor;
  if (a.dtype == b.dtype && a.shape == b.shape && a.is_scalar == b.is_scalar) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("'{}' has other values on rank {} than on rank {}; a scalar of an "
                               "optimizer's state must be equal on all ranks",
                               name_in_files(a), rank, known.first_rank));
  }
  return Error(
      ErrorCode::kInvalidArgument,
      cadre::format("'{}' is {} {} on rank {}, but {} {} on rank {}", name_in_files(a), a.dtype,
                    list_of(a.shape), known.first_rank, b.dtype, list_of(b.shape), rank));
}

// Returns one of `size` ranks that does not have the tensor's name; nullopt if all have it. Also
// returns nullopt for a state of an optimizer, because a rank has states only for its own
// parameters.
std::optional<int> rank_without(const Known& known, size_t size) {
  if (!known.first->tensor.state.empty()) return std::nullopt;
  for (int rank = 0; rank < static_cast<int>(size); ++rank) {
    if (!std::ranges::binary_search(known.ranks, rank)) return rank;
  }
  return std::nullopt;
}

Error missing_name(const Known& known, int rank) {
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("'{}' is a tensor of the model on rank {}, but not on rank {}, which "
                             "could not load the snapshot: all ranks need the same names of "
                             "parameters and buffers; a rank that holds no elements of a "
                             "parameter lists it without boxes",
                             known.first->tensor.name, known.first_rank, rank));
}

// Checks that no two states get the same name in the files: the name of a state is the name of the
// parameter and the name of the field, joined by a dot, as torch.distributed.checkpoint does. 'b'
// of 'w.a' and 'a.b' of 'w' would both become 'w.a.b'.
Status check_names_apart(const std::map<std::pair<std::string, std::string>, Known>& tensors) {
  std::map<std::string, const ManifestTensor*> by_name;
  for (const auto& [key, known] : tensors) {
    const ManifestTensor& tensor = known.first->tensor;
    if (tensor.state.empty()) continue;
    const auto [other, is_new] = by_name.emplace(name_in_files(tensor), &tensor);
    if (is_new) continue;
    return Error(
        ErrorCode::kInvalidArgument,
        cadre::format("the states '{}' of '{}' and '{}' of '{}' would have one name in the "
                      "files, '{}'; rename one of the parameters",
                      other->second->state, other->second->name, tensor.state, tensor.name,
                      other->first));
  }
  return {};
}

bool is_same(const HeldTensor& a, const HeldTensor& b) {
  return a.tensor == b.tensor && a.value == b.value;
}

uint64_t bytes_of(const ManifestTensor& tensor, const Box& box) {
  return static_cast<uint64_t>(box.numel()) * wire::safetensors_dtype_bytes(tensor.dtype);
}

// Decides which rank writes which box to which file.
class Planner {
 public:
  explicit Planner(size_t world_size) : load_(world_size) {}

  Status add(const Known& known) {
    const ManifestTensor& tensor = known.first->tensor;
    const Status as_held = check_cover(tensor, known.boxes);
    if (as_held.ok()) {
      assign(tensor, known.boxes);
      return {};
    }
    const auto fits = [&](const auto& item) { return is_within(item.first, tensor.shape); };
    if (!std::ranges::all_of(known.boxes, fits)) return as_held;
    if (const auto rank = find_rank_with_overlap(known.boxes)) {
      return Error(
          ErrorCode::kInvalidArgument,
          cadre::format(
              "{}: two of the boxes of rank {} overlap; the boxes of a rank must not overlap",
              quoted_name(tensor), *rank));
    }
    const Holders boxes = cut_apart(known.boxes);
    CADRE_RETURN_IF_ERROR(check_cover(tensor, boxes));
    assign(tensor, boxes);
    return {};
  }

  SavePlan take() {
    std::map<std::pair<int, bool>, size_t> num_files;
    for (const auto& [key, file] : files_) ++num_files[{std::get<0>(key), std::get<1>(key)}];
    for (const auto& [key, file] : files_) {
      const auto& [writer, is_optimizer, number] = key;
      plan_.manifest.files[file].name = cadre::format(
          "shard-{:05}-{}-{:05}-of-{:05}.safetensors", writer + 1,
          is_optimizer ? "optimizer" : "model", number + 1, num_files[{writer, is_optimizer}]);
    }
    plan_.manifest.world_size = static_cast<int64_t>(load_.size());
    return std::move(plan_);
  }

 private:
  static std::string quoted_name(const ManifestTensor& tensor) {
    return cadre::format("'{}'", name_in_files(tensor));
  }

  // Checks that the boxes are disjoint and cover the whole tensor.
  Status check_cover(const ManifestTensor& tensor, const Holders& boxes) const {
    std::vector<ManifestPiece> pieces;
    for (const auto& [box, holders] : boxes) {
      pieces.push_back({.offsets = box.offsets, .sizes = box.sizes});
    }
    const Status status = check_pieces(tensor.shape, pieces);
    if (status.ok()) return {};
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("{}: {}; {}", quoted_name(tensor), status.error().message(),
                               load_.size() == 1
                                   ? "without a group this process must hold the whole tensor: "
                                     "pass the group of the ranks that hold its parts"
                                   : "all ranks together must hold the whole tensor"));
  }

  void assign(ManifestTensor tensor, const Holders& boxes) {
    const size_t index = plan_.manifest.tensors.size();
    const bool is_optimizer = !tensor.state.empty();
    // Maps a rank to the number of pieces of this tensor that it writes.
    std::map<int, size_t> num_pieces;
    for (const auto& [box, holders] : boxes) {
      const int writer = *std::ranges::min_element(
          holders, {}, [this](int rank) { return load_[static_cast<size_t>(rank)]; });
      load_[static_cast<size_t>(writer)] += bytes_of(tensor, box);
      const size_t file = file_of(writer, is_optimizer, num_pieces[writer]++);
      plan_.files[file].tensors.push_back(index);
      tensor.pieces.push_back({.file = file, .offsets = box.offsets, .sizes = box.sizes});
    }
    plan_.manifest.tensors.push_back(std::move(tensor));
  }

  size_t file_of(int writer, bool is_optimizer, size_t number) {
    const auto [found, is_new] =
        files_.try_emplace({writer, is_optimizer, number}, plan_.files.size());
    if (is_new) {
      plan_.files.push_back({.writer = writer, .is_optimizer = is_optimizer, .tensors = {}});
      plan_.manifest.files.push_back({});
    }
    return found->second;
  }

  std::vector<uint64_t> load_;  // load_[r] is the number of bytes that rank r has to write
  std::map<std::tuple<int, bool, size_t>, size_t> files_;
  SavePlan plan_;
};

}  // namespace

std::string encode_held(std::span<const HeldTensor> held) {
  wire::ByteWriter out;
  for (const auto& [tensor, boxes, value] : held) {
    for (const std::string* text : {&tensor.name, &tensor.state, &tensor.dtype, &value}) {
      out.text(*text);
    }
    out.integer(static_cast<uint8_t>(tensor.is_scalar));
    write_integers(out, tensor.shape);
    out.integer(static_cast<uint32_t>(boxes.size()));
    for (const Box& box : boxes) {
      write_integers(out, box.offsets);
      write_integers(out, box.sizes);
    }
  }
  return std::string(wire::as_text(out.bytes()));
}

Result<std::vector<HeldTensor>> decode_held(std::string_view text) {
  wire::ByteReader in(wire::as_bytes(text));
  std::vector<HeldTensor> held;
  while (in.ok() && in.remaining() > 0) {
    HeldTensor item;
    ManifestTensor& tensor = item.tensor;
    for (std::string* part : {&tensor.name, &tensor.state, &tensor.dtype, &item.value}) {
      *part = in.text(kMaxTextBytes);
    }
    tensor.is_scalar = in.integer<uint8_t>() != 0;
    tensor.shape = read_integers(in);
    const auto num_boxes = in.integer<uint32_t>();
    for (uint32_t i = 0; i < num_boxes && in.ok(); ++i) {
      Box box{read_integers(in), {}};
      box.sizes = read_integers(in);
      item.boxes.push_back(std::move(box));
    }
    held.push_back(std::move(item));
  }
  if (!in.is_complete()) {
    return Error(ErrorCode::kInternal, "a rank's list of tensors for a snapshot is malformed");
  }
  return held;
}

Result<SavePlan> plan_save(std::span<const std::vector<HeldTensor>> by_rank) {
  // The key is (name of the state, name of the tensor).
  std::map<std::pair<std::string, std::string>, Known> tensors;
  for (size_t i = 0; i < by_rank.size(); ++i) {
    const int rank = static_cast<int>(i);
    for (const HeldTensor& held : by_rank[i]) {
      Known& known = tensors[{held.tensor.state, held.tensor.name}];
      if (known.first == nullptr) {
        known.first = &held;
        known.first_rank = rank;
      }
      if (!is_same(*known.first, held)) return mismatch(known, held, rank);
      for (const Box& box : held.boxes) known.boxes[box].push_back(rank);
      known.ranks.push_back(rank);
    }
  }
  for (const auto& [key, known] : tensors) {
    if (const auto rank = rank_without(known, by_rank.size())) return missing_name(known, *rank);
  }
  CADRE_RETURN_IF_ERROR(check_names_apart(tensors));
  Planner planner(by_rank.size());
  for (const auto& [key, known] : tensors) CADRE_RETURN_IF_ERROR(planner.add(known));
  return planner.take();
}

}  // namespace cadre
