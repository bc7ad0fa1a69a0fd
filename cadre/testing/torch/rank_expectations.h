// Expectations for tests whose ranks are threads: all ranks succeed, or a call on a rank throws.
#pragma once

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre::testing {

// Expects that `body` returns on each of `num_ranks` ranks.
inline void expect_on_ranks(int num_ranks, const std::function<void(const ProcessGroup&)>& body) {
  const auto result = run_groups(num_ranks, body);
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Requires that `call` throws kInvalidArgument with `sentence` in its message. For use inside the
// function of a rank.
inline void require_refused(const std::function<void()>& call, const std::string& sentence) {
  const std::string message = error_of(call, ErrorCode::kInvalidArgument);
  require(message.find(sentence) != std::string::npos, message);
}

// Runs `wrap(module, group)` on two ranks and returns its error, which must be the same on both.
// make_module() returns a pointer to a module with a layer `in`. The failed call must not change
// the memory or sizes of that layer's weight, and the group must work afterwards.
template <typename MakeModule, typename Wrap>
std::string refusal_of_both_ranks(const MakeModule& make_module, const Wrap& wrap) {
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    const auto module = make_module(group);
    const at::Tensor& weight = module->in->weight;
    const void* const memory = weight.const_data_ptr();
    const std::vector<int64_t> sizes = weight.sizes().vec();
    output = failure_of([&] { wrap(module, group); });
    require(weight.const_data_ptr() == memory, "the weight has other memory");
    require(weight.sizes() == sizes, "the weight has other sizes");
    const at::Tensor sum = at::ones({1});
    group.all_reduce(sum);
    require(sum.item<float>() == 2, "the group works");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(result.ranks[0].output, result.ranks[1].output);
  return result.ranks[0].output;
}

}  // namespace cadre::testing
