// Runs one job in the simulator. A seed determines its shape and its steps; the test determines its
// faults.
//
// Threads: call from one thread. Blocking: run_job() takes as much real time as the ranks compute.
// Errors: the error of a rank is in its report.
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
  kSharedMemory,  // all ranks on one host
  kTcpOnOneHost,
  kHostEach,  // each rank on a host of its own, over TCP
  kTwoHosts,  // two hosts over TCP, with several ranks on each if there are enough ranks
};
std::string_view to_string(Shape shape);

struct JobPlan {
  uint64_t seed = 0;
  int world_size = 0;
  Shape shape = Shape::kSharedMemory;
  sim::SimOptions options;
  Program program;
  PlantedBug bug = PlantedBug::kNone;
  int num_groups = 1;  // the groups are made one after the other, in rounds 1, 2, ...
  // How long a rank keeps a group that has failed. When the rank destroys the group, the other
  // ranks learn of the failure, too.
  Duration keeps_failed_group{};

  int host_of(int rank) const;
};

// Returns a plan with 2 to CADRE_SIM_MAX_RANKS ranks (default 4). The seed selects one of the
// shapes.
JobPlan plan_job(uint64_t seed, std::span<const Shape> shapes);
JobPlan plan_job(uint64_t seed, std::span<const Shape> shapes, int world_size);

struct RankReport {
  bool has_ended = false;  // false if the rank was killed or stopped permanently
  // Whether the rank is in no group: it is still connecting, has failed to connect, or has ended.
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
