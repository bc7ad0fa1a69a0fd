// What Store adds to any implementation: it refuses requests that have no answer, and answers that
// do not fit their request.
#include "cadre/core/store/store.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/os/system.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/core/store/prefix_store.h"
#include "cadre/core/wire/store/store_message.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using wire::StoreRequest;
using wire::StoreResponse;
using wire::StoreVerb;

constexpr Deadline kNoWait{TimePoint{}};

// Gives one answer to whatever it is asked, and counts the requests.
class OneAnswerStore final : public Store {
 public:
  explicit OneAnswerStore(StoreResponse response) : response_(std::move(response)) {}
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

TEST(Store, AnAnswerWithAnotherNumberOfValuesIsCorrupt) {
  for (const size_t num_values : {0, 2}) {
    OneAnswerStore store({.values = std::vector<std::string>(num_values, "x")});
    EXPECT_EQ(store.get("k", kNoWait).error().code(), ErrorCode::kCorruption);
    EXPECT_EQ(store.compare_set("k", "", "v", kNoWait).error().code(), ErrorCode::kCorruption);
    EXPECT_EQ(store.queue_pop("q", kNoWait).error().code(), ErrorCode::kCorruption);
    const std::vector<std::string> keys(3, "k");
    EXPECT_EQ(store.multi_get(keys, kNoWait).error().code(), ErrorCode::kCorruption);
  }
}

TEST(Store, AnErrorInTheAnswerIsTheResult) {
  OneAnswerStore store({.error = Error(ErrorCode::kUnavailable, "no")});
  EXPECT_EQ(store.get("k", kNoWait).error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(store.set("k", "v", kNoWait).error().code(), ErrorCode::kUnavailable);
}

TEST(Store, ARequestThatHasNoAnswerIsRefusedBeforeItIsMade) {
  OneAnswerStore store({});
  const std::vector<StoreRequest> requests = {
      {.verb = StoreVerb::kSet, .keys = {"k"}},
      {.verb = StoreVerb::kGet},
      {.verb = StoreVerb::kMultiSet, .keys = {"a", "b"}, .values = {"1"}},
      {.verb = StoreVerb::kBarrier, .amount = 0, .keys = {"k"}},
      {.verb = StoreVerb::kCancel},
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

TEST(PrefixStore, ANullStoreAndAViewThatWasMovedFromAreRefused) {
  EXPECT_EQ(testing::failure_of([] { PrefixStore("p", nullptr); }),
            "kInvalidArgument: PrefixStore \"p\": the store beneath is null; pass a store");
  const auto system = os::make_native_system();
  const Deadline deadline = system->deadline_in(std::chrono::seconds(5));
  PrefixStore view("p", std::make_shared<HashStore>(*system));
  PrefixStore moved = std::move(view);
  EXPECT_TRUE(moved.set("k", "v", deadline).ok());
  for (const Status& refused : {view.set("k", "v", deadline), Status(view.clone(deadline).error()),
                                Status(view.leave_will("k", "v", deadline).error())}) {
    EXPECT_EQ(refused.error().code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(refused.error().message().find("moved from"), std::string::npos);
  }
}

}  // namespace
}  // namespace cadre
