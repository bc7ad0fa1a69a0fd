// Runs the control planes of a job for tests: ranks that connect to each other, and groups that
// record the events that they receive. The ranks are threads, whose hosts are only names in their
// addresses, or ranks of the simulator.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/fabric/plane/control_plane.h"
#include "cadre/core/fabric/plane/topology.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {

class RecordedGroup final : public GroupEvents {
 public:
  explicit RecordedGroup(int rank) : rank_(rank) {}

  void on_rank_lost(const LossReport& loss) override {
    std::lock_guard lock(mutex_);
    losses_.push_back(loss);
  }
  void on_rank_left_group(const wire::GroupLeave& leave) override {
    std::lock_guard lock(mutex_);
    leavings_.emplace_back(leave.rank, leave.num_collectives);
  }
  void on_group_failed(const GroupFailure& failure) override {
    std::lock_guard lock(mutex_);
    failures_.push_back(failure);
  }
  std::optional<wire::Activity> own_activity() override {
    return wire::Activity{.state = wire::ActivityState::kDone,
                          .number = 1000 + static_cast<uint64_t>(rank_)};
  }

  std::vector<LossReport> losses() const {
    std::lock_guard lock(mutex_);
    return losses_;
  }
  // Returns the lost ranks of all reports in ascending order, with duplicates.
  std::vector<int> lost() const {
    std::vector<int> ranks;
    for (const LossReport& loss : losses()) ranks.push_back(loss.rank);
    std::ranges::sort(ranks);
    return ranks;
  }
  std::vector<std::pair<int, uint64_t>> leavings() const {
    std::lock_guard lock(mutex_);
    auto sorted = leavings_;
    std::ranges::sort(sorted);
    return sorted;
  }
  std::vector<GroupFailure> failures() const {
    std::lock_guard lock(mutex_);
    return failures_;
  }

 private:
  const int rank_;
  mutable std::mutex mutex_;
  std::vector<LossReport> losses_;
  std::vector<std::pair<int, uint64_t>> leavings_;
  std::vector<GroupFailure> failures_;
};

// Evaluates the condition every millisecond until it is true. Returns false at the deadline.
inline bool await(os::System& system, const std::function<bool()>& is_met, Deadline deadline) {
  while (!is_met()) {
    if (deadline.has_passed(system.now())) return false;
    system.make_waiter()->park(system.deadline_in(std::chrono::milliseconds(1)));
  }
  return true;
}

inline void sleep_until(os::System& system, Duration since_start) {
  const Deadline until(TimePoint{} + since_start);
  while (!until.has_passed(system.now())) system.make_waiter()->park(until);
}

// The state that all ranks of one job share.
class PlaneJob {
 public:
  struct Options {
    Duration silence_limit = std::chrono::seconds(120);
    std::function<std::vector<Rank>()> lost_ranks = {};
    std::function<std::vector<GroupActivity>(int)> last_activities = {};
    std::function<void(int, std::unique_ptr<os::Socket>)> on_data_connection = {};
    std::vector<std::unique_ptr<os::Pollable>> processes = {};
    Duration patience = std::chrono::seconds(30);  // the timeout of the wait until all ranks listen
  };

  // Returns the address at which the ranks of a host listen: the loopback address for threads, the
  // simulated host's address in the simulator.
  using ListenHost = std::function<std::string(int host)>;
  PlaneJob(const std::vector<int>& ranks_per_host, ListenHost listen_host)
      : listen_host_(std::move(listen_host)) {
    for (size_t host = 0; host < ranks_per_host.size(); ++host) {
      host_of_.insert(host_of_.end(), static_cast<size_t>(ranks_per_host[host]),
                      static_cast<int>(host));
    }
    rank_addresses_.resize(host_of_.size());
  }
  static PlaneJob on_threads(const std::vector<int>& ranks_per_host) {
    return PlaneJob(ranks_per_host, [](int) { return std::string("127.0.0.1"); });
  }
  static PlaneJob in_simulator(const std::vector<int>& ranks_per_host) {
    return PlaneJob(ranks_per_host, [](int host) { return format("10.0.0.{}", host + 1); });
  }

  int num_ranks() const { return static_cast<int>(rank_addresses_.size()); }
  int host_of(int rank) const { return host_of_[static_cast<size_t>(rank)]; }

  // Makes the control plane of a rank. Blocks until all ranks listen; after that the planes connect
  // to each other by themselves.
  std::unique_ptr<ControlPlane> open(os::System& system, int rank, Options options) {
    ControlPlane::Setup setup;
    setup.rank = rank;
    setup.identity = {rank, 1, "fabric", "1.2.3", "token"};
    setup.silence_limit = options.silence_limit;
    setup.lost_ranks = std::move(options.lost_ranks);
    setup.last_activities = std::move(options.last_activities);
    setup.on_data_connection = std::move(options.on_data_connection);
    setup.processes = std::move(options.processes);
    listen(system, rank, setup);
    const bool all_came = await(
        system, [this] { return num_listening() == num_ranks(); },
        system.deadline_in(options.patience));
    testing::require(all_came, "not all ranks listen in time");
    {
      std::lock_guard lock(mutex_);
      if (layout_ == nullptr) layout_ = std::make_shared<const Layout>(rank_addresses_);
      setup.layout = layout_;
    }
    return std::make_unique<ControlPlane>(system, std::move(setup));
  }
  std::unique_ptr<ControlPlane> open(os::System& system, int rank) {
    return open(system, rank, Options());
  }

  // Waits until the rank's plane has all connections that its topology requires at the start.
  void await_connected(os::System& system, const ControlPlane& plane, int rank) const {
    const size_t wanted =
        neighbours(*layout_, std::vector<bool>(rank_addresses_.size(), true), rank).size();
    const bool is_connected = await(
        system, [&] { return plane.counters().connections >= wanted; },
        system.deadline_in(std::chrono::seconds(30)));
    testing::require(is_connected, format("rank {} has {} of {} connections", rank,
                                          plane.counters().connections, wanted));
  }

  // A barrier: returns when `num` ranks have called it with the same name `where`.
  void meet(os::System& system, int num, std::string_view where) {
    {
      std::lock_guard lock(mutex_);
      ++arrived_[std::string(where)];
    }
    const bool all_came = await(
        system,
        [&] {
          std::lock_guard lock(mutex_);
          return arrived_[std::string(where)] >= num;
        },
        system.deadline_in(std::chrono::seconds(60)));
    testing::require(all_came, format("fewer than {} ranks have reached {}", num, where));
  }

 private:
  void listen(os::System& system, int rank, ControlPlane::Setup& setup) {
    const int host = host_of(rank);
    setup.tcp_listeners.push_back(
        system.listen({os::Address::Kind::kTcp, listen_host_(host), 0}).value_or_throw());
    uint64_t random = 0;
    system.random_bytes(std::as_writable_bytes(std::span(&random, 1)));
    setup.unix_listener =
        system.listen({os::Address::Kind::kUnix, format("cadre-plane-{:016x}", random), 0})
            .value_or_throw();
    wire::RankAddress rank_address;
    rank_address.host = format("node{}", host);
    rank_address.boot_id = format("boot-{}", host);
    rank_address.pid = 100 + rank;
    rank_address.tcp_address = setup.tcp_listeners[0]->address().to_string();
    rank_address.unix_address = setup.unix_listener->address().to_string();
    std::lock_guard lock(mutex_);
    rank_addresses_[static_cast<size_t>(rank)] = rank_address;
    ++num_listening_;
  }
  int num_listening() const {
    std::lock_guard lock(mutex_);
    return num_listening_;
  }

  const ListenHost listen_host_;
  std::vector<int> host_of_;
  mutable std::mutex mutex_;
  std::vector<wire::RankAddress> rank_addresses_;
  int num_listening_ = 0;
  std::map<std::string, int> arrived_;
  std::shared_ptr<const Layout> layout_;
};

inline std::vector<int> all_ranks(int num_ranks) {
  std::vector<int> ranks(static_cast<size_t>(num_ranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

inline std::vector<int> without(std::vector<int> ranks, std::span<const int> gone) {
  std::erase_if(ranks, [&](int rank) { return std::ranges::find(gone, rank) != gone.end(); });
  return ranks;
}

}  // namespace cadre
