// A fixture for tests of DistributedDataParallel that run one rank only. A formula computes what
// the other ranks (the peers) contribute to each collective.
//
// Threads: one. Blocking: never.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/testing/torch/group_fakes.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre::testing {

inline constexpr int kWorld = 4;

// Computes the contributions of the peers to the wrapper's collectives: the numbers of samples in
// int64, the counts for each parameter and rank in int32, and the gradients with the trailer, the
// elements with flags and digests that follow the last bucket. The peers send the same values as
// this rank unless a test sets others.
class DdpPeers : public PeersFormula {
 public:
  using PeersFormula::PeersFormula;

  void reduce(const Tensor& tensor, ReduceOp op) const override {
    if (tensor.scalar_type() == at::kInt) {
      reduce_counts(tensor);
    } else if (tensor.scalar_type() == at::kLong) {
      reduce_samples(tensor);
    } else {
      if (flag != 0) tensor[-1] += flag;
      PeersFormula::reduce(tensor, op);
    }
  }

  // The sum of the int32 counts of all peers. If undefined, each peer sends the same counts as this
  // rank.
  Tensor counts;
  // The number of samples of all peers together. If nullopt, each peer has as many samples as this
  // rank.
  std::optional<int64_t> samples;
  double flag = 0;  // added to the last element of each floating-point reduction

 private:
  void reduce_counts(const Tensor& tensor) const {
    if (counts.defined()) {
      tensor.add_(counts);
      const Tensor digests = tensor.narrow(0, -world_size(), world_size());
      digests.fill_(digests[0]);
      return;
    }
    tensor.mul_(world_size());
    // Parts of the message that are vectors with one entry for each rank, such as the numbers of
    // samples and of writes. All entries get this rank's value.
    for (const int64_t place : {1, 2, 3, 4, 5, 6, 8}) {
      const Tensor of_ranks = tensor.narrow(0, -place * world_size(), world_size());
      of_ranks.fill_(of_ranks[0] / world_size());
    }
  }
  void reduce_samples(const Tensor& tensor) const {
    const Tensor peers = samples ? at::full_like(tensor, *samples) : tensor * (world_size() - 1);
    if (samples) peers.narrow(0, 1, 2).zero_();  // not numbers of samples: sample_weight.cpp
    tensor.add_(peers);
  }
};

class DdpTest : public ::testing::Test {
 protected:
  std::shared_ptr<Net> net_ = std::make_shared<Net>();
  std::shared_ptr<DdpPeers> formula_ = std::make_shared<DdpPeers>(kWorld);
  FakeGroup peers_{formula_};
  // The cap gives each parameter of more than 64 bytes a bucket of its own, so there are at least
  // two buckets.
  DistributedDataParallelOptions options_{.bucket_caps = {.first_bytes = 64, .bytes = 64}};

  DistributedDataParallel<Net> wrap() { return {net_, peers_.group(), options_}; }
};

}  // namespace cadre::testing
