#include "cadre/core/sim/simulated_system.h"

#include <algorithm>

#include "cadre/core/base/format.h"
#include "cadre/core/sim/simulated_socket.h"

namespace cadre::sim {
namespace {

constexpr int kFirstPid = 1000;
// All hosts share the memory of one process, so each gets only a little.
constexpr uint64_t kMemoryBytes = 64 << 20;
constexpr uint64_t kSpuriousWakeSpreadNs = 50'000;

class SimulatedThread final : public os::Thread {
 public:
  SimulatedThread(Scheduler& scheduler, int number) : scheduler_(scheduler), number_(number) {}
  void join() override { scheduler_.join(number_); }

 private:
  Scheduler& scheduler_;
  const int number_;
};

// What spawn() returns to a caller whose rank was killed: no thread was started, so join() has
// nothing to wait for.
class NoThread final : public os::Thread {
 public:
  void join() override {}
};

class SimulatedWaiter final : public os::Waiter {
 public:
  explicit SimulatedWaiter(Scheduler& scheduler) : scheduler_(scheduler) {}

  bool park(Deadline deadline) override {
    const bool is_unparked = scheduler_.wait(
        "unpark", [this] { return is_unparked_; }, deadline);
    if (is_unparked) is_unparked_ = false;
    return is_unparked;
  }
  void unpark() override {
    scheduler_.count_point("unpark");
    is_unparked_ = true;
  }

 private:
  Scheduler& scheduler_;
  bool is_unparked_ = false;
};

bool look(std::span<os::PollItem> items) {
  bool is_any_ready = false;
  for (os::PollItem& item : items) {
    const auto& target = dynamic_cast<const Readiness&>(*item.target);
    item.can_read = item.want_read && target.can_read();
    item.can_write = item.want_write && target.can_write();
    is_any_ready |= item.can_read || item.can_write;
  }
  return is_any_ready;
}

// Returns a mask with one core for each rank of the host.
std::string first_cores(int num_cores) {
  std::string mask(static_cast<size_t>(num_cores) / 8, '\xff');
  if (num_cores % 8 != 0) mask += static_cast<char>((1U << num_cores % 8) - 1);
  return mask;
}

}  // namespace

World::World(uint64_t sim_seed, SimOptions sim_options, int num_ranks)
    : seed(sim_seed),
      options(std::move(sim_options)),
      scheduler(sim_seed, {.num_ranks = num_ranks,
                           .max_points = options.max_points,
                           .stall_limit = options.stall_limit,
                           .keeps_history = options.keeps_history}),
      network(scheduler, options, counts) {}

SimulatedSystem::SimulatedSystem(World& world, int rank)
    : world_(world), rank_(rank), random_(world.seed * 1'000'003 + static_cast<uint64_t>(rank)) {}

os::HostInfo SimulatedSystem::host() {
  const int host = world_.network.host_of(rank_);
  const int num_cores = world_.options.ranks_per_host[static_cast<size_t>(host)];
  return {.name = cadre::format("node{}", host),
          .boot_id = cadre::format("simulated-boot-{}", host),
          .pid = kFirstPid + rank_,
          .num_cores = num_cores,
          .core_mask = first_cores(num_cores),
          .memory_bytes = kMemoryBytes,
          .max_segment_bytes = static_cast<uint64_t>(num_cores) * 2 * kMemoryBytes};
}

std::unique_ptr<os::Thread> SimulatedSystem::spawn(std::string name, std::function<void()> body) {
  world_.scheduler.step("spawn");
  if (world_.scheduler.is_caller_dead()) return std::make_unique<NoThread>();
  const int number = world_.scheduler.add_thread(rank_, std::move(name), std::move(body));
  return std::make_unique<SimulatedThread>(world_.scheduler, number);
}

std::unique_ptr<os::Waiter> SimulatedSystem::make_waiter() {
  return std::make_unique<SimulatedWaiter>(world_.scheduler);
}

bool SimulatedSystem::wait_while(os::WaitWord& word, uint32_t old, Deadline deadline) {
  Scheduler& scheduler = world_.scheduler;
  scheduler.pause("look at a word");
  if (scheduler.is_caller_dead()) return false;
  if (word.value.load(std::memory_order_acquire) != old) return true;
  if (deadline.has_passed(now())) return false;
  TimePoint nap_end = now() + world_.options.max_nap;
  if (world_.network.chance(world_.options.spurious_wake_probability)) {
    nap_end =
        now() + Duration(static_cast<int64_t>(scheduler.random().below(kSpuriousWakeSpreadNs)));
    world_.counts.add(FaultKind::kSpuriousWake);
  }
  SleepingThreads::Sleep sleep(world_.words, word);
  scheduler.wait(
      cadre::format("a word that is {}", old), [&sleep] { return sleep.is_over(); },
      Deadline(nap_end).earlier(deadline));
  return word.value.load(std::memory_order_acquire) != old || !deadline.has_passed(now());
}

void SimulatedSystem::publish(os::WaitWord& word, uint32_t value) {
  world_.scheduler.pause("publish");
  if (world_.scheduler.is_caller_dead()) return;
  word.value.store(value, std::memory_order_seq_cst);
  world_.words.wake(word);
}

void SimulatedSystem::wake(os::WaitWord& word) {
  world_.scheduler.count_point("wake");
  if (!world_.scheduler.is_caller_dead()) world_.words.wake(word);
}

bool SimulatedSystem::poll(std::span<os::PollItem> items, Deadline deadline) {
  for (const os::PollItem& item : items) {
    if (auto* const event = dynamic_cast<SimulatedEvent*>(item.target)) event->add_poller(rank_);
  }
  return world_.scheduler.wait_for_touch(
      cadre::format("poll of {}", items.size()), [items] { return look(items); }, deadline);
}

Result<std::unique_ptr<os::Listener>> SimulatedSystem::listen(const os::Address& address) {
  world_.scheduler.step("listen");
  auto point = world_.network.listen(rank_, address);
  if (!point.ok()) return point.error();
  return std::unique_ptr<os::Listener>(
      std::make_unique<SimulatedListener>(world_.network, *std::move(point)));
}

Result<std::unique_ptr<os::Socket>> SimulatedSystem::connect(const os::Address& address,
                                                             Deadline deadline) {
  world_.scheduler.step("connect");
  if (world_.scheduler.is_caller_dead()) {
    return Error(ErrorCode::kTimeout, "this rank was killed");
  }
  auto connection = world_.network.connect(rank_, address, deadline);
  if (!connection.ok()) return connection.error();
  return std::unique_ptr<os::Socket>(
      std::make_unique<SimulatedSocket>(world_.network, *std::move(connection), 0));
}

std::unique_ptr<os::Event> SimulatedSystem::make_event() {
  return std::make_unique<SimulatedEvent>(world_.scheduler);
}

Result<std::unique_ptr<os::SharedMemory>> SimulatedSystem::create_segment(size_t num_bytes) {
  world_.scheduler.step("create a segment");
  auto memory = world_.segments.create(num_bytes);
  if (!memory.ok()) return memory.error();
  return std::unique_ptr<os::SharedMemory>(std::make_unique<SimulatedSegment>(*std::move(memory)));
}

void SimulatedSystem::random_bytes(Bytes out) {
  for (std::byte& byte : out) byte = static_cast<std::byte>(random_.next());
}

}  // namespace cadre::sim
