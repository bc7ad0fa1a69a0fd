#include "cadre/testing/core/fake_stream_backend.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/reduction_table.h"

namespace cadre::testing {
namespace {

// The timeout of one wait in a loop. A change of state wakes the waiting thread earlier.
constexpr Duration kLookAgain = std::chrono::seconds(60);

thread_local FakeStream* current_stream = nullptr;  // null for the default stream

}  // namespace

void FakeEvent::set() {
  const std::lock_guard lock(mutex_);
  is_set_ = true;
  for (os::Waiter* waiter : waiting_) waiter->unpark();
}

bool FakeEvent::is_set() const {
  const std::lock_guard lock(mutex_);
  return is_set_;
}

bool FakeEvent::wait(Deadline deadline) {
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(waiter.get());
  }
  while (!is_set() && !deadline.has_passed(system_.now())) waiter->park(deadline);
  const std::lock_guard lock(mutex_);
  std::erase(waiting_, waiter.get());
  return is_set_;
}

Status FakePoint::order_current_stream() const {
  if (current_stream != nullptr) {
    current_stream->wait_event(event_);
    return {};
  }
  while (!event_->wait(system_.deadline_in(kLookAgain))) {
  }
  return {};
}

FakeStream::Current::Current(FakeStream& stream) : outer_(std::exchange(current_stream, &stream)) {}

FakeStream::Current::~Current() {
  current_stream = outer_;
}

FakeStream::FakeStream(os::System& system)
    : system_(system),
      waiter_(system.make_waiter()),
      thread_(system.spawn("fake-stream", [this] { run(); })) {}

FakeStream::~FakeStream() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    waiter_->unpark();
  }
  thread_->join();
}

void FakeStream::enqueue(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  waiter_->unpark();
}

void FakeStream::wait_event(std::shared_ptr<FakeEvent> event) {
  enqueue([this, event = std::move(event)] {
    while (!event->wait(system_.deadline_in(kLookAgain))) {
    }
  });
}

std::shared_ptr<FakeEvent> FakeStream::record_event() {
  auto event = std::make_shared<FakeEvent>(system_);
  enqueue([event] { event->set(); });
  return event;
}

void FakeStream::run() {
  while (true) {
    std::function<void()> task;
    {
      const std::lock_guard lock(mutex_);
      if (tasks_.empty() && is_stopping_) return;
      if (!tasks_.empty()) {
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
    }
    if (task) {
      task();
    } else {
      waiter_->park(system_.deadline_in(kLookAgain));
    }
  }
}

FakeStreamBackend::FakeStreamBackend(FakeRank self, std::shared_ptr<FakePeers> peers,
                                     std::shared_ptr<FakeCalls> calls)
    : self_(std::move(self)),
      peers_(std::move(peers)),
      calls_(std::move(calls)),
      stream_(self_.system) {}

Capabilities FakeStreamBackend::capabilities() const {
  Capabilities can = full_capabilities("fake_stream");
  can.is_abortable = false;
  can.is_stream_ordered = true;
  can.devices.insert(DeviceType::kCuda);
  can.devices.insert(DeviceType::kPrivateUse1);
  for (size_t dtype = 0; dtype < kNumDTypes; ++dtype) {
    can.reductions[dtype] = supported_reductions(static_cast<DType>(dtype));
  }
  peers_->restrict(can);
  return can;
}

// If a result is in host memory, the callers wait until the operation has completed. Otherwise only
// their streams wait for it.
Completion FakeStreamBackend::make_completion(std::span<const Collective> collectives,
                                              const std::shared_ptr<FakeEvent>& end) {
  const bool is_on_host = std::ranges::any_of(
      collectives, [](const Collective& c) { return c.device.type == DeviceType::kCpu; });
  if (is_on_host) return Completion::make_pending();
  return Completion::make_pending(std::make_shared<FakePoint>(self_.system, end));
}

Completion FakeStreamBackend::submit(const OpContext& op, std::span<const Collective> collectives) {
  const FakeStream::Current current(stream_);
  for (const Collective& collective : collectives) {
    if (collective.after == nullptr) continue;
    const Status ordered = collective.after->order_current_stream();
    if (!ordered.ok()) return ordered;
  }
  const auto end = std::make_shared<FakeEvent>(self_.system);
  const Completion completion = make_completion(collectives, end);
  // Copies of the arguments of submit(), because these may be destroyed before the operation runs.
  struct Call {
    uint64_t number;
    std::vector<Fingerprint> fingerprints;
    Deadline deadline;
    std::vector<Collective> collectives;
  };
  auto call = std::make_shared<const Call>(Call{op.number,
                                                {op.fingerprints.begin(), op.fingerprints.end()},
                                                op.deadline,
                                                {collectives.begin(), collectives.end()}});
  stream_.enqueue([this, call = std::move(call), completion, end] {
    OpProgress progress;
    const OpContext own{call->number, call->fingerprints, call->deadline, progress};
    const auto run = [this](const OpContext& one, const Collective& collective) -> Status {
      try {
        return calls_->run(*peers_, self_, one, collective);
      } catch (const std::exception& thrown) {
        return Error(ErrorCode::kInternal, format("the fake device threw: {}", thrown.what()));
      }
    };
    const Status status = run_in_order(own, call->collectives, run);
    end->set();
    completion.complete(status);
  });
  return completion;
}

BackendFactory fake_stream_backend(std::shared_ptr<FakePeers> peers,
                                   std::shared_ptr<FakeCalls> calls) {
  return [peers, calls](const BackendSetup& setup) -> Result<std::unique_ptr<Backend>> {
    return std::unique_ptr<Backend>(
        std::make_unique<FakeStreamBackend>(FakeRank{.group = setup.group,
                                                     .rank = setup.rank,
                                                     .world_size = setup.world_size,
                                                     .system = setup.system},
                                            peers, calls));
  };
}

os::System& process_system() {
  // Never destroyed, because an engine that cannot be aborted uses it until the process ends.
  static os::System& system = *os::make_native_system().release();
  return system;
}

}  // namespace cadre::testing
