// Computes in one process, with torch's chunk, sum, mean, amax, amin and prod, the part of a tensor
// that each rank of a mesh holds. The tests of DTensor compare with it.
//
// Threads: plain functions. Blocking: never. Errors: those of torch.
#pragma once

#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cadre/tensor/mesh/placement.h"

namespace cadre::testing {

inline int num_ranks_of(const std::vector<int>& shape) {
  int number = 1;
  for (const int size : shape) number *= size;
  return number;
}

// Returns the coordinates of the rank in row-major order.
inline std::vector<int> coordinates_in(const std::vector<int>& shape, int rank) {
  std::vector<int> coordinates(shape.size());
  for (size_t axis = shape.size(); axis-- > 0;) {
    coordinates[axis] = rank % shape[axis];
    rank /= shape[axis];
  }
  return coordinates;
}

// Returns the part of a tensor that the rank holds. Partial axes count as replicated.
inline torch::Tensor reference_part(torch::Tensor part, const std::vector<int>& shape,
                                    const std::vector<int>& coordinates,
                                    const std::vector<Placement>& placements) {
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    const Shard* shard = placements[axis].shard();
    if (shard == nullptr) continue;
    const auto chunks = part.chunk(shape[axis], shard->dim);
    const auto index = static_cast<size_t>(coordinates[axis]);
    part = index < chunks.size() ? chunks[index] : part.narrow(shard->dim, 0, 0);
  }
  return part;
}

// Returns the sizes of a tensor that stacks the operands of all ranks, for a DTensor with these
// sizes and placements. It has one leading dimension for each mesh axis: of the size of the axis if
// the placement is Partial, otherwise of size 1.
inline std::vector<int64_t> operand_sizes(const std::vector<int64_t>& sizes,
                                          const std::vector<int>& shape,
                                          const std::vector<Placement>& placements) {
  std::vector<int64_t> all;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    all.push_back(placements[axis].partial() != nullptr ? shape[axis] : 1);
  }
  all.insert(all.end(), sizes.begin(), sizes.end());
  return all;
}

inline torch::Tensor operand_of(torch::Tensor operands, const std::vector<int>& coordinates,
                                const std::vector<Placement>& placements) {
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    operands = operands.select(0, placements[axis].partial() != nullptr ? coordinates[axis] : 0);
  }
  return operands;
}

inline torch::Tensor fold(const torch::Tensor& operands, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return operands.sum(0, false, operands.scalar_type());
    case ReduceOp::kAvg:
      return operands.mean(0);
    case ReduceOp::kMin:
      return operands.amin(0);
    case ReduceOp::kMax:
      return operands.amax(0);
    case ReduceOp::kProduct:
      return operands.prod(0, false, operands.scalar_type());
    default:
      break;
  }
  torch::Tensor result = operands[0];
  for (int64_t i = 1; i < operands.size(0); ++i) {
    if (op == ReduceOp::kBand) result = result & operands[i];
    if (op == ReduceOp::kBor) result = result | operands[i];
    if (op == ReduceOp::kBxor) result = result ^ operands[i];
  }
  return result;
}

// Returns the whole tensor: reduces the operands along all Partial axes.
inline torch::Tensor value_of(torch::Tensor operands, const std::vector<Placement>& placements) {
  for (const Placement& placement : placements) {
    const Partial* partial = placement.partial();
    operands = partial != nullptr ? fold(operands, partial->op) : operands[0];
  }
  return operands;
}

// Returns the gradient of (weights * value_of(operands)).sum() with respect to the operands, by
// autograd in one process.
inline torch::Tensor operand_gradients(const torch::Tensor& weights, const std::vector<int>& shape,
                                       const std::vector<Placement>& placements) {
  const torch::Tensor operands =
      torch::zeros(operand_sizes(weights.sizes().vec(), shape, placements), weights.options())
          .requires_grad_(true);
  return torch::autograd::grad({(weights * value_of(operands, placements)).sum()}, {operands})[0];
}

}  // namespace cadre::testing
