#include "cadre/tensor/mesh/placement.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/mesh/layout.h"

namespace cadre {
namespace {

[[noreturn]] void refuse_placements(const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, problem);
}

// Returns whether one list of placements may contain Partials of both reductions. Sum and mean may
// be combined, because they commute.
bool may_meet(ReduceOp a, ReduceOp b) {
  const auto is_linear = [](ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kAvg; };
  return a == b || (is_linear(a) && is_linear(b));
}

}  // namespace

std::string to_string(const Placement& placement) {
  if (const Shard* shard = placement.shard()) return format("Shard({})", shard->dim);
  if (const Partial* partial = placement.partial()) return format("Partial({})", partial->op);
  return "Replicate()";
}

std::string to_string(std::span<const Placement> placements) {
  std::string text;
  for (const Placement& placement : placements) {
    text += (text.empty() ? "" : ", ") + to_string(placement);
  }
  return "[" + text + "]";
}

std::vector<Placement> normalized(std::span<const Placement> placements, size_t num_axes,
                                  int64_t num_dims) {
  if (placements.size() != num_axes) {
    refuse_placements(format("{} are {} placements for a mesh of {} axes; give one for each axis",
                             to_string(placements), placements.size(), num_axes));
  }
  std::vector<Placement> result;
  std::optional<ReduceOp> first;
  for (const Placement& placement : placements) {
    if (const Shard* shard = placement.shard()) {
      if (num_dims == 0) {
        refuse_placements(
            format("{}: {} is for a tensor that has dimensions, but this one has none; use "
                   "Replicate()",
                   to_string(placements), to_string(placement)));
      }
      if (shard->dim < -num_dims || shard->dim >= num_dims) {
        refuse_placements(
            format("{}: {} is for a tensor of more than {} dimensions; use a dim "
                   "from {} to {}, or Replicate()",
                   to_string(placements), to_string(placement), num_dims, -num_dims, num_dims - 1));
      }
      result.emplace_back(Shard(shard->dim < 0 ? shard->dim + num_dims : shard->dim));
      continue;
    }
    if (const Partial* partial = placement.partial()) {
      if (partial->op == ReduceOp::kPremulSum) {
        refuse_placements(
            format("{}: each rank has a factor of its own in premul_sum, which a "
                   "placement does not hold; multiply first and use Partial(sum)",
                   to_string(placements)));
      }
      if (first && !may_meet(*first, partial->op)) {
        refuse_placements(
            format("{}: the result of {} and {} on two axes depends on which is "
                   "reduced first; reduce one of them before",
                   to_string(placements), *first, partial->op));
      }
      first = partial->op;
    }
    result.push_back(placement);
  }
  return result;
}

int64_t Box::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

Box local_box(std::span<const int64_t> sizes, std::span<const int> mesh_shape,
              std::span<const int> coordinates, std::span<const Placement> placements) {
  if (std::ranges::any_of(sizes, [](int64_t size) { return size < 0; })) {
    refuse_placements(format("{} are not the sizes of a tensor; pass sizes >= 0", list_of(sizes)));
  }
  const auto num_dims = static_cast<int64_t>(sizes.size());
  const std::vector<Placement> checked = normalized(placements, mesh_shape.size(), num_dims);
  if (coordinates.size() != mesh_shape.size()) {
    refuse_placements(format("local_box: {} coordinates for a mesh of {} axes; give one for each",
                             coordinates.size(), mesh_shape.size()));
  }
  for (size_t axis = 0; axis < mesh_shape.size(); ++axis) {
    if (coordinates[axis] >= 0 && coordinates[axis] < mesh_shape[axis]) continue;
    refuse_placements(
        format("local_box: coordinate {} of axis {} is not in 0 .. {} of the mesh; pass "
               "the coordinates of one of its ranks",
               coordinates[axis], axis, mesh_shape[axis] - 1));
  }
  return PlacementLayout(mesh_shape, checked, sizes.size()).box_of(sizes, coordinates);
}

}  // namespace cadre
