#include "cadre/core/store/checks.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cadre/core/store/store.h"

namespace cadre {
namespace {

using wire::StoreRequest;
using wire::StoreVerb;

TEST(StoreChecks, KeysAndValuesAtTheirLimitsPassAndOneByteMoreDoesNot) {
  const std::string key(kMaxStoreKeyBytes, 'k');
  const std::string value(kMaxStoreValueBytes, 'v');
  EXPECT_TRUE(check_store_entry(key, value).ok());
  const Status long_key = check_store_entry(key + "k", "");
  ASSERT_FALSE(long_key.ok());
  EXPECT_EQ(long_key.error().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(long_key.error().message(),
            "store key of 4097 bytes, which begins \"" + std::string(64, 'k') +
                "\", is over the limit of 4096 bytes; use a shorter key");
  const Status long_value = check_store_entry("k", value + "v");
  ASSERT_FALSE(long_value.ok());
  EXPECT_EQ(long_value.error().code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(long_value.error().message().find("value of 16777217 bytes for store key \"k\""),
            std::string::npos)
      << long_value.error().message();
}

TEST(StoreChecks, ABarrierNeedsAnArrivalAndAVerbOfAConnectionIsNone) {
  EXPECT_TRUE(
      check_store_request({.verb = StoreVerb::kBarrier, .amount = 1, .keys = {"all"}}).ok());
  EXPECT_EQ(check_store_request({.verb = StoreVerb::kBarrier, .amount = 0, .keys = {"all"}})
                .error()
                .message(),
            "store barrier \"all\" of 0 arrivals; expected at least 1");
  EXPECT_EQ(check_store_request({.verb = StoreVerb::kPing}).error().code(),
            ErrorCode::kInvalidArgument);
}

TEST(StoreChecks, ATimeoutNamesUpToFourMissingKeys) {
  const StoreRequest get{.verb = StoreVerb::kGet, .keys = {"a"}};
  const Error one = store_timeout(get, get.keys);
  EXPECT_EQ(one.code(), ErrorCode::kTimeout);
  EXPECT_EQ(one.message(),
            "store get: the deadline passed while waiting for key \"a\"; the rank that sets it is "
            "late or gone");
  const StoreRequest wait{.verb = StoreVerb::kWait, .keys = {"a", "b", "c", "d", "e", "f", "g"}};
  const std::vector<std::string> missing = {"a", "b", "c", "d", "e", "f"};
  EXPECT_NE(store_timeout(wait, missing)
                .message()
                .find("keys \"a\", \"b\", \"c\", \"d\" and 2 more of 7 keys;"),
            std::string::npos)
      << store_timeout(wait, missing).message();
}

TEST(StoreChecks, ATimeoutOfAQueueABarrierAndAnAnswerNamesWhatWasAwaited) {
  const StoreRequest pop{.verb = StoreVerb::kQueuePop, .keys = {"jobs"}};
  EXPECT_NE(store_timeout(pop, {}).message().find("queue \"jobs\" had no item"), std::string::npos);
  const StoreRequest barrier{.verb = StoreVerb::kBarrier, .amount = 3, .keys = {"all"}};
  EXPECT_NE(
      store_timeout(barrier, {}).message().find("\"all\": the deadline passed before 3 calls"),
      std::string::npos);
  const StoreRequest set{.verb = StoreVerb::kSet, .keys = {"k"}, .values = {"v"}};
  EXPECT_EQ(store_timeout(set, {}).message(),
            "store set \"k\": no answer from the store before the deadline");
}

}  // namespace
}  // namespace cadre
