// The fixture of the conformance tests that every Store must pass, and a harness for each kind of
// store with which the tests are instantiated.
//
// Threads: one, and those of run_together().
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/os/system.h"
#include "cadre/core/store/file/file_store.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/core/store/prefix_store.h"
#include "cadre/core/store/tcp/tcp_store.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
using std::chrono::milliseconds;
using std::chrono::seconds;

// Makes handles of one store, as several ranks would.
class StoreHarness {
 public:
  virtual ~StoreHarness() = default;
  // Opens the store once more, as a further rank would. All handles see the same keys.
  virtual std::shared_ptr<Store> open() = 0;
};

class HashHarness final : public StoreHarness {
 public:
  explicit HashHarness(os::System& system) : store_(std::make_shared<HashStore>(system)) {}
  std::shared_ptr<Store> open() override { return store_; }

 private:
  std::shared_ptr<Store> store_;
};

class PrefixHarness final : public StoreHarness {
 public:
  explicit PrefixHarness(os::System& system) : store_(std::make_shared<HashStore>(system)) {}
  std::shared_ptr<Store> open() override {
    return std::make_shared<PrefixStore>("round/7", store_);
  }

 private:
  std::shared_ptr<Store> store_;
};

// A store server in this process. Every handle is a separate client of it.
class TcpHarness final : public StoreHarness {
 public:
  TcpHarness(os::System& system, StoreProtocol protocol) : system_(system), protocol_(protocol) {
    server_ = TcpStoreServer::start(system, {.token = "secret"}).value_or_throw();
  }
  std::shared_ptr<Store> open() override {
    const TcpStoreOptions options{
        .address = server_->address(), .token = "secret", .protocol = protocol_};
    return TcpStore::connect(system_, options, system_.deadline_in(seconds(10))).value_or_throw();
  }

 private:
  os::System& system_;
  StoreProtocol protocol_;
  std::unique_ptr<TcpStoreServer> server_;
};

// A store in one file. Every handle opens the file separately.
class FileHarness final : public StoreHarness {
 public:
  explicit FileHarness(os::System& system) : system_(system) {}
  std::shared_ptr<Store> open() override {
    return FileStore::open(system_, {.path = folder_.file("store")},
                           system_.deadline_in(std::chrono::seconds(10)))
        .value_or_throw();
  }

 private:
  os::System& system_;
  testing::TemporaryFolder folder_;
};

struct StoreKind {
  const char* name;
  std::function<std::unique_ptr<StoreHarness>(os::System&)> make;
};

inline void PrintTo(const StoreKind& kind, std::ostream* out) {
  *out << kind.name;
}

class StoreConformance : public ::testing::TestWithParam<StoreKind> {
 protected:
  Deadline soon() { return system_->deadline_in(seconds(20)); }
  Deadline at_once() { return system_->deadline_in(milliseconds(50)); }

  // Calls each body in its own thread, all at the same time, and joins the threads.
  void run_together(std::vector<std::function<void()>> bodies) {
    std::vector<std::unique_ptr<os::Thread>> threads;
    for (auto& body : bodies) threads.push_back(system_->spawn("store_test", std::move(body)));
    for (auto& thread : threads) thread->join();
  }

  std::unique_ptr<os::System> system_ = os::make_native_system();
  std::unique_ptr<StoreHarness> harness_ = GetParam().make(*system_);
  std::shared_ptr<Store> store_ = harness_->open();
};

#define EXPECT_OK(expression)                               \
  do {                                                      \
    const auto& result_ = (expression);                     \
    EXPECT_TRUE(result_.ok()) << result_.error().message(); \
  } while (false)

}  // namespace cadre
