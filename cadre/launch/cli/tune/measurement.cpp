#include "cadre/launch/cli/tune/measurement.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <span>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/launch/cli/command.h"

namespace cadre::cli {
namespace {

// A size whose repetitions would take longer is measured less often, but kMinRepetitions times.
constexpr double kMicrosecondsPerSize = 1e6;
constexpr int kMinRepetitions = 3;
constexpr int kNumWarmUps = 2;

// An operation with two algorithms, between which the sizes of a CrossoverTable choose.
struct TunedOperation {
  OpKind kind;
  std::string_view first;
  std::string_view second;
  uint64_t CrossoverTable::*size;
  bool is_ring;  // the size is multiplied by ring_factor()
};
constexpr std::array kOperations{
    TunedOperation{OpKind::kAllReduce, "doubling", "ring", &CrossoverTable::all_reduce_ring_bytes,
                   true},
    TunedOperation{OpKind::kBroadcast, "tree", "chain", &CrossoverTable::broadcast_chain_bytes,
                   false},
    TunedOperation{OpKind::kAllGather, "Bruck", "ring", &CrossoverTable::all_gather_ring_bytes,
                   true},
    TunedOperation{OpKind::kGather, "tree", "linear", &CrossoverTable::gather_linear_bytes, false}};

std::string tuning_with(uint64_t size) {
  TuningFile file;
  for (const TunedOperation& operation : kOperations) file.table.*operation.size = size;
  return to_text(file);
}

bool is_hierarchical(const TunedGroups& groups) {
  return groups.first.backend_name() == "hierarchical";
}

uint64_t factor_of(const TunedOperation& operation, int num_nodes) {
  return operation.is_ring ? ring_factor(num_nodes) : 1;
}

// Returns why the groups have no choice between the algorithms; else an empty text.
std::string obstacle_of(const TunedOperation& operation, const TunedGroups& groups) {
  const std::string_view nodes = is_hierarchical(groups) ? "hosts" : "ranks";
  switch (operation.kind) {
    case OpKind::kBroadcast:
      if (num_nodes_of(groups) > 2) return "";
      return cadre::format("between two {} both algorithms send one message", nodes);
    case OpKind::kGather:
      if (groups.world.world_size() > 2) return "";
      return "between two ranks both algorithms send one message";
    case OpKind::kAllGather:
      if (!is_hierarchical(groups)) return "";
      return "between hosts it has one algorithm";
    default:
      return "";
  }
}

class Meter {
 public:
  Meter(const TunedGroups& groups, const MeasureOptions& options)
      : groups_(groups), options_(options) {
    const auto num_ranks = static_cast<uint64_t>(groups.world.world_size());
    const uint64_t most = options.sizes.back() + std::max<uint64_t>(num_ranks, sizeof(float));
    in_.resize(most);
    out_.resize(most);
  }

  TimedSize measure(OpKind kind, uint64_t wanted_bytes) {
    const uint64_t num_bytes = size_of_operation(kind, wanted_bytes);
    std::vector<double> times;
    for (int i = 0; i < kNumWarmUps; ++i) times = time_both(kind, num_bytes);
    combine(times);
    const int repetitions =
        std::clamp(static_cast<int>(kMicrosecondsPerSize / (times[0] + times[1])),
                   std::min(kMinRepetitions, options_.repetitions), options_.repetitions);
    times.clear();
    for (int i = 0; i < repetitions; ++i) {
      const std::vector<double> both = time_both(kind, num_bytes);
      times.insert(times.end(), both.begin(), both.end());
    }
    combine(times);
    return {.num_bytes = num_bytes,
            .first_us = median_of_each_second(times, 0),
            .second_us = median_of_each_second(times, 1)};
  }

 private:
  // Returns the size that chooses the algorithm: near the wanted one, with equal parts of all
  // ranks.
  uint64_t size_of_operation(OpKind kind, uint64_t wanted_bytes) const {
    const bool has_parts = kind == OpKind::kAllGather || kind == OpKind::kGather;
    const uint64_t unit =
        has_parts ? static_cast<uint64_t>(groups_.world.world_size()) : sizeof(float);
    return (wanted_bytes + unit - 1) / unit * unit;
  }

  std::vector<double> time_both(OpKind kind, uint64_t num_bytes) {
    return {time(groups_.first, kind, num_bytes), time(groups_.second, kind, num_bytes)};
  }

  double time(Communicator& group, OpKind kind, uint64_t num_bytes) {
    group.barrier();
    const TimePoint begin = group.system().now();
    run(group, kind, num_bytes);
    const Duration time = std::max(group.system().now() - begin, Duration(1));
    return std::chrono::duration<double, std::micro>(time).count();
  }

  void run(Communicator& group, OpKind kind, uint64_t num_bytes) {
    const uint64_t part = num_bytes / static_cast<uint64_t>(group.world_size());
    const auto in = std::span<const std::byte>(in_);
    const auto out = std::span<std::byte>(out_);
    switch (kind) {
      case OpKind::kAllReduce:
        return group.all_reduce(in.first(num_bytes), out.first(num_bytes), DType::kFloat32,
                                ReduceOp::kSum);
      case OpKind::kBroadcast:
        return group.broadcast(out.first(num_bytes), DType::kUint8, 0);
      case OpKind::kAllGather:
        return group.all_gather(in.first(part), out.first(num_bytes), DType::kUint8);
      default:
        return group.gather(in.first(part), out.first(group.rank() == 0 ? num_bytes : 0),
                            DType::kUint8, 0);
    }
  }

  // Replaces each time by the maximum over the ranks.
  void combine(std::vector<double>& times) {
    const Bytes bytes = std::as_writable_bytes(std::span(times));
    groups_.world.all_reduce(bytes, bytes, DType::kFloat64, ReduceOp::kMax);
  }

  static double median_of_each_second(const std::vector<double>& times, size_t first) {
    std::vector<double> own;
    for (size_t i = first; i < times.size(); i += 2) own.push_back(times[i]);
    std::ranges::sort(own);
    const size_t half = own.size() / 2;
    return own.size() % 2 == 1 ? own[half] : (own[half - 1] + own[half]) / 2;
  }

  const TunedGroups& groups_;
  const MeasureOptions& options_;
  std::vector<std::byte> in_;
  std::vector<std::byte> out_;
};

}  // namespace

std::string tuning_of_first() {
  return tuning_with(kMaxCrossoverBytes);
}

std::string tuning_of_second() {
  return tuning_with(1);
}

std::vector<MeasuredOperation> measure(
    const TunedGroups& groups, const MeasureOptions& options,
    const std::function<void(const MeasuredOperation& next)>& on_progress) {
  Meter meter(groups, options);
  std::vector<MeasuredOperation> results;
  for (const TunedOperation& operation : kOperations) {
    MeasuredOperation result{.kind = operation.kind,
                             .first = operation.first,
                             .second = operation.second,
                             .obstacle = obstacle_of(operation, groups)};
    on_progress(result);
    for (const uint64_t size : options.sizes) {
      if (result.obstacle.empty()) result.times.push_back(meter.measure(operation.kind, size));
    }
    const auto crossing = crossing_of(result.times);
    result.is_default = !crossing.has_value();
    result.crossing = crossing.value_or(CrossoverTable{}.*operation.size *
                                        factor_of(operation, num_nodes_of(groups)));
    results.push_back(std::move(result));
  }
  return results;
}

int num_nodes_of(const TunedGroups& groups) {
  if (!is_hierarchical(groups)) return groups.world.world_size();
  const std::vector<int> hosts = groups.world.hosts();
  return 1 + *std::ranges::max_element(hosts);
}

CrossoverTable table_of(const std::vector<MeasuredOperation>& results, int num_nodes) {
  CrossoverTable table;
  for (const MeasuredOperation& result : results) {
    const auto* const operation =
        std::ranges::find(kOperations, result.kind, &TunedOperation::kind);
    if (result.is_default) continue;
    table.*operation->size =
        std::max<uint64_t>(1, result.crossing / factor_of(*operation, num_nodes));
  }
  return table;
}

std::string text_of(const std::vector<MeasuredOperation>& results) {
  std::string text;
  for (const MeasuredOperation& result : results) {
    if (!result.obstacle.empty()) {
      text += cadre::format("{}: not measured, because {}; the default stays\n\n", result.kind,
                            result.obstacle);
      continue;
    }
    text +=
        cadre::format("{:<12} {:>12} {:>12}  choice\n", to_string(result.kind),
                      cadre::format("{} us", result.first), cadre::format("{} us", result.second));
    for (const TimedSize& time : result.times) {
      const bool is_first = time.num_bytes < result.crossing;
      text += cadre::format("{:>12} {:>12.1f} {:>12.1f}  {}\n", readable_size(time.num_bytes),
                            time.first_us, time.second_us, is_first ? result.first : result.second);
    }
    text += cadre::format("{} from {} bytes{}\n\n", result.second, result.crossing,
                          result.is_default ? ", the default: the times differ too little" : "");
  }
  return text;
}

}  // namespace cadre::cli
