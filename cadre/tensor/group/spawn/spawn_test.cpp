#include "cadre/tensor/group/spawn/spawn.h"

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/temporary_folder.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/own_process.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::require;

const SpawnOptions kThreads{.method = SpawnMethod::kThreads};

std::optional<Error> error_of(const std::function<void()>& body) {
  try {
    body();
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

// Expects that spawn() has thrown the failure of this rank, whose text contains `what`.
void expect_failure_of(int rank, const std::string& what, const std::optional<Error>& error) {
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kAborted);
  EXPECT_EQ(error->details().culprit, Rank(rank)) << error->message();
  EXPECT_NE(error->message().find(what), std::string::npos) << error->message();
}

void sum_ranks(const ProcessGroup& world) {
  const at::Tensor sum = at::full({3}, world.rank() * 10.0 + 1, at::kDouble);
  world.all_reduce(sum);
  const int n = world.world_size();
  require(sum[2].item<double>() == 5.0 * n * (n - 1) + n, "the sum over all ranks");
}

// Fails on rank 1 while rank 0 waits in a collective and rank 2 in a group without rank 1.
void fail_on_rank_1(const ProcessGroup& world) {
  sum_ranks(world);
  const auto pair = world.split({.color = world.rank() == 1 ? 1 : 0, .key = world.rank()});
  if (world.rank() == 1) throw std::runtime_error("the seventh sample is damaged");
  if (world.rank() == 2) pair->barrier();
  sum_ranks(world);
}

void expect_quick(const std::function<void()>& body) {
  const auto began = steady_clock::now();
  body();
  EXPECT_LT(steady_clock::now() - began, seconds(3));
}

TEST(SpawnThreads, EachRankRunsOnceWithTheGroupOfAll) {
  at::set_num_threads(3);  // also of threads that start later
  for (const int num_ranks : {1, 2, 3, 4}) {
    std::vector<std::atomic<int>> calls(static_cast<size_t>(num_ranks));
    spawn(
        [&](const ProcessGroup& world) {
          require(world.world_size() == num_ranks, "the size of the group");
          ++calls[static_cast<size_t>(world.rank())];
          sum_ranks(world);
        },
        num_ranks, kThreads);
    for (const auto& count : calls) EXPECT_EQ(count, 1);
  }
  EXPECT_EQ(at::get_num_threads(), 3);
  int num_of_later = 0;
  std::thread([&] { num_of_later = at::get_num_threads(); }).join();
  EXPECT_EQ(num_of_later, 3);
}

TEST(SpawnThreads, TheRankThatFailsFirstIsNamedAndTheOthersEnd) {
  expect_quick([] {
    expect_failure_of(1, "spawn: rank 1 of 3 failed: kInvalidArgument: the seventh sample",
                      error_of([] { spawn(fail_on_rank_1, 3, kThreads); }));
  });
  expect_failure_of(0, "rank 0 of 2 failed", error_of([] {
                      spawn(
                          [](const ProcessGroup& world) {
                            if (world.rank() == 0) throw 7;
                            sum_ranks(world);
                          },
                          2, kThreads);
                    }));
}

TEST(SpawnThreads, OtherRanksAreToldWhichRankFailedAndWhy) {
  std::mutex mutex;
  std::string told;
  error_of([&] {
    spawn(
        [&](const ProcessGroup& world) {
          try {
            fail_on_rank_1(world);
          } catch (const Error& error) {
            const std::lock_guard lock(mutex);
            if (world.rank() == 0) told = error.message();
            throw;
          }
        },
        3, kThreads);
  });
  EXPECT_NE(told.find("rank 1 failed: the seventh sample is damaged"), std::string::npos) << told;
}

TEST(SpawnThreads, AGroupThatIsKeptIsClosedAndUsable) {
  std::mutex mutex;
  std::vector<ProcessGroup> kept;
  spawn(
      [&](const ProcessGroup& world) {
        sum_ranks(world);
        const std::lock_guard lock(mutex);
        kept.push_back(world);
      },
      2, kThreads);
  ASSERT_EQ(kept.size(), 2U);
  EXPECT_THROW(kept[0].barrier(), Error);
}

TEST(Spawn, WrongArgumentsAreRefused) {
  const auto nothing = [](const ProcessGroup&) {};
  for (const SpawnMethod method : {SpawnMethod::kThreads, SpawnMethod::kProcesses}) {
    const auto refused = [&](const std::function<void()>& body, const std::string& what) {
      const auto error = error_of(body);
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(error->message().find(what), std::string::npos) << error->message();
    };
    refused([&] { spawn(nothing, 0, {.method = method}); }, "number of ranks is 0");
    refused([&] { spawn(nothing, -1, {.method = method}); }, "number of ranks is -1");
    refused([&] { spawn(nothing, 5000, {.method = method}); }, "from 1 to 4096");
    refused([&] { spawn({}, 2, {.method = method}); }, "function is empty");
    refused([&] { spawn(nothing, 2, {.method = method, .timeout = {}}); }, "timeout must be");
    expect_failure_of(0, "it was called by a rank of spawn()", error_of([&] {
                        spawn([&](const ProcessGroup&) { spawn(nothing, 2, {.method = method}); },
                              1, kThreads);
                      }));
  }
}

// Tests of ranks that are processes run in a process of their own, which has one thread. Its folder
// for temporary files must be empty at the end.
void run_in_process(const std::string& name, const std::string& result = "",
                    std::vector<std::string> environment = {}) {
  const auto folder = os::TemporaryFolder::make("/tmp", "cadre-test-").value_or_throw();
  environment.push_back("TMPDIR=" + folder->path());
  EXPECT_EQ(testing::run_disabled_test("SpawnProcesses.DISABLED_" + name, environment), result);
  EXPECT_TRUE(std::filesystem::is_empty(folder->path()));
}

void expect_no_child() {
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(SpawnProcesses, DISABLED_EachRankIsACopyOfTheCaller) {
  const auto before = testing::count_resources();
  int value = 7;
  for (const int num_ranks : {1, 2, 3}) {
    spawn(
        [&, caller = ::getpid()](const ProcessGroup& world) {
          require(::getpid() != caller, "a rank is another process");
          require(value == 7, "a rank has what the caller had");
          value = 100 + world.rank();
          sum_ranks(world);
          // A parallel region, if there is more than one core for the rank.
          const at::Tensor a = at::ones({300, 300});
          require(at::matmul(a, a)[1][2].item<float>() == 300, "a product of matrices");
        },
        num_ranks);
    expect_no_child();
  }
  EXPECT_EQ(value, 7);
  EXPECT_EQ(testing::leftovers_since(before), "");
}
TEST(SpawnProcesses, EachRankIsACopyOfTheCaller) {
  run_in_process("EachRankIsACopyOfTheCaller");
}

void sleep_long() {
  while (true) ::pause();
}

TEST(SpawnProcesses, DISABLED_TheRankThatFailsFirstIsNamedAndTheOthersEnd) {
  const auto failing = [](const std::function<void()>& fail) {
    return [fail](const ProcessGroup& world) {
      sum_ranks(world);
      if (world.rank() == 1) fail();
      if (world.rank() == 2) {  // has to be killed
        ::signal(SIGTERM, SIG_IGN);
        sleep_long();
      }
      sum_ranks(world);
    };
  };
  const auto expect = [&](const std::string& what, const std::function<void()>& fail) {
    expect_quick([&] {
      expect_failure_of(1, what, error_of([&] { spawn(failing(fail), 3); }));
      expect_no_child();
    });
  };
  expect("the seventh sample", [] { throw std::runtime_error("the seventh sample is damaged"); });
  expect("rank 1 of 3 failed with exit code 3", [] { std::exit(3); });
  expect("rank 1 of 3 failed with signal 9 (SIGKILL)", [] { ::raise(SIGKILL); });
  expect("signal 11 (SIGSEGV)", [] { ::raise(SIGSEGV); });
  expect("signal 6 (SIGABRT)", [] { std::abort(); });
  spawn(sum_ranks, 2);  // the next job works
}
TEST(SpawnProcesses, TheRankThatFailsFirstIsNamedAndTheOthersEnd) {
  run_in_process("TheRankThatFailsFirstIsNamedAndTheOthersEnd");
}

TEST(SpawnProcesses, DISABLED_AProcessWithThreadsIsRefused) {
  std::atomic<bool> ends = false;
  std::thread other([&] {
    while (!ends) std::this_thread::yield();
  });
  const auto error = error_of([] { spawn(sum_ranks, 2); });
  ends = true;
  other.join();
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(error->message().find("this process has 2: call spawn() before"), std::string::npos)
      << error->message();
  // A rank that is a process cannot spawn.
  expect_failure_of(0, "this process is rank 0 of 1 already",
                    error_of([] { spawn([](const ProcessGroup&) { spawn(sum_ranks, 2); }, 1); }));
}
TEST(SpawnProcesses, AProcessWithThreadsIsRefused) {
  run_in_process("AProcessWithThreadsIsRefused");
}

TEST(SpawnProcesses, DISABLED_AProgramOfALauncherIsRefused) {
  for (const SpawnMethod method : {SpawnMethod::kThreads, SpawnMethod::kProcesses}) {
    const auto error = error_of([&] { spawn(sum_ranks, 2, {.method = method}); });
    ASSERT_TRUE(error);
    EXPECT_NE(error->message().find("rank 3 of 4 already"), std::string::npos) << error->message();
  }
}
TEST(SpawnProcesses, AProgramOfALauncherIsRefused) {
  run_in_process("AProgramOfALauncherIsRefused", "",
                 {"RANK=3", "WORLD_SIZE=4", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1"});
}

volatile sig_atomic_t num_interrupts = 0;

TEST(SpawnProcesses, DISABLED_AnInterruptStopsTheRanksAndReachesTheCaller) {
  ::signal(SIGINT, [](int) { num_interrupts = num_interrupts + 1; });
  const auto error = error_of([] {
    spawn(
        [caller = ::getpid()](const ProcessGroup& world) {
          sum_ranks(world);
          if (world.rank() == 0) ::kill(caller, SIGINT);
          sleep_long();
        },
        2);
  });
  ASSERT_TRUE(error);
  EXPECT_NE(error->message().find("SIGINT has stopped the ranks"), std::string::npos)
      << error->message();
  EXPECT_EQ(num_interrupts, 1);
  expect_no_child();
}
TEST(SpawnProcesses, AnInterruptStopsTheRanksAndReachesTheCaller) {
  run_in_process("AnInterruptStopsTheRanksAndReachesTheCaller");
}

TEST(SpawnProcesses, DISABLED_TheEndOfTheSupervisorIsReported) {
  expect_quick([] {
    const auto error = error_of([] {
      spawn(
          [](const ProcessGroup& world) {
            sum_ranks(world);
            if (world.rank() == 0) ::kill(::getppid(), SIGKILL);
            sleep_long();
          },
          2);
    });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kAborted);
    EXPECT_NE(error->message().find("the process that started the ranks (pid"), std::string::npos)
        << error->message();
  });
  expect_no_child();
}
TEST(SpawnProcesses, TheEndOfTheSupervisorIsReported) {
  run_in_process("TheEndOfTheSupervisorIsReported");
}

// Kills the caller, after each rank has left its process id in the folder.
TEST(SpawnProcesses, DISABLED_NoRankOutlivesTheCaller) {
  const std::string folder = std::getenv("PIDS");
  spawn(
      [&, caller = ::getpid()](const ProcessGroup& world) {
        std::ofstream(format("{}/{}", folder, ::getpid())) << "\n";
        world.barrier();
        if (world.rank() == 0) ::kill(caller, SIGKILL);
        sleep_long();
      },
      3);
}
TEST(SpawnProcesses, NoRankOutlivesTheCaller) {
  const auto pids = os::TemporaryFolder::make("/tmp", "cadre-test-").value_or_throw();
  const auto temporary = os::TemporaryFolder::make("/tmp", "cadre-test-").value_or_throw();
  EXPECT_EQ(testing::run_disabled_test("SpawnProcesses.DISABLED_NoRankOutlivesTheCaller",
                                       {"PIDS=" + pids->path(), "TMPDIR=" + temporary->path()}),
            "SpawnProcesses.DISABLED_NoRankOutlivesTheCaller was ended by signal 9");
  const auto limit = steady_clock::now() + seconds(5);
  const auto any_lives = [&] {
    for (const auto& entry : std::filesystem::directory_iterator(pids->path())) {
      if (std::filesystem::exists("/proc/" + entry.path().filename().string())) return true;
    }
    return !std::filesystem::is_empty(temporary->path());
  };
  EXPECT_FALSE(std::filesystem::is_empty(pids->path()));
  while (any_lives() && steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_FALSE(any_lives());
}

}  // namespace
}  // namespace cadre
