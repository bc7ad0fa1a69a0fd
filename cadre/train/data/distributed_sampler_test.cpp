#include "cadre/train/data/distributed_sampler.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/os/proc/program_output.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/paths.h"

namespace cadre {
namespace {

using Indices = std::vector<int64_t>;

// The expected values are those that torch.utils.data.DistributedSampler of torch 2.13 returns for
// range(n).
TEST(DistributedSampler, HasPythonsOrder) {
  EXPECT_EQ(DistributedSampler(
                {.num_samples = 10, .rank = 0, .world_size = 3, .seed = 0, .drop_last = false})
                .indices(0),
            (Indices{4, 5, 0, 2}));
  EXPECT_EQ(DistributedSampler(
                {.num_samples = 10, .rank = 2, .world_size = 3, .seed = 0, .drop_last = false})
                .indices(0),
            (Indices{7, 9, 6, 1}));
  EXPECT_EQ(DistributedSampler(
                {.num_samples = 10, .rank = 1, .world_size = 3, .seed = 7, .drop_last = true})
                .indices(4),
            (Indices{7, 9, 6}));
  EXPECT_EQ(DistributedSampler(
                {.num_samples = 9, .rank = 1, .world_size = 2, .seed = 42, .drop_last = false})
                .indices(1),
            (Indices{1, 0, 7, 8, 4}));
  EXPECT_EQ(DistributedSampler(
                {.num_samples = 5, .rank = 6, .world_size = 8, .seed = 1, .drop_last = false})
                .indices(2),
            (Indices{0}));
}

TEST(DistributedSampler, PadsByRepetitionAndCutsWithDropLast) {
  const auto plain = [](DistributedSamplerOptions options) {
    options.shuffle = false;
    return DistributedSampler(options).indices(0);
  };
  EXPECT_EQ(plain({.num_samples = 5, .rank = 1, .world_size = 3}), (Indices{1, 4}));
  EXPECT_EQ(plain({.num_samples = 5, .rank = 2, .world_size = 3}), (Indices{2, 0}));
  EXPECT_EQ(plain({.num_samples = 2, .rank = 4, .world_size = 5}), (Indices{0}));
  EXPECT_EQ(plain({.num_samples = 5, .rank = 2, .world_size = 3, .drop_last = true}), (Indices{2}));
  EXPECT_EQ(plain({.num_samples = 2, .rank = 0, .world_size = 3, .drop_last = true}), Indices{});
  EXPECT_EQ(plain({.num_samples = 0}), Indices{});
}

TEST(DistributedSampler, RefusesARankOutsideTheWorld) {
  EXPECT_THROW(DistributedSampler({.num_samples = 1, .rank = 2, .world_size = 2}), Error);
  EXPECT_THROW(DistributedSampler({.num_samples = 1, .rank = 0, .world_size = 0}), Error);
}

// A program that prints the indices of the Python class, one line for each combination.
constexpr const char* kPythonProgram = R"(
from torch.utils.data import DistributedSampler
for n in (1, 2, 7, 48, 1000):
    for world in (1, 2, 3, 8):
        for rank in range(world):
            for seed, epoch in ((0, 0), (3, 5), (1234567, 1)):
                for drop_last in (False, True):
                    s = DistributedSampler(range(n), world, rank, True, seed, drop_last)
                    s.set_epoch(epoch)
                    print(n, world, rank, seed, epoch, int(drop_last), ':', *list(s))
)";

// Runs the program with the first Python that can import torch and returns its output; nullopt if
// there is none.
std::optional<std::string> output_of_python_torch(const std::string& program) {
  const char* named = std::getenv("CADRE_TORCH");
  const auto system = os::make_native_system();
  for (const std::string& python :
       {std::string(named == nullptr ? "python3" : named), testing::source_path(".venv/bin/python"),
        std::string("python3")}) {
    const auto output =
        os::program_output({python, "-c", program}, system->deadline_in(std::chrono::seconds(120)));
    if (output.ok()) return *output;
  }
  return std::nullopt;
}

TEST(DistributedSampler, EqualsPythonsOwnClass) {
  const std::optional<std::string> output = output_of_python_torch(kPythonProgram);
  if (!output) GTEST_SKIP() << "no Python has torch; tried $CADRE_TORCH, .venv and python3";
  std::istringstream lines(*output);
  std::string line;
  int num_cases = 0;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    int64_t n = 0, seed = 0, epoch = 0;
    int world = 0, rank = 0, drop_last = 0;
    std::string colon;
    words >> n >> world >> rank >> seed >> epoch >> drop_last >> colon;
    const Indices expected{std::istream_iterator<int64_t>(words), {}};
    const DistributedSampler sampler({.num_samples = n,
                                      .rank = rank,
                                      .world_size = world,
                                      .seed = seed,
                                      .drop_last = drop_last != 0});
    EXPECT_EQ(sampler.indices(epoch), expected) << line.substr(0, line.find(':'));
    EXPECT_EQ(sampler.num_samples_per_rank(), static_cast<int64_t>(expected.size()));
    ++num_cases;
  }
  EXPECT_EQ(num_cases, 5 * (1 + 2 + 3 + 8) * 3 * 2);
}

}  // namespace
}  // namespace cadre
