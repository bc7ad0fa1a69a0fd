// Assembles whole tensors from the results of ranks that trained different parts of the parameters.
//
// Threads: plain functions. Blocking: never. Errors: fails the test if whole parameters differ
// between ranks.
#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "cadre/testing/torch/wrap_training.h"

namespace cadre::testing {

// The dimension along which each parameter is divided; nullopt if it is not divided.
using DividedDims = std::vector<std::optional<int64_t>>;

// Concatenates the ranks' parts of each parameter along its dimension. Parameters that are not
// divided must be equal on all ranks.
inline Snapshot joined(const DividedDims& dims, const std::vector<Snapshot>& parts) {
  Snapshot whole;
  for (size_t i = 0; i < dims.size(); ++i) {
    Snapshot of_ranks;
    for (const Snapshot& part : parts) of_ranks.push_back(part[i]);
    if (dims[i]) {
      whole.push_back(torch::cat(of_ranks, *dims[i]));
      continue;
    }
    for (const Tensor& tensor : of_ranks) {
      EXPECT_TRUE(bits_of({tensor}) == bits_of({of_ranks[0]})) << "parameter " << i;
    }
    whole.push_back(of_ranks[0]);
  }
  return whole;
}

inline Training joined(const DividedDims& dims, const std::vector<Training>& ranks) {
  Training whole{.losses = ranks[0].losses, .gradients = {}, .parameters = {}};
  std::vector<Snapshot> parts;
  for (size_t step = 0; step < ranks[0].gradients.size(); ++step) {
    parts.clear();
    for (const Training& rank : ranks) parts.push_back(rank.gradients[step]);
    whole.gradients.push_back(joined(dims, parts));
  }
  parts.clear();
  for (const Training& rank : ranks) parts.push_back(rank.parameters);
  whole.parameters = joined(dims, parts);
  return whole;
}

}  // namespace cadre::testing
