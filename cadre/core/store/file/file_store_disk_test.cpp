// Tests a file store on a simulated disk, of which the n-th operation fails, for n = 1, 2, ...
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/sim/simulated_disk.h"
#include "cadre/core/store/file/file_store.h"

namespace cadre {
namespace {

using std::chrono::seconds;

// The changes of the store that were acknowledged. The store must contain all of them and no part
// of a change that failed.
struct Acknowledged {
  std::string log;
  int64_t count = 0;
  int64_t num_queued = 0;
};

class FileStoreDisk : public ::testing::Test {
 protected:
  Result<std::unique_ptr<FileStore>> open(sim::SimulatedDisk& disk) {
    return FileStore::open(*system_, {.path = "/store", .files = &disk}, soon());
  }
  Deadline soon() { return system_->deadline_in(seconds(20)); }

  Acknowledged change(FileStore& store) {
    Acknowledged done;
    for (const std::string letter : {"a", "b", "c"}) {
      if (store.append("log", letter, soon()).ok()) done.log += letter;
      if (store.add("count", 1, soon()).ok()) ++done.count;
      if (store.queue_push("queue", letter, soon()).ok()) ++done.num_queued;
      const std::vector<std::string> keys = {"one " + letter, "two " + letter};
      const std::vector<std::string> values = {letter, letter};
      const bool is_set = store.multi_set(keys, values, soon()).ok();
      EXPECT_EQ(store.check(keys, soon()).value_or_throw(), is_set) << letter;
    }
    return done;
  }

  void expect_holds(FileStore& store, const Acknowledged& done) {
    EXPECT_EQ(store.append("log", "", soon()).ok(), true);
    EXPECT_EQ(store.get("log", soon()).value_or_throw(), done.log);
    EXPECT_EQ(store.add("count", 0, soon()).value_or_throw(), done.count);
    EXPECT_EQ(store.queue_length("queue", soon()).value_or_throw(), done.num_queued);
  }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
};

TEST_F(FileStoreDisk, AfterAnyFailedOperationItHoldsTheAcknowledgedChangesAlone) {
  int number = 1;
  for (;; ++number) {
    SCOPED_TRACE(number);
    sim::SimulatedDisk disk;
    disk.fail_operation(static_cast<uint64_t>(number));
    Acknowledged done;
    auto store = open(disk);
    if (!store.ok()) {
      EXPECT_EQ(store.error().code(), ErrorCode::kUnavailable);
      store = open(disk);
    }
    ASSERT_TRUE(store.ok()) << store.error().message();
    try {
      done = change(**store);
    } catch (const Error& error) {
      // The operation that failed was a read, so the content of the store is not known. The test
      // goes on with the next n.
      EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
      continue;
    }
    if (!disk.has_failed()) break;
    expect_holds(**store, done);
    expect_holds(*open(disk).value_or_throw(), done);
  }
  EXPECT_GT(number, 30);
}

TEST_F(FileStoreDisk, AFullDiskRefusesAChangeAndKeepsTheOthers) {
  sim::SimulatedDisk disk(400);
  const auto store = open(disk).value_or_throw();
  ASSERT_TRUE(store->set("small", "value", soon()).ok());
  const Status refused = store->set("large", std::string(500, 'x'), soon());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(store->get("small", soon()).value_or_throw(), "value");
  EXPECT_FALSE(store->check(std::vector<std::string>{"large"}, soon()).value_or_throw());
  EXPECT_TRUE(store->set("next", "value", soon()).ok());
  EXPECT_EQ(open(disk).value_or_throw()->get("next", soon()).value_or_throw(), "value");
}

}  // namespace
}  // namespace cadre
