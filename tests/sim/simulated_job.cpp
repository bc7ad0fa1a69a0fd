#include "simulated_job.h"

#include <algorithm>
#include <memory>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/seeds.h"

namespace cadre::testing {
namespace {

constexpr Duration kCloseTime = std::chrono::seconds(5);

std::vector<int> ranks_per_host(Shape shape, int world_size) {
  switch (shape) {
    case Shape::kSharedMemory:
    case Shape::kTcpOnOneHost:
      break;
    case Shape::kHostEach:
      return std::vector<int>(static_cast<size_t>(world_size), 1);
    case Shape::kTwoHosts:
      return {world_size - world_size / 2, world_size / 2};
  }
  return {world_size};
}

CommunicatorOptions options_of(const JobPlan& plan, int rank) {
  CommunicatorOptions options;
  options.timeout = kJobTimeout;
  if (plan.shape == Shape::kTcpOnOneHost) options.transport = TransportChoice::kTcp;
  // The simulator gives this address to the rank's host.
  if (plan.options.ranks_per_host.size() > 1) {
    options.listen_host = format("10.0.0.{}", plan.host_of(rank) + 1);
  }
  return options;
}

void run_rank(os::System& simulated, Store& shared, int rank, const JobPlan& plan,
              RankReport& report) {
  BuggySystem system(simulated, plan.bug);
  const auto store = std::make_shared<BuggyStore>(shared, plan.bug);
  try {
    for (int i = 0; i < plan.num_groups; ++i) {
      const Membership membership{rank, plan.world_size, static_cast<uint64_t>(i) + 1, store,
                                  "token"};
      const auto group = Communicator::connect(system, membership, options_of(plan, rank),
                                               system.deadline_in(kJobTimeout));
      report.is_connecting = false;
      try {
        run_program(*group, plan.program);
      } catch (const Error&) {
        report.failed_at = system.now();  // taken before the group announces that this rank leaves
        if (plan.keeps_failed_group > Duration{}) {
          system.make_waiter()->park(system.deadline_in(plan.keeps_failed_group));
        }
        throw;
      }
      group->close(system.deadline_in(kCloseTime));
      report.is_connecting = true;
    }
  } catch (const Error& error) {
    report.failure = error;
    if (report.was_connecting()) report.failed_at = system.now();
  }
  report.has_ended = true;
}

}  // namespace

std::string_view to_string(Shape shape) {
  switch (shape) {
    case Shape::kSharedMemory:
      return "shared memory";
    case Shape::kTcpOnOneHost:
      return "TCP on one host";
    case Shape::kHostEach:
      return "a host for each rank";
    case Shape::kTwoHosts:
      return "two hosts";
  }
  return "";
}

int JobPlan::host_of(int rank) const {
  int host = 0;
  for (int end = options.ranks_per_host[0]; end <= rank; ++host) {
    end += options.ranks_per_host[static_cast<size_t>(host) + 1];
  }
  return host;
}

JobPlan plan_job(uint64_t seed, std::span<const Shape> shapes) {
  // All sizes are equally frequent, so small worlds occur as often as large ones.
  const auto num_sizes = static_cast<uint64_t>(max_simulated_ranks() - 1);
  return plan_job(seed, shapes, 2 + static_cast<int>(Random(seed ^ 0x51ed).below(num_sizes)));
}

JobPlan plan_job(uint64_t seed, std::span<const Shape> shapes, int world_size) {
  Random random(seed ^ 0x7ab1e);
  JobPlan plan;
  plan.seed = seed;
  plan.world_size = world_size;
  plan.shape = shapes[random.below(shapes.size())];
  plan.options.ranks_per_host = ranks_per_host(plan.shape, world_size);
  plan.options.slow_link_probability = 1.0 / 4;
  plan.program = make_program(random.next(), world_size);
  return plan;
}

std::string RankReport::describe() const {
  if (!has_ended) return "did not end";
  if (!failure) return "right";
  return format("at {} ms: {}: {}", failed_at.ns / 1'000'000, to_string(failure->code()),
                failure->message());
}

bool JobOutcome::all_right() const {
  return sim.failure.empty() && std::ranges::all_of(ranks, &RankReport::is_right);
}

std::string JobOutcome::describe() const {
  std::string text = sim.failure;
  for (const sim::Strike& strike : sim.strikes) {
    text += format("\n  {} at {} ms", sim::to_string(strike.kind), strike.at.ns / 1'000'000);
  }
  for (size_t i = 0; i < ranks.size(); ++i)
    text += format("\n  rank {} {}", i, ranks[i].describe());
  return text;
}

JobOutcome run_job(const JobPlan& plan) {
  sim::Simulator simulator(plan.seed, plan.options);
  HashStore shared(simulator.system(0));
  JobOutcome outcome;
  outcome.ranks.resize(static_cast<size_t>(plan.world_size));
  outcome.sim = simulator.run([&](os::System& system, int rank) {
    run_rank(system, shared, rank, plan, outcome.ranks[static_cast<size_t>(rank)]);
  });
  return outcome;
}

}  // namespace cadre::testing
