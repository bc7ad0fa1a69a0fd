// Tests the checks that Store adds to every implementation: it rejects malformed requests, and
// responses with the wrong number of values.
#include "cadre/core/store/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/os/system.h"
#include "cadre/core/store/file/file_store.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/core/store/tcp/tcp_store.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/core/wire/store/store_message.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using ::testing::ElementsAre;
using ::testing::StartsWith;
using wire::StoreRequest;
using wire::StoreResponse;
using wire::StoreVerb;

constexpr Deadline kNoWait{TimePoint{}};
constexpr Duration kTime = std::chrono::seconds(20);

// A store that gives one fixed response to every request, and counts the requests.
class OneAnswerStore final : public Store {
 public:
  OneAnswerStore(os::System& system, StoreResponse response)
      : Store(system), response_(std::move(response)) {}
  Result<std::shared_ptr<Store>> clone(Deadline) override {
    return Error(ErrorCode::kUnavailable, "one handle only");
  }
  int num_requests() const { return num_requests_; }

 private:
  Result<StoreResponse> answer(StoreRequest, Deadline) override {
    ++num_requests_;
    return response_;
  }

  const StoreResponse response_;
  int num_requests_ = 0;
};

class StoreTest : public ::testing::Test {
 protected:
  const std::unique_ptr<os::System> system_ = os::make_native_system();
};

TEST_F(StoreTest, AnAnswerWithAnotherNumberOfValuesIsCorrupt) {
  for (const size_t num_values : {0, 2}) {
    OneAnswerStore store(*system_, {.values = std::vector<std::string>(num_values, "x")});
    EXPECT_EQ(store.get("k", kNoWait).error().code(), ErrorCode::kCorruption);
    EXPECT_EQ(store.compare_set("k", "", "v", kNoWait).error().code(), ErrorCode::kCorruption);
    EXPECT_EQ(store.queue_pop("q", kNoWait).error().code(), ErrorCode::kCorruption);
    const std::vector<std::string> keys(3, "k");
    EXPECT_EQ(store.multi_get(keys, kNoWait).error().code(), ErrorCode::kCorruption);
  }
}

TEST_F(StoreTest, AnErrorInTheAnswerIsTheResult) {
  OneAnswerStore store(*system_, {.error = Error(ErrorCode::kUnavailable, "no")});
  EXPECT_EQ(store.get("k", kNoWait).error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(store.set("k", "v", kNoWait).error().code(), ErrorCode::kUnavailable);
}

TEST_F(StoreTest, ARequestThatHasNoAnswerIsRefusedBeforeItIsMade) {
  OneAnswerStore store(*system_, {});
  const std::vector<StoreRequest> requests = {
      {.verb = StoreVerb::kSet, .keys = {"k"}},
      {.verb = StoreVerb::kGet},
      {.verb = StoreVerb::kMultiSet, .keys = {"a", "b"}, .values = {"1"}},
      {.verb = StoreVerb::kBarrier, .amount = 0, .keys = {"k"}},
      {.verb = StoreVerb::kValidate},
      {.verb = StoreVerb::kCancel},
      {.verb = StoreVerb::kPing},
      {.verb = StoreVerb::kHello, .keys = {"0.1.0"}, .values = {"nonce"}},
      {.verb = StoreVerb::kProve, .values = {"proof"}},
      {.verb = StoreVerb::kLeaveWill, .keys = {"k"}, .values = {"v"}},
      {.verb = StoreVerb::kRetractWill},
      {.verb = StoreVerb::kWait, .keys = {"k", std::string(kMaxStoreKeyBytes + 1, 'x')}},
      {.verb = StoreVerb::kSet,
       .keys = {"k"},
       .values = {std::string(kMaxStoreValueBytes + 1, 'x')}},
  };
  for (const StoreRequest& request : requests) {
    const auto refused = store.call(request, kNoWait);
    ASSERT_FALSE(refused.ok()) << wire::to_string(request.verb);
    EXPECT_EQ(refused.error().code(), ErrorCode::kInvalidArgument);
  }
  EXPECT_EQ(store.num_requests(), 0);
}

TEST_F(StoreTest, EachVerbReturnsItsResultWithinADuration) {
  HashStore store(*system_);
  const std::vector<std::string> both = {"a", "b"};
  store.set("a", "1", kTime);
  EXPECT_FALSE(store.check(both, kTime));
  store.append("b", "2", kTime);
  store.wait(both, kTime);
  EXPECT_EQ(store.get("a", kTime), "1");
  EXPECT_EQ(store.add("a", 4, kTime), 5);
  EXPECT_EQ(store.compare_set("b", "2", "3", kTime), "3");
  EXPECT_THAT(store.multi_get(both, kTime), ElementsAre("5", "3"));
  EXPECT_EQ(store.num_keys(kTime), 2);
  store.multi_set(both, std::vector<std::string>{"x", "y"}, kTime);
  EXPECT_THAT(store.list_keys(kTime), ElementsAre("a", "b"));
  EXPECT_TRUE(store.erase("a", kTime));
  EXPECT_FALSE(store.erase("a", kTime));
  store.queue_push("q", "first", kTime);
  store.queue_push("q", "second", kTime);
  EXPECT_EQ(store.queue_length("q", kTime), 2);
  EXPECT_EQ(store.queue_pop("q", kTime), "first");
  EXPECT_EQ(store.try_queue_pop("q", kTime), "second");
  EXPECT_EQ(store.try_queue_pop("q", kTime), std::nullopt);
  store.barrier("one", 1, kTime);
}

TEST_F(StoreTest, ACallThrowsAfterItsDuration) {
  HashStore store(*system_);
  const TimePoint begin = system_->now();
  EXPECT_THAT(testing::failure_of([&] { store.get("never", std::chrono::milliseconds(20)); }),
              StartsWith("kTimeout: store get: "));
  EXPECT_THAT(testing::failure_of([&] { store.queue_pop("never", std::chrono::seconds(0)); }),
              StartsWith("kTimeout: store queue_pop: "));
  EXPECT_LT(system_->now() - begin, kTime / 2);
  EXPECT_THAT(testing::failure_of([&] { store.barrier("none", 0, kTime); }),
              StartsWith("kInvalidArgument: "));
}

TEST_F(StoreTest, StoresOverTcpAndInAFileAreOpenedWithinADuration) {
  const auto server = TcpStoreServer::start(*system_, {.token = "secret"}).value_or_throw();
  const TcpStoreOptions options{.address = server->address(), .token = "secret"};
  TcpStore::connect(*system_, options, kTime)->set("k", "tcp", kTime);
  EXPECT_EQ(TcpStore::connect(*system_, options, kTime)->get("k", kTime), "tcp");
  const TcpStoreOptions strange{.address = server->address(), .token = "another"};
  EXPECT_THAT(testing::failure_of([&] { TcpStore::connect(*system_, strange, kTime); }),
              StartsWith("kInvalidArgument: "));
  const testing::TemporaryFolder folder;
  const auto file = FileStore::open(*system_, {.path = folder.file("store")}, kTime);
  file->set("k", "file", kTime);
  EXPECT_EQ(FileStore::open(*system_, {.path = folder.file("store")}, kTime)->get("k", kTime),
            "file");
}

}  // namespace
}  // namespace cadre
