// Tests the weights that ranks compute together from the numbers of samples of their forwards.
#include "cadre/parallel/reduction/agreement/sample_weight.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cadre/tensor/hooks/located_group.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::reduction {
namespace {

using testing::require;

void on_two_ranks(const std::function<void(const wrap::LocatedGroup&, int)>& body) {
  const auto result =
      testing::run_groups(2, [&](const ProcessGroup& group) { body(group, group.rank()); });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The first message has room for ten forwards, so a rank with 25 sends the rest in a second one.
// The forward with another share is the last of the first message, the first of the second, or the
// last of all.
TEST(SampleWeights, AForwardOfAnotherShareIsFoundAmongMoreThanOneMessageHolds) {
  for (const size_t place : {size_t{9}, size_t{10}, size_t{24}}) {
    on_two_ranks([place](const wrap::LocatedGroup& group, int rank) {
      std::vector<int64_t> forwards(25, 4);
      if (rank == 1) forwards[place] = 2;
      const auto weight = agree_on_weight(group, {.of_forwards = forwards});
      require(weight && weight->weight == 0.5 && weight->is_equal_on_all,
              "the weight must be that of the first forward");
      require(weight->unlike == place, "place " + std::to_string(weight->unlike.value_or(99)));
    });
  }
}

TEST(SampleWeights, ManyForwardsOfTheSameSharesAreNotRefused) {
  on_two_ranks([](const wrap::LocatedGroup& group, int rank) {
    std::vector<int64_t> forwards;
    for (int64_t i = 1; i <= 25; ++i) forwards.push_back(i * (rank == 0 ? 1 : 3));
    const auto weight = agree_on_weight(group, {.of_forwards = forwards});
    require(weight && weight->weight == (rank == 0 ? 0.25 : 0.75),
            "the weight must be this rank's share of the samples");
    require(!weight->is_equal_on_all && !weight->unlike,
            "the share must be the same in every forward");
  });
}

}  // namespace
}  // namespace cadre::reduction
