// One job in the simulator. A seed picks its shape and its steps; the test picks its faults.
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

// Timeout of every operation, and of connecting.
inline constexpr Duration kJobTimeout = std::chrono::seconds(20);

enum class Shape {
  kSharedMemory,  // one host
  kTcpOnOneHost,
  kHostEach,  // TCP
  kTwoHosts,  // TCP, with several ranks on each where there are so many
};
std::string_view to_string(Shape shape);

struct JobPlan {
  uint64_t seed = 0;
  int world_size = 0;
  Shape shape = Shape::kSharedMemory;
  sim::SimOptions options;
  Program program;
  PlantedBug bug = PlantedBug::kNone;
  int num_groups = 1;  // one after the other, in rounds 1, 2, ...
  // How long a rank keeps a group that has failed. The end of the group tells the others, too.
  Duration keeps_failed_group{};

  int host_of(int rank) const;
};

// Makes a plan with 2 to CADRE_SIM_MAX_RANKS ranks (default 4); the seed picks one of the shapes.
JobPlan plan_job(uint64_t seed, std::span<const Shape> shapes);
JobPlan plan_job(uint64_t seed, std::span<const Shape> shapes, int world_size);

struct RankReport {
  bool has_ended = false;        // false: killed or stopped permanently
  bool is_connecting = true;     // true while it has no group: it fails to connect, or has ended
  std::optional<Error> failure;  // nullopt: all results were right
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
