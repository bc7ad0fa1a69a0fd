// A stream-ordered engine for tests, as NCCL is one. Its fake device uses host memory: submit()
// enqueues the operation on a stream, a thread executes the stream, and the Completion completes
// later. The engine cannot be aborted.
//
// Threads: FakeStream from any thread; FakeStreamBackend those of Backend. Blocking:
// FakeStream::synchronize() and the destructors, until everything enqueued has run; submit() does
// not block. Lifetime: a FakeStream must outlive the operations behind its points. Errors: those of
// FakeBackend, when the Completion completes. For tests only. Source: CUDA's streams and events,
// and how NCCL uses them.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "cadre/core/collective/backend.h"
#include "cadre/core/collective/completion.h"
#include "cadre/core/comm/backend_factory.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/fake_backend.h"
#include "cadre/testing/core/fake_peers.h"

namespace cadre::testing {

// A flag that is set once. Several threads can wait for it.
class FakeEvent {
 public:
  explicit FakeEvent(os::System& system) : system_(system) {}
  void set();
  bool is_set() const;
  // Waits until the flag is set. Returns false at the deadline.
  bool wait(Deadline deadline);

 private:
  os::System& system_;
  mutable std::mutex mutex_;
  bool is_set_ = false;
  std::vector<os::Waiter*> waiting_;
};

// The point at which an event is set.
class FakePoint final : public DevicePoint {
 public:
  FakePoint(os::System& system, std::shared_ptr<FakeEvent> event)
      : system_(system), event_(std::move(event)) {}

  Status order_current_stream() const override;

 private:
  os::System& system_;
  const std::shared_ptr<FakeEvent> event_;
};

// Runs the enqueued functions in order, in its own thread.
class FakeStream {
 public:
  // While a Current exists, its stream is the current one of the thread that made it. The default
  // stream of the fake device is the calling thread itself: what is ordered on it waits here.
  class Current {
   public:
    explicit Current(FakeStream& stream);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    FakeStream* const outer_;
  };

  explicit FakeStream(os::System& system);
  ~FakeStream();
  FakeStream(const FakeStream&) = delete;
  FakeStream& operator=(const FakeStream&) = delete;

  void enqueue(std::function<void()> task);
  // Lets all functions that are enqueued later wait for the event.
  void wait_event(std::shared_ptr<FakeEvent> event);
  // Returns an event that is set when everything enqueued so far has run.
  std::shared_ptr<FakeEvent> record_event();
  // Returns a point that is reached when everything enqueued so far has run.
  std::shared_ptr<const DevicePoint> point() {
    return std::make_shared<FakePoint>(system_, record_event());
  }
  // Waits until everything enqueued so far has run. Returns false at the deadline.
  bool synchronize(Deadline deadline) { return record_event()->wait(deadline); }

 private:
  void run();

  os::System& system_;
  const std::unique_ptr<os::Waiter> waiter_;  // the stream's thread waits on it
  std::mutex mutex_;
  std::deque<std::function<void()>> tasks_;
  bool is_stopping_ = false;
  std::unique_ptr<os::Thread> thread_;
};

class FakeStreamBackend final : public Backend {
 public:
  FakeStreamBackend(FakeRank self, std::shared_ptr<FakePeers> peers,
                    std::shared_ptr<FakeCalls> calls);

  Capabilities capabilities() const override;
  Completion submit(const OpContext& op, std::span<const Collective> collectives) override;

 private:
  Completion make_completion(std::span<const Collective> collectives,
                             const std::shared_ptr<FakeEvent>& end);

  const FakeRank self_;
  const std::shared_ptr<FakePeers> peers_;
  const std::shared_ptr<FakeCalls> calls_;
  FakeStream stream_;  // the last member, because its thread uses the others
};

// Returns a factory of these engines, for CommunicatorOptions::backend and device_backend.
BackendFactory fake_stream_backend(
    std::shared_ptr<FakePeers> peers,
    std::shared_ptr<FakeCalls> calls = std::make_shared<FakeCalls>());

// Returns a System of this process that is never destroyed. An engine that cannot be aborted (see
// Backend) uses its group's System until the process ends, even after the group has abandoned the
// engine.
os::System& process_system();

}  // namespace cadre::testing
