// Selects the rows of a batch for one rank, or for one of the parts in which a rank accumulates
// gradients.
//
// Threads: pure functions. Lifetime: the selected rows share the batch's memory. Errors:
// kInvalidArgument if the tensors of a batch have different numbers of rows. A batch is a tensor, a
// cadre::Batch, or tuples, pairs, vectors, maps and optionals of tensors. A 0-dim tensor has no
// rows, so every rank and part gets all of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/parallel/shard/flat_layout.h"
#include "cadre/tensor/hooks/map_tensors.h"
#include "cadre/train/data/dataset.h"

namespace cadre::verify {

template <typename B>
concept BatchOfRows = std::is_same_v<B, Batch> || wrap::kHoldsReplaceableTensors<B>;

template <BatchOfRows B, typename Function>
void replace_batch_tensors(B& batch, Function&& function) {
  if constexpr (std::is_same_v<B, Batch>) {
    wrap::replace_tensors(batch.data, function);
    wrap::replace_tensors(batch.target, function);
  } else {
    wrap::replace_tensors(batch, function);
  }
}

template <BatchOfRows B>
int64_t num_rows_of_batch(B batch) {
  int64_t num_rows = -1;
  std::vector<at::Tensor> tensors;
  replace_batch_tensors(batch, [&tensors](const at::Tensor& tensor) {
    tensors.push_back(tensor);
    return tensor;
  });
  for (const at::Tensor& tensor : tensors) {
    if (tensor.dim() == 0) continue;
    if (num_rows < 0) num_rows = tensor.size(0);
    if (tensor.size(0) == num_rows) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "verify_strategies: make_batch() returned tensors of " + std::to_string(num_rows) +
                    " and of " + std::to_string(tensor.size(0)) +
                    " rows (size(0)); ranks divide a batch by rows, so all its tensors need the "
                    "same number");
  }
  if (num_rows > 0) return num_rows;
  throw Error(ErrorCode::kInvalidArgument,
              "verify_strategies: make_batch() returned a batch without rows");
}

template <BatchOfRows B>
B rows_of_batch(B batch, const FlatRange& rows) {
  replace_batch_tensors(batch, [&rows](const at::Tensor& tensor) {
    return tensor.dim() == 0 ? tensor : tensor.narrow(0, rows.begin, rows.size());
  });
  return batch;
}

// Returns whether all tensors of two batches are equal.
template <BatchOfRows B>
bool have_equal_rows(B first, B second) {
  std::vector<at::Tensor> tensors;
  const auto collect = [&tensors](const at::Tensor& tensor) {
    tensors.push_back(tensor);
    return tensor;
  };
  replace_batch_tensors(first, collect);
  const size_t count = tensors.size();
  replace_batch_tensors(second, collect);
  if (tensors.size() != 2 * count) return false;
  for (size_t i = 0; i < count; ++i) {
    if (tensors[i].sizes() != tensors[count + i].sizes()) return false;
    if (!tensors[i].equal(tensors[count + i])) return false;
  }
  return true;
}

// Converts floating-point tensors to `dtype`.
template <BatchOfRows B>
B cast_batch(B batch, at::ScalarType dtype) {
  replace_batch_tensors(batch, [dtype](const at::Tensor& tensor) {
    return tensor.is_floating_point() ? tensor.to(dtype) : tensor;
  });
  return batch;
}

// Part `index` of the `count` consecutive parts into which rows are divided. The sizes of the parts
// differ by at most one; the last part is the largest.
struct RowsPart {
  int64_t index;
  int64_t count;
};
inline FlatRange rows_of_part(const FlatRange& rows, const RowsPart& part) {
  return {.begin = rows.begin + rows.size() * part.index / part.count,
          .end = rows.begin + rows.size() * (part.index + 1) / part.count};
}

// One forward and backward of a step on one rank.
struct PlannedBackward {
  FlatRange rows;         // the rows of the global batch whose mean loss this rank computes
  double weight = 1;      // the factor of that loss in the backward
  bool is_local = false;  // true: the backward runs under no_sync()
  // The rows of all ranks in this backward, as a share of the rows of the batch.
  double share_of_batch = 1;
};

// The forwards and backwards of a step on one rank, in their order.
struct PlannedStep {
  std::vector<PlannedBackward> backwards;
  // True if all backwards are local, so that reduce_gradients() must be called after the last one.
  bool is_reduced_at_end = false;
};

// Divides a global batch of `num_rows` rows evenly among ranks, and the share of each rank into
// `num_parts` backwards, of which only the last one is reduced.
inline PlannedStep plan_even_step(int64_t num_rows, const RowsPart& rank, int64_t num_parts) {
  const auto rows_of = [&](const RowsPart& of_rank, int64_t part) {
    return rows_of_part(rows_of_part({.begin = 0, .end = num_rows}, of_rank),
                        {.index = part, .count = num_parts});
  };
  const auto ratio = [](int64_t rows, int64_t all) {
    return all == 0 ? 1.0 : static_cast<double>(rows) / static_cast<double>(all);
  };
  const int64_t num_own = rows_of_part({.begin = 0, .end = num_rows}, rank).size();
  PlannedStep step;
  for (int64_t part = 0; part < num_parts; ++part) {
    int64_t num_in_part = 0;
    for (int64_t other = 0; other < rank.count; ++other) {
      num_in_part += rows_of({.index = other, .count = rank.count}, part).size();
    }
    const FlatRange rows = rows_of(rank, part);
    step.backwards.push_back({.rows = rows,
                              .weight = ratio(rows.size(), num_own),
                              .is_local = part + 1 < num_parts,
                              .share_of_batch = ratio(num_in_part, num_rows)});
  }
  return step;
}

}  // namespace cadre::verify
