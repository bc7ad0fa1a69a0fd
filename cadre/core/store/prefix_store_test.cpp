#include "cadre/core/store/prefix_store.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/os/system.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

TEST(PrefixStore, ANullStoreAndAViewThatWasMovedFromAreRefused) {
  EXPECT_EQ(
      testing::failure_of([] { PrefixStore("p", nullptr); }),
      "kInvalidArgument: PrefixStore \"p\": the underlying store is null; a group of one rank that "
      "was made without a launcher has no store, so check membership().store first, or pass a "
      "store of your own");
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

TEST(PrefixStore, AViewHasKeysOfItsOwnAndCountsThoseOfAll) {
  const auto system = os::make_native_system();
  const Deadline deadline = system->deadline_in(std::chrono::seconds(5));
  const auto all = std::make_shared<HashStore>(*system);
  PrefixStore view("a", all);
  all->set("a", "1", deadline).value_or_throw();
  all->set("ab/c", "2", deadline).value_or_throw();
  view.set("c", "3", deadline).value_or_throw();
  EXPECT_EQ(all->get("a/c", deadline).value_or_throw(), "3");
  EXPECT_EQ(view.list_keys(deadline).value_or_throw(), std::vector<std::string>{"c"});
  EXPECT_EQ(view.num_keys(deadline).value_or_throw(), 3);
  const auto copy = view.clone(deadline).value_or_throw();
  EXPECT_EQ(copy->get("c", deadline).value_or_throw(), "3");
}

}  // namespace
}  // namespace cadre
