// Expectations for tests whose ranks are threads: all ranks succeed, or a call on a rank throws.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

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

// Requires that `call` throws kInvalidArgument with `sentence` in its message. Called in the body
// of a rank.
inline void require_refused(const std::function<void()>& call, const std::string& sentence) {
  const std::string message = error_of(call, ErrorCode::kInvalidArgument);
  require(message.find(sentence) != std::string::npos, message);
}

}  // namespace cadre::testing
