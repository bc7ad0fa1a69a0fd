// Measures all_reduce of the host engine on processes of this machine. Prints size, ranks, best,
// median, p99, bus bandwidth, and the share of the bandwidth of a plain copy in the same run.
//
//   host_engine_bench [ranks] [seconds per line]
//
// Inputs are written again before each operation, because unchanged inputs would stay in the caches
// and the times would be too good. Results are checked.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cadre/core/collective/host/host_engine.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/host_memories.h"
#include "cadre/testing/core/process_ranks.h"

namespace cadre {
namespace {

using testing::RankContext;
using testing::require;

constexpr size_t kMaxBytes = 64 << 20;

// The memory that the ranks share: a block for each rank, and symmetric memory.
struct Memory {
  std::vector<std::shared_ptr<HostMemory>> memories;
  std::vector<Piece> blocks;
  std::vector<Place> places;
  std::vector<Piece> buffers;
};

Memory make_memory(os::System& system, int num_ranks) {
  Memory memory{
      testing::make_host_memories(system, {.num_slots = num_ranks, .slice_bytes = 2 * kMaxBytes}),
      {},
      {},
      {}};
  const std::vector<int> slots = testing::all_slots(num_ranks);
  for (const auto& own : memory.memories) {
    memory.blocks.push_back(HostEngine::cut_block(*own, slots).value_or_throw());
    memory.places.push_back(memory.blocks.back().place());
    memory.buffers.push_back(
        own->allocate({.num_bytes = kMaxBytes, .holders = slots}).value_or_throw());
  }
  return memory;
}

HostEngineSetup setup_of(Memory& memory, const RankContext& context) {
  const auto rank = static_cast<size_t>(context.rank.value);
  return {.memory = memory.memories[rank],
          .rank = context.rank,
          .oversubscribed = context.world_size > context.system.host().num_cores,
          .slots = testing::all_slots(context.world_size),
          .blocks = memory.places,
          .block = std::move(memory.blocks[rank])};
}

class BenchRank {
 public:
  BenchRank(RankContext& context, Memory& memory, double seconds)
      : context_(context),
        seconds_(seconds),
        engine_(context.system, interrupt_, setup_of(memory, context)) {}

  void all_reduce(Bytes data) {
    run(Collective::all_reduce(data, data, DType::kFloat32, ReduceOp::kSum));
  }

  void barrier() { run(Collective::barrier()); }

  // Repeats the all_reduce until the time for one size is over; all ranks repeat it equally often.
  // Returns the sorted times in microseconds.
  std::vector<double> measure(Bytes data) {
    const double first_us = time_once(data);
    auto runs = static_cast<uint32_t>(seconds_ * 1e6 / std::max(first_us, 1.0));
    runs = std::clamp(runs, 20u, 20000u);
    run(Collective::broadcast(std::as_writable_bytes(std::span(&runs, 1)), DType::kUint8, 0));
    std::vector<double> times;
    for (uint32_t i = 0; i < runs; ++i) times.push_back(time_once(data));
    std::sort(times.begin(), times.end());
    return times;
  }

 private:
  double time_once(Bytes data) {
    auto* values = reinterpret_cast<float*>(data.data());
    const size_t count = data.size() / sizeof(float);
    const auto mine = static_cast<float>(context_.rank.value + 1);
    for (size_t i = 0; i < count; ++i) values[i] = mine + static_cast<float>(i % 7);
    barrier();
    const TimePoint start = context_.system.now();
    all_reduce(data);
    const TimePoint end = context_.system.now();
    const auto ranks = static_cast<float>(context_.world_size);
    const size_t last = count - 1;
    const float expected = ranks * (ranks + 1) / 2 + ranks * static_cast<float>(last % 7);
    require(values[last] == expected, "the sum is wrong");
    return static_cast<double>((end - start).count()) / 1e3;
  }

  void run(Collective collective) {
    const Fingerprint fingerprint =
        validate(collective, context_.rank, context_.world_size).value_or_throw().fingerprint();
    engine_
        .submit({.number = ++number_,
                 .fingerprints = {&fingerprint, 1},
                 .deadline = context_.system.deadline_in(std::chrono::seconds(60)),
                 .progress = progress_},
                {&collective, 1})
        .status()
        .value_or_throw();
  }

  RankContext& context_;
  const double seconds_;
  os::Interrupt interrupt_;
  HostEngine engine_;
  uint64_t number_ = 0;
  OpProgress progress_;
};

void pin_to_core(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<size_t>(core), &cores);
  sched_setaffinity(0, sizeof(cores), &cores);
}

// Returns the bytes that memcpy copies in a microsecond between two buffers of this size.
double copy_bandwidth(size_t num_bytes) {
  std::vector<std::byte> from(num_bytes, std::byte{1});
  std::vector<std::byte> to(num_bytes);
  double best_us = 1e30;
  for (int i = 0; i < 10; ++i) {
    const auto start = std::chrono::steady_clock::now();
    std::memcpy(to.data(), from.data(), num_bytes);
    const auto end = std::chrono::steady_clock::now();
    best_us = std::min(best_us, std::chrono::duration<double, std::micro>(end - start).count());
    from[static_cast<size_t>(i)] = to[num_bytes - 1];
  }
  return static_cast<double>(num_bytes) / std::max(best_us, 0.01);
}

void print_line(const char* memory, Bytes data, int num_ranks, const std::vector<double>& times) {
  const double median = times[times.size() / 2];
  const double p99 = times[times.size() * 99 / 100];
  const double bus_bytes =
      static_cast<double>(data.size()) * 2 * (num_ranks - 1) / static_cast<double>(num_ranks);
  const double bandwidth = bus_bytes / median;
  std::printf("%10zu %5d %-9s %10.2f us %10.2f us %10.2f us %8.2f GB/s %6.0f %% of memcpy\n",
              data.size(), num_ranks, memory, times.front(), median, p99, bandwidth / 1e3,
              100 * bandwidth / copy_bandwidth(data.size()));
}

void run(RankContext& context, Memory& memory, double seconds) {
  if (context.world_size <= context.system.host().num_cores) pin_to_core(context.rank);
  BenchRank rank(context, memory, seconds);
  std::vector<std::byte> own(kMaxBytes);
  const Bytes shared = memory.buffers[static_cast<size_t>(context.rank.value)].bytes();
  for (size_t size : {size_t{8}, size_t{1} << 10, size_t{8} << 10, size_t{64} << 10,
                      size_t{512} << 10, size_t{4} << 20, size_t{16} << 20, kMaxBytes}) {
    for (const bool is_symmetric : {false, true}) {
      const Bytes data = (is_symmetric ? shared : Bytes(own)).first(size);
      const std::vector<double> times = rank.measure(data);
      if (context.rank == 0) {
        print_line(is_symmetric ? "symmetric" : "private", data, context.world_size, times);
        std::fflush(stdout);
      }
    }
  }
}

}  // namespace
}  // namespace cadre

int main(int argc, char** argv) {
  const int num_ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 1.0;
  const auto system = cadre::os::make_native_system();
  cadre::Memory memory = cadre::make_memory(*system, num_ranks);
  std::printf("%10s %5s %-9s %13s %13s %13s\n", "bytes", "ranks", "memory", "best", "median",
              "p99");
  std::fflush(stdout);
  const auto result = cadre::testing::run_ranks_as_processes(
      num_ranks,
      [&](cadre::testing::RankContext& context) { cadre::run(context, memory, seconds); },
      {.time_limit = std::chrono::minutes(5)});
  if (!result.ok()) std::fprintf(stderr, "%s\n", result.failures().c_str());
  return result.ok() ? 0 : 1;
}
