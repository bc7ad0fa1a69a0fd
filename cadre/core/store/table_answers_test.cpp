#include "cadre/core/store/table_answers.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cadre::store {
namespace {

using wire::StoreRequest;
using wire::StoreResponse;
using wire::StoreVerb;
using Texts = std::vector<std::string>;

class TableAnswersTest : public ::testing::Test {
 protected:
  StoreResponse ask(const StoreRequest& request, size_t max_bytes = size_t{1} << 20) {
    return answer_from(table_, request, max_bytes);
  }

  KeyTable table_;
};

TEST_F(TableAnswersTest, EachVerbChangesOrReadsTheTable) {
  EXPECT_EQ(ask({.verb = StoreVerb::kMultiSet, .keys = {"a", "b"}, .values = {"1", "x"}}),
            StoreResponse{});
  EXPECT_EQ(ask({.verb = StoreVerb::kAdd, .amount = 4, .keys = {"a"}}).number, 5);
  ask({.verb = StoreVerb::kAppend, .keys = {"b"}, .values = {"y"}});
  EXPECT_EQ(ask({.verb = StoreVerb::kMultiGet, .keys = {"b", "a"}}).values, (Texts{"xy", "5"}));
  EXPECT_EQ(ask({.verb = StoreVerb::kCompareSet, .keys = {"a"}, .values = {"4", "9"}}).values,
            Texts{"5"});
  EXPECT_EQ(ask({.verb = StoreVerb::kCompareSet, .keys = {"a"}, .values = {"5", "9"}}).values,
            Texts{"9"});
  EXPECT_EQ(ask({.verb = StoreVerb::kCheck, .keys = {"a", "b"}}).number, 1);
  EXPECT_EQ(ask({.verb = StoreVerb::kCheck, .keys = {"a", "c"}}).number, 0);
  EXPECT_EQ(ask({.verb = StoreVerb::kErase, .keys = {"a"}}).number, 1);
  EXPECT_EQ(ask({.verb = StoreVerb::kErase, .keys = {"a"}}).number, 0);
  EXPECT_EQ(ask({.verb = StoreVerb::kNumKeys}).number, 1);
  EXPECT_EQ(ask({.verb = StoreVerb::kListKeys}).values, Texts{"b"});
}

// `number` in the response is the length of the queue before the call: 0 tells a c10d client that
// there was no item.
TEST_F(TableAnswersTest, AnItemComesWithTheLengthOfTheQueueBefore) {
  for (const char* item : {"first", "second"}) {
    ask({.verb = StoreVerb::kQueuePush, .keys = {"q"}, .values = {item}});
  }
  EXPECT_EQ(ask({.verb = StoreVerb::kQueueLength, .keys = {"q"}}).number, 2);
  const StoreResponse first = ask({.verb = StoreVerb::kTryQueuePop, .keys = {"q"}});
  EXPECT_EQ(first.number, 2);
  EXPECT_EQ(first.values, Texts{"first"});
  EXPECT_EQ(ask({.verb = StoreVerb::kQueuePop, .keys = {"q"}}).values, Texts{"second"});
  const StoreResponse none = ask({.verb = StoreVerb::kTryQueuePop, .keys = {"q"}});
  EXPECT_EQ(none.number, 0);
  EXPECT_EQ(none.values, Texts{});
}

TEST_F(TableAnswersTest, AnAnswerOverTheLimitIsAnError) {
  ask({.verb = StoreVerb::kSet, .keys = {"a"}, .values = {std::string(92, 'x')}});
  const StoreRequest one{.verb = StoreVerb::kGet, .keys = {"a"}};
  EXPECT_EQ(ask(one, 100).error, std::nullopt);  // the value has 92 bytes, the length before it 8
  ASSERT_TRUE(ask(one, 99).error.has_value());
  EXPECT_EQ(ask(one, 99).error->code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(ask({.verb = StoreVerb::kListKeys}, 9).error, std::nullopt);
  EXPECT_TRUE(ask({.verb = StoreVerb::kListKeys}, 8).error.has_value());
}

TEST_F(TableAnswersTest, ATimeoutNamesWhatTheTableLacks) {
  ask({.verb = StoreVerb::kSet, .keys = {"a"}, .values = {"1"}});
  const Error wait = timeout_from(table_, {.verb = StoreVerb::kWait, .keys = {"a", "b"}});
  EXPECT_EQ(wait.code(), ErrorCode::kTimeout);
  EXPECT_NE(wait.message().find("waiting for key \"b\" of 2 keys"), std::string::npos)
      << wait.message();
  const StoreRequest barrier{.verb = StoreVerb::kBarrier, .amount = 3, .keys = {"all"}};
  EXPECT_NE(timeout_from(table_, barrier).message().find("\"all\": 0 of 3 calls"),
            std::string::npos);
  ASSERT_FALSE(table_.arrive(1, "all", 3).value_or_throw());
  EXPECT_NE(timeout_from(table_, barrier).message().find("\"all\": 1 of 3 calls"),
            std::string::npos)
      << timeout_from(table_, barrier).message();
}

}  // namespace
}  // namespace cadre::store
