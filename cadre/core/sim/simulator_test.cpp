#include "cadre/core/sim/simulator.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/leftovers.h"

namespace cadre::sim {
namespace {

using os::Address;
using os::Socket;
using os::System;
using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;

Address address_of(int host) {
  return {Address::Kind::kTcp, cadre::format("node{}", host), 5000};
}

bool wait_for(System& system, os::Pollable& target, bool to_write, Deadline deadline) {
  os::PollItem item{&target, !to_write, to_write};
  return system.poll(std::span(&item, 1), deadline);
}

void wait_or_throw(System& system, os::Pollable& target, bool to_write, Deadline deadline) {
  if (!wait_for(system, target, to_write, deadline)) {
    throw Error(ErrorCode::kTimeout, to_write ? "write" : "read");
  }
}

std::vector<std::unique_ptr<Socket>> accept(System& system, const Address& address, size_t count,
                                            Deadline deadline) {
  const auto listener = system.listen(address).value_or_throw();
  std::vector<std::unique_ptr<Socket>> sockets;
  while (sockets.size() < count) {
    wait_or_throw(system, *listener, false, deadline);
    if (auto socket = listener->try_accept().value_or_throw()) sockets.push_back(std::move(socket));
  }
  return sockets;
}

std::unique_ptr<Socket> connect_when_up(System& system, const Address& address, Deadline deadline) {
  for (;;) {
    auto socket = system.connect(address, deadline);
    if (socket.ok() || socket.error().code() != ErrorCode::kUnavailable) {
      return std::move(socket).value_or_throw();
    }
    system.make_waiter()->park(system.deadline_in(milliseconds(1)).earlier(deadline));
  }
}

// Rank 0 listens on host 0. Rank 1 connects and sends a number in each round, which rank 0 sends
// back. Returns when all rounds are done. Throws the error of the stream, or a timeout at the
// deadline.
void echo(System& system, int rank, int num_rounds, Duration budget) {
  const Deadline deadline = system.deadline_in(budget);
  const auto socket = rank == 0 ? std::move(accept(system, address_of(0), 1, deadline)[0])
                                : connect_when_up(system, address_of(0), deadline);
  std::array<std::byte, 1> byte{};
  for (int round = 0; round < num_rounds; ++round) {
    if (rank == 1) {
      byte[0] = static_cast<std::byte>(round);
      while (socket->try_send(byte).value_or_throw() == 0) {
        wait_or_throw(system, *socket, true, deadline);
      }
    }
    while (socket->try_recv(byte).value_or_throw() == 0) {
      wait_or_throw(system, *socket, false, deadline);
    }
    EXPECT_EQ(byte[0], static_cast<std::byte>(round));
    if (rank == 0) {
      while (socket->try_send(byte).value_or_throw() == 0) {
        wait_or_throw(system, *socket, true, deadline);
      }
    }
  }
}

SimResult run_echo(uint64_t seed, std::vector<Fault> faults, Duration budget = seconds(10)) {
  Simulator simulator(seed, {.ranks_per_host = {1, 1}, .faults = std::move(faults)});
  return simulator.run([&](System& system, int rank) { echo(system, rank, 20, budget); });
}

TEST(Simulator, OneSeedGivesOneHistory) {
  std::set<uint64_t> hashes;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    const SimResult first = run_echo(seed, {});
    const SimResult second = run_echo(seed, {});
    EXPECT_EQ(first.failure, "");
    EXPECT_EQ(first.ranks[0].failure + first.ranks[1].failure, "");
    EXPECT_EQ(first.history, second.history) << "seed " << seed;
    EXPECT_EQ(first.history_hash, second.history_hash);
    hashes.insert(first.history_hash);
  }
  EXPECT_EQ(hashes.size(), 10u);
}

TEST(Simulator, TimePassesOnlyInTheSimulation) {
  Simulator simulator(1, {.ranks_per_host = {1}});
  const SimResult result = simulator.run([](System& system, int) {
    EXPECT_FALSE(system.make_waiter()->park(system.deadline_in(std::chrono::hours(1000))));
  });
  EXPECT_GE(result.ranks[0].at, TimePoint{} + std::chrono::hours(1000));
  EXPECT_LT(result.ranks[0].at, TimePoint{} + std::chrono::hours(1001));
}

TEST(Simulator, EveryMannerOfTheNetworkIsFelt) {
  std::array<int, kNumFaultKinds> num_runs{};
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    Simulator simulator(seed, {.ranks_per_host = {2, 1}});
    const SimResult result = simulator.run([&](System& system, int rank) {
      // There are two streams to rank 0, so packets of one stream may overtake those of the other.
      const Deadline deadline = system.deadline_in(seconds(60));
      std::vector<std::byte> bytes(20'000);
      if (rank == 0) {
        const auto sockets = accept(system, address_of(0), 2, deadline);
        for (const auto& socket : sockets) {
          size_t total = 0;
          while (total < bytes.size()) {
            const size_t got = socket->try_recv(bytes).value_or_throw();
            total += got;
            if (got == 0) wait_or_throw(system, *socket, false, deadline);
          }
        }
        return;
      }
      const auto socket = connect_when_up(system, address_of(0), deadline);
      for (ConstBytes rest = bytes; !rest.empty();) {
        const size_t sent =
            socket->try_send(rest.first(std::min<size_t>(rest.size(), 500))).value_or_throw();
        rest = rest.subspan(sent);
        if (sent == 0) wait_or_throw(system, *socket, true, deadline);
      }
      os::WaitWord word;
      while (system.wait_while(word, 0, deadline)) {
        if (system.now() > TimePoint{} + seconds(1)) return;
      }
    });
    EXPECT_EQ(result.failure, "");
    for (const RankEnd& end : result.ranks) EXPECT_EQ(end.failure, "") << "seed " << seed;
    for (size_t kind = 0; kind < num_runs.size(); ++kind) {
      num_runs[kind] += result.faults.of(static_cast<FaultKind>(kind)) > 0 ? 1 : 0;
    }
  }
  for (const FaultKind kind :
       {FaultKind::kDelay, FaultKind::kReorder, FaultKind::kShortIo, FaultKind::kSpuriousWake}) {
    EXPECT_GE(num_runs[static_cast<size_t>(kind)], 20) << to_string(kind);
  }
  EXPECT_GE(num_runs[static_cast<size_t>(FaultKind::kSlowLink)], 1);
}

TEST(Simulator, AKillEndsTheRankAndItsSockets) {
  const SimResult result = run_echo(3, {Fault::kill(1, When::at_point(1, 30))});
  EXPECT_EQ(result.failure, "");
  EXPECT_EQ(result.faults.of(FaultKind::kKill), 1);
  EXPECT_EQ(result.ranks[1].kind, RankEnd::Kind::kKilled);
  EXPECT_EQ(result.ranks[1].num_points, 30);
  EXPECT_EQ(result.ranks[0].kind, RankEnd::Kind::kThrew);
  EXPECT_TRUE(result.ranks[0].failure.starts_with("kPeerLost")) << result.ranks[0].failure;
  EXPECT_LT(result.ranks[0].at, TimePoint{} + seconds(1));
}

TEST(Simulator, AKillAfterTheEndIsNone) {
  const SimResult result = run_echo(3, {Fault::kill(1, When::at_point(1, 1'000'000))});
  EXPECT_EQ(result.faults.of(FaultKind::kKill), 0);
  EXPECT_EQ(result.ranks[1].kind, RankEnd::Kind::kReturned);
}

TEST(Simulator, APlannedFaultThatDoesNotOccurIsReported) {
  EXPECT_TRUE(run_echo(3, {Fault::kill(1, When::at_point(1, 30))}).missed_faults.empty());
  const SimResult result =
      run_echo(3, {Fault::kill(1, When::at_point(1, 1'000'000)),
                   Fault::stop(0, When::at_time(std::chrono::hours(1))),
                   Fault::cut(0, 1, When::at_time(std::chrono::hours(1))),
                   Fault::partition(0, 1, When::at_point(0, 1)).lasting(milliseconds(1))});
  EXPECT_EQ(result.failure, "");
  ASSERT_EQ(result.missed_faults.size(), 3u);
  EXPECT_EQ(result.missed_faults[0],
            cadre::format("kill rank 1 at point 1000000 of rank 1: rank 1 ended after {} points",
                          result.ranks[1].num_points));
  EXPECT_EQ(result.missed_faults[1], "stop rank 0 at 3.6e+06 ms: rank 0 had ended");
  EXPECT_EQ(result.missed_faults[2], "cut ranks 0 and 1 at 3.6e+06 ms: all ranks had ended");
}

// Rank 0 kills its peer directly, without a planned fault. Rank 0 notices the end of the peer even
// if no history is kept.
TEST(Simulator, ARankMayKillAnother) {
  Simulator simulator(3, {.ranks_per_host = {1, 1}, .keeps_history = false});
  const SimResult result = simulator.run([&](System& system, int rank) {
    if (rank == 0) {
      system.make_waiter()->park(system.deadline_in(milliseconds(5)));
      simulator.kill(1);
    }
    echo(system, rank, 1'000, seconds(10));
  });
  EXPECT_EQ(result.failure, "");
  EXPECT_EQ(result.faults.of(FaultKind::kKill), 1);
  ASSERT_EQ(result.strikes.size(), 1u);
  EXPECT_GE(result.strikes[0].at, TimePoint{} + milliseconds(5));
  EXPECT_EQ(result.ranks[1].kind, RankEnd::Kind::kKilled);
  EXPECT_EQ(result.ranks[0].kind, RankEnd::Kind::kThrew);
  EXPECT_TRUE(result.history.empty());
}

TEST(Simulator, ACutResetsTheConnection) {
  const SimResult result = run_echo(4, {Fault::cut(0, 1, When::at_point(0, 30))});
  EXPECT_EQ(result.faults.of(FaultKind::kCut), 1);
  for (const RankEnd& end : result.ranks) {
    EXPECT_TRUE(end.failure.starts_with("kPeerLost")) << end.failure;
    EXPECT_NE(end.failure.find("reset by peer"), std::string::npos) << end.failure;
  }
}

TEST(Simulator, APartitionIsSilent) {
  const SimResult result = run_echo(5, {Fault::partition(0, 1, When::at_point(0, 30))});
  EXPECT_GE(result.faults.of(FaultKind::kPartition), 1);
  for (const RankEnd& end : result.ranks) {
    EXPECT_TRUE(end.failure.starts_with("kTimeout")) << end.failure;
    EXPECT_GE(end.at, TimePoint{} + seconds(10));
  }
}

TEST(Simulator, AHealedPartitionLosesNothing) {
  const SimResult result = run_echo(5, {Fault::partition(0, 1, When::at_point(0, 30)),
                                        Fault::heal(0, 1, When::at_time(seconds(5)))});
  EXPECT_GE(result.faults.of(FaultKind::kPartition), 1);
  EXPECT_EQ(result.faults.of(FaultKind::kHeal), result.faults.of(FaultKind::kPartition));
  for (const RankEnd& end : result.ranks) {
    EXPECT_EQ(end.failure, "");
    EXPECT_GE(end.at, TimePoint{} + seconds(5));
  }
}

TEST(Simulator, AStoppedRankIsSilent) {
  const SimResult result = run_echo(6, {Fault::stop(1, When::at_point(1, 30))});
  EXPECT_EQ(result.failure, "");
  EXPECT_EQ(result.faults.of(FaultKind::kStop), 1);
  EXPECT_EQ(result.ranks[1].kind, RankEnd::Kind::kStopped);
  EXPECT_TRUE(result.ranks[0].failure.starts_with("kTimeout")) << result.ranks[0].failure;
}

TEST(Simulator, AStoppedRankThatGoesOnLosesNothing) {
  const SimResult result = run_echo(6, {Fault::stop(1, When::at_point(1, 30)).lasting(seconds(5))});
  EXPECT_EQ(result.faults.of(FaultKind::kContinue), 1);
  ASSERT_EQ(result.strikes.size(), 2u);
  EXPECT_EQ(result.strikes[1].kind, FaultKind::kContinue);
  EXPECT_EQ(result.strikes[1].at, result.strikes[0].at + seconds(5));
  for (const RankEnd& end : result.ranks) {
    EXPECT_EQ(end.failure, "");
    EXPECT_EQ(end.kind, RankEnd::Kind::kReturned);
    EXPECT_GE(end.at, TimePoint{} + seconds(5));
  }
}

// The stopped rank must continue although all other ranks have ended.
TEST(Simulator, ARankGoesOnAfterAllOthersHaveEnded) {
  Simulator simulator(1, {.ranks_per_host = {2},
                          .faults = {Fault::stop(1, When::at_point(1, 1)).lasting(hours(1))}});
  const SimResult result = simulator.run([](System& system, int rank) {
    if (rank == 1) system.yield();
  });
  EXPECT_EQ(result.faults.of(FaultKind::kContinue), 1);
  EXPECT_EQ(result.ranks[1].kind, RankEnd::Kind::kReturned);
  EXPECT_GE(result.ranks[1].at, TimePoint{} + hours(1));
}

TEST(Simulator, APartitionThatLastsHealsByItself) {
  const SimResult result =
      run_echo(5, {Fault::partition(0, 1, When::at_point(0, 30)).lasting(seconds(3))});
  EXPECT_GE(result.faults.of(FaultKind::kHeal), 1);
  for (const RankEnd& end : result.ranks) {
    EXPECT_EQ(end.failure, "");
    EXPECT_GE(end.at, TimePoint{} + seconds(3));
  }
}

TEST(Simulator, ADeadlockNamesEachThreadAndItsWait) {
  Simulator simulator(1, {.ranks_per_host = {1, 1}});
  const SimResult result = simulator.run([](System& system, int rank) {
    if (rank == 1) return;
    const auto waiter = system.make_waiter();
    const Deadline never{TimePoint{INT64_MAX}};
    const auto thread = system.spawn("sleeper", [&] { waiter->park(never); });
    struct Joiner {
      os::Thread& thread;
      ~Joiner() { thread.join(); }
    };
    const Joiner joiner{*thread};
  });
  EXPECT_NE(result.failure.find("deadlock"), std::string::npos) << result.failure;
  EXPECT_NE(result.failure.find("rank0/main waits for the end of rank0/sleeper"), std::string::npos)
      << result.failure;
  EXPECT_NE(result.failure.find("rank0/sleeper waits for unpark"), std::string::npos)
      << result.failure;
}

TEST(Simulator, AnEndlessRunIsEnded) {
  Simulator simulator(1, {.ranks_per_host = {1}, .max_points = 1000});
  const SimResult result = simulator.run([](System& system, int) {
    for (;;) system.yield();
  });
  EXPECT_NE(result.failure.find("did not end within 1000 scheduling points"), std::string::npos)
      << result.failure;
}

TEST(SimulatorDeathTest, AThreadThatKeepsTheBatonIsNamed) {
  EXPECT_DEATH(
      {
        Simulator simulator(1, {.ranks_per_host = {1}, .stall_limit = seconds(1)});
        simulator.run([](System&, int) {
          for (volatile bool is_endless = true; is_endless;) {
          }
        });
      },
      "simulation stalled: rank0/main has run for 1 s without a call of its System");
}

// All threads of a killed rank must end, also in destructors that communicate and wait, and in code
// that handles errors.
TEST(Simulator, AKilledRankUnwindsAllItsThreads) {
  const testing::Resources before = testing::count_resources();
  for (int64_t point = 1; point <= 60; ++point) {
    Simulator simulator(
        static_cast<uint64_t>(point),
        {.ranks_per_host = {2}, .faults = {Fault::kill(0, When::at_point(0, point))}});
    std::atomic<int> num_alive = 0;
    const SimResult result = simulator.run([&](System& system, int rank) {
      if (rank == 1) return;
      struct Counted {
        std::atomic<int>& count;
        explicit Counted(std::atomic<int>& counter) : count(counter) { ++count; }
        ~Counted() { --count; }
      };
      const Counted outer(num_alive);
      const auto event = system.make_event();
      std::mutex mutex;
      const auto thread = system.spawn("loop", [&] {
        const Counted inner(num_alive);
        for (int i = 0; i < 20; ++i) {
          system.yield();
          const std::scoped_lock lock(mutex);
        }
        wait_for(system, *event, false, system.deadline_in(seconds(1)));
      });
      struct Closer {
        System& system;
        os::Event& event;
        os::Thread& thread;
        ~Closer() {
          event.notify();
          thread.join();
        }
      };
      const Closer closer{system, *event, *thread};
      for (int i = 0; i < 20; ++i) system.yield();
    });
    EXPECT_EQ(result.failure, "") << "point " << point;
    EXPECT_EQ(num_alive.load(), 0) << "point " << point;
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

TEST(Simulator, RefusesWhatCannotBe) {
  EXPECT_THROW(Simulator(1, {}), Error);
  EXPECT_THROW(
      Simulator(1, {.ranks_per_host = {1}, .faults = {Fault::kill(1, When::at_time(seconds(1)))}}),
      Error);
  EXPECT_THROW(Simulator(1, {.ranks_per_host = {2},
                             .faults = {Fault::partition(0, 1, When::at_time(seconds(1)))}}),
               Error);
}

TEST(Simulator, OnlyAStopOrAPartitionLasts) {
  const Fault kill = Fault::kill(0, When::at_time(seconds(1))).lasting(seconds(1));
  EXPECT_THROW(Simulator(1, {.ranks_per_host = {1}, .faults = {kill}}), Error);
}

TEST(Simulator, HostsAreApart) {
  Simulator simulator(1, {.ranks_per_host = {1, 1}});
  const SimResult result = simulator.run([](System& system, int rank) {
    EXPECT_EQ(system.host().name, cadre::format("node{}", rank));
    EXPECT_EQ(system.host().boot_id, cadre::format("simulated-boot-{}", rank));
    const Address local{Address::Kind::kTcp, "127.0.0.1", 6000};
    const Address named{Address::Kind::kUnix, "here", 0};
    const Deadline deadline = system.deadline_in(seconds(1));
    if (rank == 0) {
      const auto first = system.listen(local).value_or_throw();
      const auto second = system.listen(named).value_or_throw();
      system.make_waiter()->park(deadline);
      return;
    }
    system.make_waiter()->park(system.deadline_in(milliseconds(10)));
    EXPECT_EQ(system.connect(local, deadline).error().code(), ErrorCode::kUnavailable);
    EXPECT_EQ(system.connect(named, deadline).error().code(), ErrorCode::kUnavailable);
    const Address remote{Address::Kind::kTcp, "node0", 6000};
    EXPECT_EQ(system.connect(remote, deadline).error().code(), ErrorCode::kUnavailable);
    EXPECT_EQ(system.listen(remote).error().code(), ErrorCode::kInvalidArgument);
  });
  EXPECT_EQ(result.ranks[0].failure + result.ranks[1].failure, "");
}

}  // namespace
}  // namespace cadre::sim
