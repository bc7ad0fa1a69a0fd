#include "cadre/core/os/host/core_distance.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <optional>

namespace cadre::os {
namespace {

constexpr size_t kCacheLineBytes = 64;
constexpr int kTurnsPerSample = 400;
constexpr size_t kNumSamples = 9;
constexpr size_t kMinSamples = 3;

bool bind_to_core(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<size_t>(core), &cores);
  return ::sched_setaffinity(0, sizeof(cores), &cores) == 0;
}

// The word that two threads write in turns: one when the value is even, the other when it is odd.
class PingPong {
 public:
  PingPong(System& system, Deadline deadline) : system_(system), deadline_(deadline) {}

  // Waits for the turns of `parity` and ends each of them; returns false at the deadline or when
  // the other thread has stopped.
  bool take_turns(uint32_t parity, int num_turns) {
    constexpr int kSpinsPerClockRead = 4096;
    for (int turn = 0; turn < num_turns; ++turn) {
      uint32_t seen = word_.load(std::memory_order_acquire);
      for (int spin = 1; seen % 2 != parity; ++spin) {
        if (spin % kSpinsPerClockRead == 0 && must_stop()) return false;
        seen = word_.load(std::memory_order_acquire);
      }
      word_.store(seen + 1, std::memory_order_release);
    }
    return true;
  }
  void stop() { is_stopped_.store(true, std::memory_order_relaxed); }

  // Runs on one core: measures the samples. Returns the time of one turn in each.
  std::vector<Duration> measure(int core) {
    std::vector<Duration> samples;
    if (bind_to_core(core) && take_turns(0, kTurnsPerSample)) {  // the first turns warm up
      while (samples.size() < kNumSamples) {
        const TimePoint begin = system_.now();
        if (!take_turns(0, kTurnsPerSample)) break;
        samples.push_back((system_.now() - begin) / (2 * kTurnsPerSample));
      }
    }
    stop();
    return samples;
  }
  // Runs on the other core: answers until the first has stopped.
  void answer(int core) {
    while (bind_to_core(core) && take_turns(1, kTurnsPerSample)) {
    }
    stop();
  }

 private:
  bool must_stop() {
    return is_stopped_.load(std::memory_order_relaxed) || deadline_.has_passed(system_.now());
  }

  System& system_;
  const Deadline deadline_;
  alignas(kCacheLineBytes) std::atomic<uint32_t> word_{0};
  alignas(kCacheLineBytes) std::atomic<bool> is_stopped_{false};
};

std::optional<Duration> measure_pair(System& system, std::pair<int, int> cores, Deadline deadline) {
  PingPong word(system, deadline);
  std::vector<Duration> samples;
  const auto second = system.spawn("core-distance", [&] { word.answer(cores.second); });
  const auto first = system.spawn("core-distance", [&] { samples = word.measure(cores.first); });
  first->join();
  second->join();
  if (samples.size() < kMinSamples) return std::nullopt;
  const auto median = samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2);
  std::ranges::nth_element(samples, median);
  return *median;
}

}  // namespace

std::vector<int> cores_of_mask(std::string_view mask) {
  std::vector<int> cores;
  for (size_t core = 0; core < mask.size() * 8; ++core) {
    const auto byte = static_cast<unsigned char>(mask[core / 8]);
    if ((byte >> core % 8 & 1U) != 0) cores.push_back(static_cast<int>(core));
  }
  return cores;
}

std::vector<std::pair<int, int>> core_pairs(const std::vector<int>& cores) {
  constexpr size_t kAllPairs = 8;
  constexpr size_t kMaxPairs = 256;
  const size_t count = cores.size();
  const size_t stride = count * static_cast<size_t>(std::bit_width(count)) / kMaxPairs + 1;
  std::vector<std::pair<int, int>> pairs;
  for (size_t first = 0; first < count; first += stride) {
    for (size_t step = 1; step < count; step = count <= kAllPairs ? step + 1 : step * 2) {
      if (first + step < count) pairs.emplace_back(cores[first], cores[first + step]);
    }
  }
  return pairs;
}

std::vector<CoreDistance> measure_core_distances(System& system,
                                                 const std::vector<std::pair<int, int>>& pairs,
                                                 Deadline deadline) {
  std::vector<CoreDistance> distances;
  for (size_t i = 0; i < pairs.size(); ++i) {
    const TimePoint now = system.now();
    if (deadline.has_passed(now)) break;
    // A busy core uses up the time of its own pair only.
    const Duration share = deadline.remaining(now) / static_cast<int64_t>(pairs.size() - i);
    const Deadline pair_deadline(now + share);
    if (const auto one_way = measure_pair(system, pairs[i], pair_deadline)) {
      distances.push_back({pairs[i].first, pairs[i].second, *one_way});
    }
  }
  return distances;
}

}  // namespace cadre::os
