#include "cadre/parallel/averaging/averaging_method.h"

#include <cmath>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/buckets/comm_hook.h"

namespace cadre::averaging {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "ModelAverager: " + what);
}

void check_period(int64_t period, const char* method) {
  if (period >= 1) return;
  refuse(
      format("{}: the period is {}; expected the number of steps between two exchanges, at "
             "least 1",
             method, period));
}

void check_warmup(int64_t warmup_steps, const char* method) {
  if (warmup_steps >= 0) return;
  refuse(format("{}: warmup_steps is {}; expected 0 or more", method, warmup_steps));
}

std::string text(const PeriodicAveraging& method, int) {
  check_period(method.period, "PeriodicAveraging");
  check_warmup(method.warmup_steps, "PeriodicAveraging");
  return format("PeriodicAveraging with period {} and warmup_steps {}", method.period,
                method.warmup_steps);
}

std::string text(const HierarchicalAveraging& method, int num_ranks) {
  constexpr const char* kMethod = "HierarchicalAveraging";
  check_warmup(method.warmup_steps, kMethod);
  std::string levels;
  AveragingLevel last = {.period = 0, .group_size = 0};
  for (const AveragingLevel& level : method.levels) {
    check_period(level.period, kMethod);
    if (level.group_size < 1 || num_ranks % level.group_size != 0) {
      refuse(format("{}: a level has group_size {}; expected a divisor of the number of ranks, {}",
                    kMethod, level.group_size, num_ranks));
    }
    const bool is_larger =
        last.period == 0 ||
        (level.period > last.period && level.period % last.period == 0 &&
         level.group_size > last.group_size && level.group_size % last.group_size == 0);
    if (!is_larger) {
      refuse(
          format("{}: a level with period {} and group_size {} follows one with period {} and "
                 "group_size {}; expected larger multiples of both",
                 kMethod, level.period, level.group_size, last.period, last.group_size));
    }
    levels += format(" {}x{}", level.period, level.group_size);
    last = level;
  }
  if (last.group_size != num_ranks) {
    refuse(
        format("{}: the last level has group_size {}; expected all {} ranks, because models "
               "that are never averaged drift apart",
               kMethod, last.group_size, num_ranks));
  }
  return format("{} with warmup_steps {} and levels{}", kMethod, method.warmup_steps, levels);
}

std::string text(const DiLoCo& method, int) {
  check_period(method.period, "DiLoCo");
  const bool is_valid = std::isfinite(method.learning_rate) && method.learning_rate > 0 &&
                        method.momentum >= 0 && method.momentum < 1;
  if (!is_valid) {
    refuse(
        format("DiLoCo: learning_rate is {} and momentum is {}; expected a learning rate above "
               "0 and a momentum of 0 up to, but not including, 1",
               method.learning_rate, method.momentum));
  }
  return format("DiLoCo with period {}, outer optimizer {}, exchange {}", method.period,
                method.make_optimizer ? std::string("of the program")
                                      : format("SGD, learning rate {}, Nesterov momentum {}",
                                               method.learning_rate, method.momentum),
                method.exchange ? method.exchange->name() : "all_reduce");
}

std::string text(const Gossip& method, int) {
  check_period(method.period, "Gossip");
  return format("Gossip with period {} on the {} graph", method.period,
                method.graph == GossipGraph::kRing ? "ring" : "exponential");
}

}  // namespace

std::string text_of(const AveragingMethod& method, int num_ranks) {
  return std::visit([&](const auto& given) { return text(given, num_ranks); }, method);
}

Partners partners_of(GossipGraph graph, const GossipPlace& place) {
  const int64_t n = place.num_ranks;
  if (n == 1) return {.destination = 0, .source = 0};
  const auto rank_at = [&](int64_t distance) {
    return static_cast<int>((place.rank + distance + n) % n);
  };
  if (graph == GossipGraph::kExponential) {
    int64_t num_distances = 0;
    while ((int64_t{1} << num_distances) < n) ++num_distances;
    const int64_t distance = int64_t{1} << (place.exchange % num_distances);
    return {.destination = rank_at(distance), .source = rank_at(-distance)};
  }
  // The pairs are (first, first + 1), (first + 2, first + 3), ... with first = exchange. If the
  // number of ranks is odd, the rank before the first one remains.
  const int64_t position = (place.rank - place.exchange % n + n) % n;
  if (n % 2 == 1 && position == n - 1) return {.destination = place.rank, .source = place.rank};
  const int partner = rank_at(position % 2 == 0 ? 1 : -1);
  return {.destination = partner, .source = partner};
}

}  // namespace cadre::averaging
