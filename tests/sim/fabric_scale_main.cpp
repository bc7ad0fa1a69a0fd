// Runs a large job in the simulator: all ranks connect, run an all_reduce of 8 B and one of 1 MB,
// and split the group. Then one rank is killed, then all ranks of a host, and the others leave.
// Prints the cost of each phase next to its bound. Exits with 1 if a rank lacks a required event,
// or if a bound is exceeded.
//
//     cadre_fabric_scale [hosts] [ranks on each]
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/fabric/plane/topology.h"
#include "cadre/core/os/native/monotonic_clock.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/ranks.h"
#include "counting_store.h"
#include "scale_report.h"

namespace cadre::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// The timeout of each operation, and of the rendezvous.
constexpr Duration kTimeout = seconds(120);
constexpr Duration kLook = milliseconds(5);
// The virtual time after a phase in which events spread (kSettle) and lost connections are replaced
// (kHeal).
constexpr Duration kSettle = milliseconds(100);
constexpr Duration kHeal = seconds(2);
constexpr size_t kLargeBytes = 1 << 20;

struct Shape {
  int num_hosts = 8;
  int per_host = 8;

  int num_ranks() const { return num_hosts * per_host; }
  int lost_rank() const { return per_host * (num_hosts / 3) + 1; }
  int lost_host() const { return num_hosts / 2; }
  bool is_of_lost_host(int rank) const { return rank / per_host == lost_host(); }
  // Returns the ranks that have been killed, in ascending order.
  std::vector<int> lost_ranks() const {
    std::vector<int> lost = {lost_rank()};
    for (int slot = 0; slot < per_host; ++slot) lost.push_back(lost_host() * per_host + slot);
    return lost;
  }
};

// The phases in the order in which the job runs them.
enum PhaseNumber : size_t { kMeet, kSmall, kLarge, kSplit, kLoseRank, kLoseHost, kLeave };

// Makes a report with the bounds for P ranks, R of them on each of H hosts. Logarithms are rounded
// up. C and D are the largest numbers of endpoints of control and data connections, over all ranks
// together. docs/decisions/0011-fabric.md derives the bounds.
ScaleReport make_report(const Shape& shape) {
  const double ranks = shape.num_ranks();
  const double host_exponent = std::bit_width(static_cast<unsigned>(shape.num_hosts - 1));
  const double exponent = std::bit_width(static_cast<unsigned>(shape.num_ranks() - 1));
  const double far_ends = 4 * shape.num_hosts * host_exponent;
  const double ends = ranks * (shape.per_host - 1) + far_ends + 2 * (shape.num_hosts - 1);
  const double requests = 6 * ranks - 2 + 2 * ((shape.num_ranks() + 63) / 64);
  const double message_bytes = 512;
  const Bound no_store{Cost::kStoreRequests, 0, "0"};
  const Bound no_message{Cost::kControlMessages, 0, "0"};
  const Bound no_data{Cost::kDataConnections, 0, "0"};
  const Bound data_ends{Cost::kDataConnections, 4 * ranks * exponent, "D = 4 P log2(P)"};
  const Bound healed{Cost::kControlConnections, far_ends, "4 H log2(H)"};
  ScaleReport report(shape.num_ranks());
  report.add({"meet",
              {{Cost::kStoreRequests, 2 * requests, "2 (6 P - 2 + 2 ceil(P / 64))"},
               {Cost::kStoreBytesIn, 700 * ranks, "700 P"},
               {Cost::kStoreBytesOut, 400 * ranks, "400 P"},
               {Cost::kControlConnections, ends, "C = P (R - 1) + 4 H log2(H) + 2 (H - 1)"},
               no_message,
               no_data}});
  report.add({"all_reduce 8 B",
              {no_store,
               no_message,
               data_ends,
               {Cost::kDataFrames, 8 * ranks * exponent, "8 P log2(P)"},
               {Cost::kDataBytes, 512 * ranks * exponent, "512 P log2(P)"}}});
  report.add({"all_reduce 1 MB",
              {no_store,
               no_message,
               data_ends,
               {Cost::kDataBytes, 1.01 * kLargeBytes * ranks * (exponent + 2),
                "1.01 MB P (log2(P) + 2)"}}});
  report.add({"split",
              {no_store,
               no_message,
               data_ends,
               {Cost::kDataBytes, ranks * (192 * ranks + 1024 * exponent),
                "P (192 P + 1024 log2(P)), an all_gather"}}});
  const auto add_loss = [&](const char* name, int messages_per_end, const Bound& data) {
    report.add(
        {name,
         {no_store,
          healed,
          {Cost::kControlMessages, messages_per_end * ends, format("{} C", messages_per_end)},
          {Cost::kControlBytes, messages_per_end * ends * message_bytes, "512 B each"},
          data}});
  };
  add_loss("a rank dies", 2, data_ends);
  add_loss("a host dies", 4, no_data);
  report.add({"leave",
              {no_store,
               {Cost::kControlConnections, 4 * ranks, "4 P: two ends of two that each may open"},
               {Cost::kControlMessages, 2 * host_exponent * ends, "2 C log2(H)"},
               {Cost::kControlBytes, ranks * 32 * ranks, "32 P P: each hears of each"},
               no_data}});
  return report;
}

class Job {
 public:
  explicit Job(const Shape& shape)
      : shape_(shape),
        simulator_(1, {.ranks_per_host =
                           std::vector<int>(static_cast<size_t>(shape.num_hosts), shape.per_host),
                       .delay_probability = 0,
                       .slow_link_probability = 0,
                       .short_io_probability = 0,
                       .spurious_wake_probability = 0,
                       .max_points = 1'000'000'000,
                       .keeps_history = false}),
        store_(std::make_shared<HashStore>(simulator_.system(0))),
        report_(make_report(shape)) {
    for (int rank = 0; rank < shape.num_ranks(); ++rank) {
      store_counts_.push_back(std::make_shared<StoreCounts>());
    }
  }

  // Runs the job and returns how many checks have failed.
  int run();

 private:
  void run_rank(os::System& system, int rank);
  void run_phases(Communicator& world, int rank);
  // Waits until `num` ranks have called this. The last one runs `action` before all of them
  // continue.
  void meet(os::System& system, int num, const std::function<void()>& action = {});
  void end_phase(size_t phase, const Fabric& fabric, Duration settle);
  void note(size_t phase, const Fabric& fabric);
  int num_living(size_t phase) const;

  const Shape shape_;
  sim::Simulator simulator_;
  const std::shared_ptr<HashStore> store_;
  // The request counts of the ranks' stores, indexed by rank. The stores share them.
  std::vector<std::shared_ptr<StoreCounts>> store_counts_;
  ScaleReport report_;
  std::mutex mutex_;
  int num_arrived_ = 0;
  int num_meetings_ = 0;
  TimePoint phase_began_{};
  TimePoint phase_really_began_{};
};

void park(os::System& system, Duration duration) {
  system.make_waiter()->park(system.deadline_in(duration));
}

void await(os::System& system, std::string_view what, const std::function<bool()>& is_met) {
  const Deadline deadline = system.deadline_in(kTimeout);
  while (!is_met()) {
    require(!deadline.has_passed(system.now()), what);
    park(system, kLook);
  }
}

void sum(Communicator& group, size_t num_bytes) {
  std::vector<float> values(num_bytes / sizeof(float), static_cast<float>(group.rank() + 1));
  const Bytes data = std::as_writable_bytes(std::span(values));
  group.all_reduce(data, data, DType::kFloat32, ReduceOp::kSum);
  const int64_t size = group.world_size();
  const auto expected = static_cast<float>(size * (size + 1) / 2);
  require(std::ranges::all_of(values, [&](float value) { return value == expected; }),
          format("the sum of {} B is {}, not {}", num_bytes, values.front(), expected));
}

// Checks that the group fails, and that the error names one of the lost ranks.
void require_loss(Communicator& group, const std::function<bool(int)>& is_lost) {
  try {
    sum(group, 8);
  } catch (const Error& error) {
    require(error.code() == ErrorCode::kPeerLost && error.details().culprit, error.message());
    const int culprit = group.global_rank(*error.details().culprit).value;
    require(is_lost(culprit), format("rank {} is named: {}", culprit, error.message()));
    return;
  }
  require(false, "the group has noticed no loss");
}

int Job::num_living(size_t phase) const {
  if (phase < kLoseRank) return shape_.num_ranks();
  return shape_.num_ranks() - 1 - (phase < kLoseHost ? 0 : shape_.per_host);
}

void Job::meet(os::System& system, int num, const std::function<void()>& action) {
  int meeting = 0;
  bool is_last = false;
  {
    const std::lock_guard lock(mutex_);
    meeting = num_meetings_;
    is_last = ++num_arrived_ == num;
  }
  if (is_last) {
    if (action) action();
    const std::lock_guard lock(mutex_);
    num_arrived_ = 0;
    ++num_meetings_;
  }
  await(system, "all ranks come to meet", [&] {
    const std::lock_guard lock(mutex_);
    return num_meetings_ > meeting;
  });
}

void Job::note(size_t phase, const Fabric& fabric) {
  const auto rank = static_cast<size_t>(fabric.rank().value);
  const ControlCounters control = fabric.plane()->counters();
  const LinkCounters data = fabric.links()->counters();
  const StoreCounts& store = *store_counts_[rank];
  Costs costs;
  costs[Cost::kStoreRequests] = static_cast<uint64_t>(store.requests);
  costs[Cost::kStoreBytesIn] = static_cast<uint64_t>(store.bytes_in);
  costs[Cost::kStoreBytesOut] = static_cast<uint64_t>(store.bytes_out);
  costs[Cost::kControlConnections] = control.connections;
  costs[Cost::kControlMessages] = control.frames_sent - control.heartbeats_sent;
  costs[Cost::kControlBytes] = control.bytes_sent;
  costs[Cost::kHeartbeats] = control.heartbeats_sent;
  costs[Cost::kDataConnections] = data.connections;
  costs[Cost::kDataFrames] = data.frames_sent;
  costs[Cost::kDataBytes] = data.bytes_sent;
  const std::lock_guard lock(mutex_);
  report_.phase(phase).at_end[rank] = costs;
}

void Job::end_phase(size_t phase, const Fabric& fabric, Duration settle) {
  os::System& system = fabric.system();
  const int num = num_living(phase);
  meet(system, num, [&] {
    const TimePoint really = os::monotonic_now();
    ScaleReport::Phase& ended = report_.phase(phase);
    ended.virtual_ms =
        std::chrono::duration<double, std::milli>(system.now() - phase_began_).count();
    ended.real_ms = std::chrono::duration<double, std::milli>(really - phase_really_began_).count();
  });
  park(system, settle);
  meet(system, num);
  note(phase, fabric);
  meet(system, num, [&] {
    phase_began_ = system.now();
    phase_really_began_ = os::monotonic_now();
  });
}

void Job::run_rank(os::System& system, int rank) {
  const Membership membership{
      rank, shape_.num_ranks(), 1,
      std::make_shared<CountingStore>(store_, store_counts_[static_cast<size_t>(rank)]), "token"};
  const auto world = Communicator::connect(
      system, membership,
      {.timeout = kTimeout, .listen_host = format("10.0.0.{}", rank / shape_.per_host + 1)},
      system.deadline_in(kTimeout));
  run_phases(*world, rank);
}

void Job::run_phases(Communicator& world, int rank) {
  os::System& system = world.system();
  const std::shared_ptr<Fabric> fabric = CommunicatorParts::impl_of(world).fabric;
  const std::vector<bool> all_present(static_cast<size_t>(shape_.num_ranks()), true);
  const size_t num_neighbours = neighbours(fabric->layout(), all_present, rank).size();
  await(system, "the control connections are open",
        [&] { return fabric->plane()->counters().connections >= num_neighbours; });
  end_phase(kMeet, *fabric, kSettle);
  sum(world, 8);
  end_phase(kSmall, *fabric, kSettle);
  sum(world, kLargeBytes);
  end_phase(kLarge, *fabric, kSettle);
  const bool is_lost_rank = rank == shape_.lost_rank();
  const auto survivors =
      split(world, {.color = is_lost_rank ? 1 : 0}, system.deadline_in(kTimeout));
  sum(*survivors, 8);
  end_phase(kSplit, *fabric, kSettle);

  while (is_lost_rank) park(system, kHeal);
  meet(system, num_living(kLoseRank), [&] { simulator_.kill(shape_.lost_rank()); });
  require_loss(world, [&](int culprit) { return culprit == shape_.lost_rank(); });
  sum(*survivors, 8);
  end_phase(kLoseRank, *fabric, kHeal);

  while (shape_.is_of_lost_host(rank)) park(system, kHeal);
  meet(system, num_living(kLoseHost), [&] {
    for (const int lost : shape_.lost_ranks()) simulator_.kill(lost);
  });
  require_loss(*survivors, [&](int culprit) { return shape_.is_of_lost_host(culprit); });
  // If the lost rank has no connection to another host, a rank of another host notices the loss
  // only when it tries to connect to it.
  await(system, "all losses are known",
        [&] { return fabric->plane()->lost_ranks() == shape_.lost_ranks(); });
  end_phase(kLoseHost, *fabric, kHeal);

  survivors->close(system.deadline_in(kTimeout));
  world.close(system.deadline_in(kTimeout));
  require(fabric->plane()->lost_ranks() == shape_.lost_ranks(),
          "a rank that has left must not count as lost");
  end_phase(kLeave, *fabric, kSettle);
}

int Job::run() {
  phase_really_began_ = os::monotonic_now();
  const TimePoint began = phase_really_began_;
  const sim::SimResult result =
      simulator_.run([this](os::System& system, int rank) { run_rank(system, rank); });
  int num_complaints = 0;
  const auto complain = [&](const std::string& what) {
    if (++num_complaints < 20) std::fputs((what + "\n").c_str(), stderr);
  };
  if (!result.failure.empty()) complain(result.failure.substr(0, 1000));
  int64_t num_points = 0;
  const std::vector<int> lost = shape_.lost_ranks();
  for (size_t rank = 0; rank < result.ranks.size(); ++rank) {
    const sim::RankEnd& end = result.ranks[rank];
    num_points += end.num_points;
    const bool is_lost = std::ranges::find(lost, static_cast<int>(rank)) != lost.end();
    if (!end.failure.empty())
      complain(format("rank {}: {}", rank, end.failure));
    else if ((end.kind == sim::RankEnd::Kind::kKilled) != is_lost)
      complain(format("rank {} did not end as it should", rank));
  }
  std::fputs(format("{} ranks on {} hosts; {} scheduling points, {:.1f} s\n", shape_.num_ranks(),
                    shape_.num_hosts, num_points,
                    std::chrono::duration<double>(os::monotonic_now() - began).count())
                 .c_str(),
             stdout);
  return num_complaints + report_.print();
}

}  // namespace
}  // namespace cadre::testing

int main(int argc, char** argv) {
  cadre::testing::Shape shape;
  if (argc > 1) shape.num_hosts = std::atoi(argv[1]);
  if (argc > 2) shape.per_host = std::atoi(argv[2]);
  if (shape.num_hosts < 4 || shape.num_hosts > 250 || shape.per_host < 2) {
    std::fputs("usage: cadre_fabric_scale [hosts, 4 to 250] [ranks on each, at least 2]\n", stderr);
    return 2;
  }
  return cadre::testing::Job(shape).run() == 0 ? 0 : 1;
}
