// Tests memory of which each rank owns a part, and which all ranks map contiguously.
#include "cadre/tensor/group/mapped_parts.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>

#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;
using torch::Tensor;

TEST(MappedPartsTest, WhatAnOwnerWritesAllRead) {
  for (const int world_size : {1, 2, 3, 8}) {
    const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
      std::optional<MappedParts> parts = group.map_parts(1024, torch::kDouble);  // two pages
      require(parts.has_value(), "mapped");
      const Tensor whole = parts->whole();
      const Tensor own = parts->own();
      require(whole.numel() == 1024 * world_size && own.numel() == 1024, "sizes");
      require(!own.storage().is_alias_of(whole.storage()), "a storage of its own");
      require(whole.sum().item<double>() == 0, "zeroed");
      group.barrier();
      for (int round = 1; round <= 20; ++round) {
        own.fill_(round * 10 + group.rank());
        parts->signal_peers(3);
        parts->wait_for_peers(3);
        for (int rank = 0; rank < world_size; ++rank) {
          const Tensor part = whole.narrow(0, 1024 * rank, 1024);
          require(part.eq(round * 10 + rank).all().item<bool>(), "what its owner wrote");
        }
        group.barrier();
      }
      parts->check_group(4);
      require(parts->lost_ranks().empty(), "nobody is lost");
      group.barrier();  // no rank leaves before the others have read
      parts.reset();
      require(own[5].item<double>() == 200 + group.rank(), "the tensors keep the memory");
    });
    EXPECT_TRUE(result.ok()) << world_size << " ranks: " << result.failures();
  }
}

TEST(MappedPartsTest, NothingWhereRanksShareNoMemory) {
  const auto result = run_groups(
      2,
      [](const ProcessGroup& group) {
        require(!group.map_parts(1024, torch::kFloat).has_value(), "nothing");
        group.barrier();
      },
      TransportChoice::kTcp);
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(MappedPartsTest, RefuseWhatIsNotWholePages) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const auto refused = [&](int64_t numel, torch::ScalarType dtype) {
      const std::string failure = failure_of([&] { group.map_parts(numel, dtype); });
      require(failure.find("kInvalidArgument") == 0, failure);
      require(failure.find("fills whole pages of 4096 bytes") != std::string::npos, failure);
    };
    refused(1023, torch::kFloat);
    refused(1024, torch::kComplexFloat);
    refused(0, torch::kFloat);
    refused(-1024, torch::kFloat);
    group.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
