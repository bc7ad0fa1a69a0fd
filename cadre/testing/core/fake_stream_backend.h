// A stream-ordered engine for tests, on a fake device whose memory is host memory: submit()
// enqueues on a stream that a thread executes, and the Completion is done later. It cannot be
// aborted.
//
// Threads: FakeStream from any; FakeStreamBackend those of Backend. Blocking:
// FakeStream::synchronize(), and the destructors, until everything enqueued has run; submit()
// never. Lifetime: a FakeStream is a Collective::stream and must outlive the operations with which
// it is used. Errors: those of FakeBackend, at the end of the Completion. For tests only. Source:
// CUDA's streams and events, NCCL's use of them.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "cadre/core/collective/backend.h"
#include "cadre/core/comm/backend_factory.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/fake_backend.h"
#include "cadre/testing/core/fake_peers.h"

namespace cadre::testing {

// A flag that is set once and waited for by several threads.
class FakeEvent {
 public:
  explicit FakeEvent(os::System& system) : system_(system) {}
  void set();
  bool is_set() const;
  // Returns false at the deadline.
  bool wait(Deadline deadline);

 private:
  os::System& system_;
  mutable std::mutex mutex_;
  bool is_set_ = false;
  std::vector<os::Waiter*> waiting_;
};

// Runs the enqueued functions in order, in a thread of its own.
class FakeStream {
 public:
  explicit FakeStream(os::System& system);
  ~FakeStream();
  FakeStream(const FakeStream&) = delete;
  FakeStream& operator=(const FakeStream&) = delete;

  void enqueue(std::function<void()> task);
  // Makes everything that is enqueued later run after the event.
  void wait_event(std::shared_ptr<FakeEvent> event);
  // Returns an event that is set when everything enqueued until now has run.
  std::shared_ptr<FakeEvent> record_event();
  // Waits until everything enqueued until now has run; returns false at the deadline.
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
  FakeStream stream_;  // last, because its thread uses the other members
};

// Returns a value for CommunicatorOptions::backend.
BackendFactory fake_stream_backend(
    std::shared_ptr<FakePeers> peers,
    std::shared_ptr<FakeCalls> calls = std::make_shared<FakeCalls>());

// Returns this process's System, which is never destroyed. An engine that cannot be aborted (see
// Backend) uses its group's System until the process ends, also after the group has left the
// engine.
os::System& process_system();

}  // namespace cadre::testing
