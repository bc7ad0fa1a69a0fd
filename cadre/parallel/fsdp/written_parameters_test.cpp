// Tests that a write to a gathered weight in a forward or a backward is an error, whether all ranks
// write or only one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>

#include "cadre/testing/torch/fsdp_stack.h"
#include "cadre/testing/torch/fsdp_training.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(FsdpWritten, AWeightThatForwardWritesIsRefusedInTheFirstStep) {
  for (const Reshard reshard :
       {Reshard::kAfterForward, Reshard::kAfterBackward, Reshard::kAfterReduction}) {
    for (const bool is_recorded : {true, false}) {
      on_two_ranks([&](const ProcessGroup& group) {
        const auto net = std::make_shared<Stack>();
        FullyShardedDataParallelOptions options = units_of_stack();
        options.reshard = reshard;
        FullyShardedDataParallel model{net, group, options};
        net->writing->writes = true;
        const torch::AutoGradMode mode(is_recorded);
        EXPECT_THAT(failure_of([&] {
                      const Tensor output = model(stack_rows(0));
                      if (is_recorded) output.sum().backward();
                      model(stack_rows(0));
                    }),
                    AllOf(HasSubstr("FullyShardedDataParallel, rank "),
                          HasSubstr("the program has written to \"writing.weight\""),
                          HasSubstr("while the parameters were gathered")));
        net->writing->writes = false;
        for (int step = 0; step < 2; ++step) {
          model.zero_grad();
          const Tensor output = model(stack_rows(0));
          if (is_recorded) output.sum().backward();
        }
        EXPECT_EQ(model.full_bytes(), 0);
      });
    }
  }
}

// Lets rank 1 write to a parameter in a step. On both ranks the backward, which reduces the
// gradients, must throw, and the next step must be correct.
void expect_refusal_on_both_ranks(const std::shared_ptr<Stack>& net,
                                  const FullyShardedDataParallelOptions& options,
                                  const std::function<void(bool)>& set_writing,
                                  const std::string& parameter, const ProcessGroup& group) {
  FullyShardedDataParallel model{net, group, options};
  const auto step = [&] {
    model.zero_grad();
    model(stack_rows(group.rank())).sum().backward();
  };
  for (int k = 0; k < 3; ++k) step();
  for (int k = 0; k < 2; ++k) {
    set_writing(group.rank() == 1);
    EXPECT_THAT(failure_of(step),
                AllOf(HasSubstr("kInvalidArgument: FullyShardedDataParallel, rank "),
                      HasSubstr("the program has written to \"" + parameter + "\" (on rank 1)")));
    set_writing(false);
    step();
  }
  Stack plain;
  for (int rank = 0; rank < 2; ++rank) (plain.forward(stack_rows(rank)).sum() / 2).backward();
  const Snapshot gradients = assembled_gradients(model, group);
  for (size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_TRUE(torch::allclose(gradients[i], plain.parameters()[i].grad(), 1e-12, 1e-14)) << i;
  }
}

// Rank 1 writes to a parameter of the root in the backward. The root is released at the end of the
// backward, so the write is noticed only there.
TEST(FsdpWritten, AWriteOfOneRankToTheRootEndsTheStepOnAllRanks) {
  on_two_ranks([](const ProcessGroup& group) {
    const auto net = std::make_shared<Stack>();
    const auto set_writing = [&](bool writes) {
      net->in_backward = nullptr;
      if (!writes) return;
      net->in_backward = [&] {
        const torch::NoGradGuard no_grad;
        net->head->bias.mul_(0.5);
      };
    };
    expect_refusal_on_both_ranks(net, units_of_stack(), set_writing, "head.bias", group);
  });
}

// Rank 1 writes to a parameter of a unit in the forward. With kAfterForward and kOntoGroup the
// write is noticed in the middle of the forward, when the unit is released.
TEST(FsdpWritten, AWriteOfOneRankToAUnitEndsTheStepOnAllRanks) {
  for (const Reshard reshard : {Reshard::kAfterForward, Reshard::kOntoGroup,
                                Reshard::kAfterBackward, Reshard::kAfterReduction}) {
    on_two_ranks([reshard](const ProcessGroup& group) {
      const auto net = std::make_shared<Stack>();
      FullyShardedDataParallelOptions options = units_of_stack();
      options.reshard = reshard;
      if (reshard == Reshard::kOntoGroup) options.reshard_group_size = 2;
      const auto set_writing = [&](bool writes) { net->writing->writes = writes; };
      expect_refusal_on_both_ranks(net, options, set_writing, "writing.weight", group);
    });
  }
}

// Rank 1 writes in a forward under no_sync(), where the backward reduces nothing and must not
// throw. The next backward, which reduces, must throw on all ranks.
TEST(FsdpWritten, AWriteUnderNoSyncEndsTheReductionOnAllRanks) {
  on_two_ranks([](const ProcessGroup& group) {
    const auto net = std::make_shared<Stack>();
    FullyShardedDataParallel model{net, group, units_of_stack()};
    for (int k = 0; k < 2; ++k) {
      net->writing->writes = group.rank() == 1;
      {
        const auto no_sync = model.no_sync();
        model(stack_rows(0)).sum().backward();
      }
      net->writing->writes = false;
      EXPECT_THAT(failure_of([&] { model(stack_rows(0)).sum().backward(); }),
                  HasSubstr("the program has written to \"writing.weight\" (on rank 1)"));
      model.zero_grad();
      model(stack_rows(0)).sum().backward();
    }
  });
}

// Rank 1 writes in a forward without grad. No reduction follows that could report it to the other
// ranks, so the forward must throw on rank 1 only, and the next step must work.
TEST(FsdpWritten, AnEvaluationOfOneRankThatWritesLeavesTheOthers) {
  for (const Reshard reshard : {Reshard::kAfterForward, Reshard::kAfterReduction}) {
    on_two_ranks([reshard](const ProcessGroup& group) {
      const auto net = std::make_shared<Stack>();
      FullyShardedDataParallelOptions options = units_of_stack();
      options.reshard = reshard;
      FullyShardedDataParallel model{net, group, options};
      for (int k = 0; k < 3; ++k) {
        net->writing->writes = group.rank() == 1;
        {
          const torch::NoGradGuard no_grad;
          EXPECT_THAT(failure_of([&] { model(stack_rows(0)); }),
                      HasSubstr(group.rank() == 1 ? "has written to \"writing.weight\"" : ""));
        }
        net->writing->writes = false;
        model.zero_grad();
        model(stack_rows(0)).sum().backward();
        EXPECT_EQ(model.full_bytes(), 0);
      }
    });
  }
}

// The parameters are the memory of the shard in a world of one rank, so a write in a forward is not
// lost and must not throw.
TEST(FsdpWritten, AWeightThatForwardWritesRemainsInAWorldOfOne) {
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    const auto net = std::make_shared<Stack>();
    Stack plain;
    net->writing->writes = plain.writing->writes = true;
    FullyShardedDataParallel model{net, group, units_of_stack()};
    for (int step = 0; step < 2; ++step) {
      const Tensor output = model(stack_rows(0));
      EXPECT_TRUE(torch::equal(output, plain.forward(stack_rows(0))));
      output.sum().backward();
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
