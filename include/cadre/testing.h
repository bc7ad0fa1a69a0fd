// Runs one function as several ranks of a test: as threads, or in a simulator with planned faults.
//
//   #include <cadre/testing.h>
//   #include <cstdio>
//   namespace testing = cadre::testing;
//   const auto sums = [](testing::RankContext& context) {
//     const auto group = testing::connect_ranks(context);
//     std::vector<float> data(1, static_cast<float>(context.rank.value + 1));
//     const auto bytes = std::as_writable_bytes(std::span(data));
//     group->all_reduce(bytes, bytes, cadre::DType::kFloat32, cadre::ReduceOp::kSum);
//     testing::require(data[0] == 3, "the sum over both ranks");
//   };
//   const testing::RanksResult as_threads = testing::run_ranks_as_threads(2, sums);
//   if (!as_threads.ok()) std::fprintf(stderr, "%s", as_threads.failures().c_str());
//   const auto whole = testing::run_ranks_in_simulator(7, {}, 2, sums);
//   const int64_t middle = whole.sim.ranks[1].num_points / 2;
//   const auto kill = cadre::sim::Fault::kill(1, cadre::sim::When::at_point(1, middle));
//   const auto killed = testing::run_ranks_in_simulator(7, {.faults = {kill}}, 2, sums);
//   testing::require(killed.ranks[1].failure == "killed", "rank 1 was killed");
//
// Declares:
// - `testing::run_ranks_as_threads()`, `testing::RankMain`, `testing::RankContext`: ranks that are
//   threads of this process.
// - `testing::RanksResult`, `testing::RankOutcome`: what the ranks returned or threw.
// - `testing::connect_ranks()`, `kRankTimeout`: the group of all ranks of a run, and its timeout.
// - `testing::run_ranks_in_simulator()`, `testing::SimulatedRanksResult`: the same ranks in virtual
//   time.
// - `testing::make_fake_communicator()`, `testing::FakeGroupOptions`: a group of which only one
//   rank exists.
// - `testing::require()`, `testing::CheckFailed`, `testing::failure_of()`,
//   `testing::failed_fields_of()`: checks for the function of a rank, their exception, and the
//   error that a call throws.
// - `testing::make_rendezvous_address()`: a unix address that no other run uses.
// - `sim::SimOptions`: the hosts, the network and the faults of a simulation.
// - `sim::Fault`, `sim::FaultKind`, `sim::When`, `sim::FaultCounts`, `sim::to_string()`,
//   `kNumFaultKinds`: planned faults, and how often each kind had an effect.
// - `sim::SimResult`, `sim::RankEnd`, `sim::Strike`: how each rank ended, and which faults
//   occurred.
// - `sim::Simulator`: a simulation whose ranks the program starts itself.
//
// Guide: docs/guide/running/testing-programs.md. PyTorch: none.
#pragma once

#include "cadre/core/sim/options.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/testing/core/fake_group.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/simulator_ranks.h"
