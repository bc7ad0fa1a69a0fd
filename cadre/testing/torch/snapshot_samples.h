// Tensors for the tests of sharded snapshots (checkpoints). Their elements are a function of the
// name and the position, and they can be divided among ranks in several ways.
//
// Threads: plain functions. Blocking: never.
#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cadre/core/base/fnv1a.h"
#include "cadre/parallel/shard/division/boxes.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/mesh/placement.h"
#include "cadre/train/checkpoint/snapshot_parts.h"

namespace cadre::snapshot_test {

// The ways to divide a tensor among ranks. kUneven: two replicas whose flat shards are cut at
// different elements.
enum class Division { kReplicated, kFlat, kHybrid, kUneven, kShard0, kOwner };

struct World {
  Division division;
  int size;
};

inline std::string to_string(const World& world) {
  static const char* const kNames[] = {"replicated", "flat", "hybrid", "uneven", "shard0", "owner"};
  return std::string(kNames[static_cast<int>(world.division)]) + " on " +
         std::to_string(world.size);
}

inline std::vector<World> worlds() {
  std::vector<World> all;
  for (const int size : {1, 2, 3, 4}) {
    for (const Division division : {Division::kReplicated, Division::kFlat, Division::kHybrid,
                                    Division::kShard0, Division::kOwner}) {
      if (division != Division::kHybrid || size % 2 == 0) all.push_back({division, size});
    }
  }
  for (const int size : {3, 4, 5}) all.push_back({Division::kUneven, size});
  return all;
}

struct Sample {
  std::string name;
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  bool has_state;
};

// Returns tensors of even and uneven sizes, with 0 to 4 dims and several dtypes; some are empty or
// frozen.
inline std::vector<Sample> samples() {
  return {{"fc.weight", {7, 5}, at::kFloat, true},
          {"fc.bias", {7}, at::kFloat, true},
          {"conv", {3, 2, 5, 3}, at::kFloat, true},
          {"norm", {13}, at::kBFloat16, false},
          {"scale", {}, at::kFloat, true},
          {"empty", {0, 4}, at::kFloat, true},
          {"one", {1, 1}, at::kDouble, true},
          {"even", {8, 4}, at::kHalf, true},
          {"embed.weight", {64, 8}, at::kFloat, true}};
}

// Returns the value of an element. It is exact in every dtype of the samples. Up to 251
// neighbouring elements have different values, and so do tensors of different names.
inline double value_at(const std::string& name, int64_t index) {
  return static_cast<double>((fnv1a(name) % 1000 + static_cast<uint64_t>(index) * 7) % 251);
}

inline std::vector<Box> boxes_of(const World& world, int rank, const Sample& sample,
                                 size_t number) {
  const Box whole{std::vector<int64_t>(sample.sizes.size(), 0), sample.sizes};
  const auto flat = [&](int num_shards, int shard) {
    const int64_t length = (whole.numel() + num_shards - 1) / num_shards;
    const int64_t begin = std::min(length * shard, whole.numel());
    return shard::boxes_of_range(whole, {begin, std::min(begin + length, whole.numel())});
  };
  switch (world.division) {
    case Division::kReplicated:
      return {whole};
    case Division::kFlat:
      return flat(world.size, rank);
    case Division::kHybrid:
      return flat(world.size / 2, rank % (world.size / 2));
    case Division::kUneven: {
      const int num_first = world.size / 2;
      if (rank < num_first) return flat(num_first, rank);
      // Each shard of the second replica, except the last, is three elements longer than in an even
      // division.
      const int64_t length = whole.numel() / (world.size - num_first) + 3;
      const bool is_last = rank == world.size - 1;
      const int64_t begin = std::min(length * (rank - num_first), whole.numel());
      return shard::boxes_of_range(
          whole, {begin, is_last ? whole.numel() : std::min(begin + length, whole.numel())});
    }
    case Division::kShard0:
      if (sample.sizes.empty()) return {whole};
      return {local_box(sample.sizes, std::vector{world.size}, std::vector{rank},
                        std::vector<Placement>{Shard(0)})};
    case Division::kOwner:
      if (static_cast<int>(number) % world.size == rank) return {whole};
      return {};
  }
  return {};
}

// Returns the elements of the boxes as a 1-dim tensor, or as a tensor with the sizes of the sample
// if one box covers all of it.
inline at::Tensor values_of(const std::string& name, const Sample& sample,
                            const std::vector<Box>& boxes) {
  std::vector<double> values;
  for (const Box& box : boxes) {
    for (int64_t i = 0; i < box.numel(); ++i) {
      int64_t rest = i;
      int64_t index = 0;
      int64_t stride = 1;
      for (size_t dim = box.sizes.size(); dim-- > 0;) {
        index += (box.offsets[dim] + rest % box.sizes[dim]) * stride;
        rest /= box.sizes[dim];
        stride *= sample.sizes[dim];
      }
      values.push_back(value_at(name, index));
    }
  }
  at::Tensor flat = torch::tensor(values, at::kDouble).to(sample.dtype);
  const bool is_whole = boxes.size() == 1 && boxes[0].sizes == sample.sizes;
  return is_whole ? flat.view(sample.sizes) : flat;
}

// Returns the parts of a trained model and its optimizer state that the rank owns. If not
// `is_filled`, returns what a rank has before it loads a snapshot: zeros and no optimizer state.
inline SnapshotParts make_parts(const World& world, int rank, bool is_filled) {
  SnapshotParts parts;
  const std::vector<Sample> all = samples();
  for (size_t i = 0; i < all.size(); ++i) {
    const Sample& sample = all[i];
    const std::vector<Box> boxes = boxes_of(world, rank, sample, i);
    at::Tensor values = values_of(sample.name, sample, boxes);
    if (is_filled && sample.has_state) {
      ParameterState state{.parameter = sample.name};
      for (const std::string key : {"exp_avg", "exp_avg_sq"}) {
        state.tensors.emplace_back(key, values_of(sample.name + key, sample, boxes));
      }
      state.scalars.emplace_back("step", torch::tensor(int64_t{1000} + static_cast<int64_t>(i)));
      parts.optimizer.push_back(std::move(state));
    }
    if (!is_filled) values = torch::zeros_like(values);
    parts.parameters.push_back({sample.name, sample.sizes, boxes, values.requires_grad_(true)});
  }
  at::Tensor count = torch::tensor(int64_t{77});
  at::Tensor mask = torch::tensor({1, 0, 0, 1, 1, 0}).to(at::kBool).view({3, 2});
  if (!is_filled) {
    count.zero_();
    mask.zero_();
  }
  parts.buffers = {whole_tensor("count", count), whole_tensor("mask", mask)};
  return parts;
}

// Returns "" if both are bitwise equal; otherwise the name of the first tensor that differs.
inline std::string difference(const SnapshotParts& a, const SnapshotParts& b) {
  const auto differ = [](const at::Tensor& x, const at::Tensor& y) {
    return x.scalar_type() != y.scalar_type() || x.sizes() != y.sizes() || !x.equal(y);
  };
  if (a.parameters.size() != b.parameters.size() || a.optimizer.size() != b.optimizer.size()) {
    return "a parameter or state is missing";
  }
  for (size_t i = 0; i < a.parameters.size(); ++i) {
    if (differ(a.parameters[i].values, b.parameters[i].values)) return a.parameters[i].name;
  }
  for (size_t i = 0; i < a.buffers.size(); ++i) {
    if (differ(a.buffers[i].values, b.buffers[i].values)) return a.buffers[i].name;
  }
  for (const ParameterState& state : a.optimizer) {
    const auto other = std::ranges::find(b.optimizer, state.parameter, &ParameterState::parameter);
    if (other == b.optimizer.end()) return "the state of " + state.parameter;
    for (const auto tensors : {&ParameterState::tensors, &ParameterState::scalars}) {
      if ((state.*tensors).size() != ((*other).*tensors).size()) return state.parameter;
      for (size_t i = 0; i < (state.*tensors).size(); ++i) {
        if ((state.*tensors)[i].name != ((*other).*tensors)[i].name ||
            differ((state.*tensors)[i].tensor, ((*other).*tensors)[i].tensor)) {
          return state.parameter + "." + (state.*tensors)[i].name;
        }
      }
    }
  }
  return "";
}

}  // namespace cadre::snapshot_test
