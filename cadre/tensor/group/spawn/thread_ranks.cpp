#include "cadre/tensor/group/spawn/thread_ranks.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/group_destruction.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/rendezvous.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/tensor/group/caught_error.h"

namespace cadre {
namespace {

// A thread that is a rank stays one until its end, and spawn() in code that it calls must know
// that.
thread_local bool is_rank = false;

// What a rank's group borrows, in the order of construction. The handles of the group share it.
struct ThreadRank {
  std::shared_ptr<os::System> system;
  std::shared_ptr<Store> store;
  std::unique_ptr<Communicator> communicator;
};

class ThreadRanks {
 public:
  ThreadRanks(const std::function<void(const ProcessGroup&)>& function, int num_ranks,
              int num_compute_threads, const SpawnOptions& options)
      : function_(function),
        num_ranks_(num_ranks),
        num_compute_threads_(num_compute_threads),
        options_(options) {}

  std::optional<RankFailure> run() {
    std::vector<std::unique_ptr<os::Thread>> threads;
    try {
      for (int rank = 0; rank < num_ranks_; ++rank) {
        threads.push_back(system_->spawn(format("rank{}", rank), [this, rank] { run_rank(rank); }));
      }
      gate_ = Gate::kOpen;
    } catch (...) {
      gate_ = Gate::kCancelled;
      for (const auto& thread : threads) thread->join();
      throw;
    }
    for (const auto& thread : threads) thread->join();
    return std::move(first_failure_);
  }

 private:
  // No rank begins until all have a thread: those that began would wait for the others.
  enum class Gate { kClosed, kOpen, kCancelled };

  bool wait_at_gate() {
    const auto waiter = system_->make_waiter();
    while (gate_ == Gate::kClosed) {
      waiter->park(system_->deadline_in(std::chrono::milliseconds(1)));
    }
    return gate_ == Gate::kOpen;
  }

  ProcessGroup connect(int rank) {
    auto own = std::make_unique<ThreadRank>();
    own->system = system_;
    own->store = store_;
    own->communicator = Communicator::connect(
        *system_,
        {.rank = rank, .world_size = num_ranks_, .store = num_ranks_ > 1 ? store_ : nullptr},
        {.timeout = options_.timeout}, system_->deadline_in(options_.connect_timeout));
    return ProcessGroup(share_group(std::move(own)));
  }

  void run_rank(int rank) {
    if (!wait_at_gate()) return;
    is_rank = true;
    if (num_compute_threads_ > 0) at::set_num_threads(num_compute_threads_);
    std::optional<ProcessGroup> world;
    try {
      world = connect(rank);
      function_(*world);
      world->close();
    } catch (...) {
      // This failure is kept before the group ends, because its end makes the other ranks fail.
      const Error error = caught_error();
      keep_first({rank, error});
      if (world) world->abort(format("rank {} failed: {}", rank, error.message()));
    }
  }

  void keep_first(RankFailure failure) {
    const std::lock_guard lock(mutex_);
    if (!first_failure_) first_failure_ = std::move(failure);
  }

  const std::function<void(const ProcessGroup&)>& function_;
  const int num_ranks_;
  const int num_compute_threads_;
  const SpawnOptions& options_;
  const std::shared_ptr<os::System> system_ = os::make_native_system();
  const std::shared_ptr<Store> store_ = std::make_shared<HashStore>(*system_);
  std::atomic<Gate> gate_ = Gate::kClosed;
  std::mutex mutex_;
  std::optional<RankFailure> first_failure_;  // mutex_ guards it
};

}  // namespace

bool is_thread_rank() {
  return is_rank;
}

std::optional<RankFailure> run_thread_ranks(
    const std::function<void(const ProcessGroup& world)>& function, int num_ranks,
    int num_compute_threads, const SpawnOptions& options) {
  // Threads that start later get the number that was set last in any thread.
  const int num_before = at::get_num_threads();
  ThreadRanks ranks(function, num_ranks, num_compute_threads, options);
  auto failure = ranks.run();
  at::set_num_threads(num_before);
  return failure;
}

}  // namespace cadre
