// Tests how the operations interact with autograd: they increment the version counters of tensors
// that they write, and refuse to write to leaves that require grad.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;
using torch::Tensor;

// A call on two ranks that writes to a tensor of shape (2, 4).
struct Write {
  const char* name;
  std::function<void(const ProcessGroup&, const Tensor& tensor)> run;
  bool needs_contiguous = false;
};

std::vector<Write> all_writes() {
  const auto parts = [](const Tensor& tensor) { return std::vector<Tensor>{tensor, tensor}; };
  const auto half = [](const Tensor& tensor) { return torch::ones_like(tensor[0]).contiguous(); };
  const auto twice = [](const Tensor& tensor) { return torch::ones({2 * tensor.numel()}); };
  return {
      {"all_reduce", [](auto& group, auto& t) { group.all_reduce(t); }},
      {"all_reduce_async", [](auto& group, auto& t) { group.all_reduce_async(t).wait(); }, true},
      {"all_reduce_coalesced", [](auto& group, auto& t) { group.all_reduce_coalesced({t}); }, true},
      {"broadcast", [](auto& group, auto& t) { group.broadcast(t); }},
      {"reduce", [](auto& group, auto& t) { group.reduce(t, {.root = group.rank()}); }},
      {"all_gather", [=](auto& group, auto& t) { group.all_gather(t, half(t)); }, true},
      {"all_gather_coalesced",
       [=](auto& group, auto& t) { group.all_gather_coalesced({t}, {half(t)}); }, true},
      {"reduce_scatter", [=](auto& group, auto& t) { group.reduce_scatter(t, twice(t)); }, true},
      {"reduce_scatter_coalesced",
       [=](auto& group, auto& t) { group.reduce_scatter_coalesced({t}, {twice(t)}); }, true},
      {"all_to_all",
       [](auto& group, auto& t) {
         group.all_to_all(t, torch::ones({2, 4}));
       },
       true},
      {"all_gather",
       [](auto& group, auto& t) {
         group.all_gather({t, torch::ones({2, 4})}, torch::ones({8}));
       }},
      {"reduce_scatter",
       [](auto& group, auto& t) {
         group.reduce_scatter(t, {torch::ones({2, 4}), torch::ones({2, 4})});
       }},
      {"all_to_all",
       [=](auto& group, auto& t) {
         group.all_to_all({t, torch::ones({2, 4})}, parts(torch::ones({2, 4})));
       }},
      {"batch_send_recv",
       [](auto& group, auto& t) {
         group.batch_send_recv({P2POp::send(torch::ones({2, 4}), 1 - group.rank()),
                                P2POp::recv(t, 1 - group.rank())});
       },
       true},
      {"recv_from_any",
       [](auto& group, auto& t) {
         group.send(torch::ones({2, 4}), 1 - group.rank());
         group.recv_from_any(t);
       }},
  };
}

// reduce() is left out here, because its entry in all_writes() makes each rank the root, and the
// roots must be equal in a call that runs. Its error is tested below.
TEST(ProcessGroupAutograd, ABackwardThatNeedsTheValuesOfBeforeThrows) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    for (const Write& write : all_writes()) {
      if (std::string_view(write.name) == "reduce") continue;
      for (const bool is_contiguous : {true, false}) {
        if (!is_contiguous && write.needs_contiguous) continue;
        const Tensor weight = torch::ones({2, 4}).requires_grad_();
        const Tensor saved = is_contiguous ? torch::ones({2, 4}) : torch::ones({4, 2}).t();
        const Tensor loss = (weight * saved).sum();  // the backward of this product reads `saved`
        write.run(group, saved);
        const std::string failure = failure_of([&] {
          try {
            loss.backward();
          } catch (const c10::Error& error) {
            throw Error(ErrorCode::kInternal, error.what_without_backtrace());
          }
        });
        require(failure.find("modified by an inplace operation") != std::string::npos,
                std::string(write.name) + ": " + failure);
      }
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ProcessGroupAutograd, WhatIsOnlyReadKeepsItsVersion) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const Tensor input = torch::ones({4});
    const auto version = input._version();
    group.all_gather(torch::empty({8}), input);
    group.reduce_scatter(torch::empty({2}), input);
    group.all_gather({torch::empty({4}), torch::empty({4})}, input);
    group.reduce_scatter(torch::empty({4}), {input, input});
    group.all_to_all(torch::empty({4}), input);
    if (group.rank() == 0) group.send(input, 1);
    if (group.rank() == 1) group.recv(torch::empty({4}), 0);
    group.reduce(input, {.root = 0});
    require(input._version() == version + (group.rank() == 0 ? 1 : 0), "the root's alone");
    {
      const c10::InferenceMode inference;
      const Tensor without_version = torch::ones({3});
      group.all_reduce(without_version);
      require(without_version[0].item<float>() == 2, "an inference tensor has none");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ProcessGroupAutograd, ALeafThatRequiresGradIsRefusedOutsideNoGradGuard) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    for (const Write& write : all_writes()) {
      const Tensor leaf = torch::ones({2, 4}).requires_grad_();
      for (const Tensor& tensor : {leaf, leaf.view({2, 4})}) {
        const std::string failure = failure_of([&] { write.run(group, tensor); });
        require(failure.starts_with("kInvalidArgument: ") &&
                    failure.find("leaf that requires grad, which is not changed in place while "
                                 "gradients are recorded; call this under torch::NoGradGuard") !=
                        std::string::npos,
                std::string(write.name) + ": " + failure);
      }
      if (std::string_view(write.name) == "recv_from_any") {
        // The peer's send was not refused, only the recv was: receives the two messages that the
        // peer has sent.
        group.recv(torch::empty({2, 4}), 1 - group.rank());
        group.recv(torch::empty({2, 4}), 1 - group.rank());
      }
      if (std::string_view(write.name) == "reduce") continue;
      const torch::NoGradGuard no_grad;
      write.run(group, leaf);
      require(leaf.is_leaf() && leaf.requires_grad(), "a leaf as before");
    }
    // A tensor that is the result of an operation is no leaf, and a leaf that is an input is only
    // read. So these calls are accepted.
    const Tensor leaf = torch::ones({4}).requires_grad_();
    group.all_reduce(leaf * 2);
    group.all_gather(torch::empty({8}), leaf);
    if (group.rank() == 0) group.send(leaf, 1);
    if (group.rank() == 1) group.recv(torch::empty({4}), 0);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
