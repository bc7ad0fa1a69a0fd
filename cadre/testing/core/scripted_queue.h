// A fixture with an OperationQueue whose operations are executed by a function of the test (the
// script).
//
// Threads: those of OperationQueue. Blocking: the destructor, until the queue is closed. For tests
// only.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "cadre/core/collective/op.h"
#include "cadre/core/comm/queue/operation_queue.h"
#include "cadre/testing/core/log_lines.h"

namespace cadre::testing {

inline constexpr Duration kQueuePatience = std::chrono::seconds(20);

class ScriptedRunner final : public OperationRunner {
 public:
  using Script = std::function<Completion(const Operation&)>;
  explicit ScriptedRunner(Script script) : script_(std::move(script)) {}
  Completion run(Operation& operation) override { return script_(operation); }

 private:
  Script script_;
};

inline Completion out_of_memory_at_first(const Operation& operation) {
  if (operation.number == 1) throw std::bad_alloc();
  return Status();
}

// Returns an operation of barriers.
inline Operation barrier_operation(size_t num_collectives = 1) {
  // Static, because an Operation borrows its collectives, and the queue keeps the Operation.
  static const std::array<Collective, 3> collectives;
  static const Fingerprint fingerprint = OpDescriptor{}.fingerprint();
  static const std::array<Fingerprint, 3> fingerprints = {fingerprint, fingerprint, fingerprint};
  return {.collectives = std::span(collectives).first(num_collectives),
          .fingerprints = std::span(fingerprints).first(num_collectives)};
}

class OperationQueueTest : public ::testing::Test {
 protected:
  ~OperationQueueTest() override {
    if (queue_ != nullptr) queue_->close();
  }

  OperationQueue& start(ScriptedRunner::Script script) {
    runner_ = std::make_unique<ScriptedRunner>(std::move(script));
    queue_ = std::make_shared<OperationQueue>(
        system(), *runner_,
        std::make_shared<const ForkGuard>("world", 0, native_->host().pid,
                                          std::make_shared<const os::ForkMark>()),
        log_);
    return *queue_;
  }
  virtual os::System& system() { return *native_; }
  std::string log_text() const {
    std::string text;
    for (const std::string& line : log_->get()) text += line + "\n";
    return text;
  }
  Deadline soon() { return native_->deadline_in(kQueuePatience); }

  std::unique_ptr<os::System> native_ = os::make_native_system();
  const std::shared_ptr<LogLines> log_ = std::make_shared<LogLines>();
  std::unique_ptr<ScriptedRunner> runner_;
  std::shared_ptr<OperationQueue> queue_;
};

// Returns a future that becomes ready when the operation completes; get() throws the operation's
// error, if it has one.
inline std::future<void> future_of(const Work& work) {
  const auto promise = std::make_shared<std::promise<void>>();
  work.on_completed([promise](const std::optional<Error>& error) {
    if (error) return promise->set_exception(std::make_exception_ptr(*error));
    promise->set_value();
  });
  return promise->get_future();
}

}  // namespace cadre::testing
