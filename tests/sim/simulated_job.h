// Runs one job in the simulator. A seed picks its shape and its steps, and the test picks its
// faults.
//
// Threads: call from one thread. Blocking: run_job, in real time for as long as the ranks compute.
// Errors: what a rank threw is in its report.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/comm/communicator.h"
#include "cadre/core/sim/simulator.h"
#include "planted_bugs.h"
#include "workload.h"

namespace cadre::testing {

// The timeout of every operation, and of connecting.
inline constexpr Duration kJobTimeout = std::chrono::seconds(20);

enum class Shape {
  kSharedMemory,  // one host
  kTcpOnOneHost,
  kHostEach,  // TCP
  kTwoHosts,  // over TCP, with several ranks on each host if there are enough ranks
};
std::string_view to_string(Shape shape);

struct JobPlan {
  uint64_t seed = 0;
  int world_size = 0;
  Shape shape = Shape::kSharedMemory;
  sim::SimOptions options;
  Program program;
  PlantedBug bug = PlantedBug::kNone;
  int num_groups = 1;  // these groups run one after the other, in rounds 1, 2, ...
  // The time for which a rank keeps a group that has failed. When it destroys the group, the others
  // learn of the failure, too.
  Duration keeps_failed_group{};

  int host_of(int rank) const;
};

// Returns a plan with 2 to CADRE_SIM_MAX_RANKS ranks (by default 4). The seed picks one of the
// shapes.
JobPlan plan_job(uint64_t seed, std::span<const Shape> shapes);
JobPlan plan_job(uint64_t seed, std::span<const Shape> shapes, int world_size);

struct RankReport {
  bool has_ended = false;  // false: the rank was killed or stopped permanently
  // True as long as the rank has no group: it is connecting, has failed to connect, or has ended.
  bool is_connecting = true;
  std::optional<Error> failure;  // nullopt if all results were right
  TimePoint failed_at;

  bool is_right() const { return has_ended && !failure; }
  bool was_connecting() const { return failure && is_connecting; }
  std::string describe() const;
};

struct JobOutcome {
  sim::SimResult sim;
  std::vector<RankReport> ranks;

  bool all_right() const;
  std::string describe() const;
};

JobOutcome run_job(const JobPlan& plan);

}  // namespace cadre::testing
