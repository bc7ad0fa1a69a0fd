// The methods by which a ModelAverager (model_averager.h) lets ranks train apart and brings their
// models together.
//
// Threads: plain values. Blocking: never. Errors: a ModelAverager refuses values without a meaning.
// A step is counted from 1: the first call of ModelAverager::step() is step 1.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "cadre/core/base/export.h"

namespace torch::optim {
class Optimizer;
}

namespace cadre {

class CommHook;

// The parameters become the mean over all ranks every `period` steps: after step warmup_steps + 1,
// warmup_steps + 1 + period, and so on. No step up to warmup_steps averages, because a program
// usually reduces gradients until then (comm_hooks::post_local_sgd()).
// Source: torch.distributed.algorithms.model_averaging.PeriodicModelAverager, which averages after
// the same steps; Lin et al. 2020, "Don't use large mini-batches, use local SGD".
struct PeriodicAveraging {
  int64_t period = 1;
  int64_t warmup_steps = 0;
};

// Groups of ranks average more often than all ranks do.
struct AveragingLevel {
  int64_t period = 1;
  // The number of consecutive ranks that average with each other, a divisor of the number of ranks.
  int group_size = 1;
};
// The last level whose period divides the number of earlier steps averages, and no other, after
// each step behind the warm-up. Periods and group sizes increase from level to level, each is a
// multiple of the one before, and the last group has all ranks. Source: HierarchicalModelAverager
// of the same package, which averages after the same steps.
struct HierarchicalAveraging {
  std::vector<AveragingLevel> levels = {};
  int64_t warmup_steps = 0;
};

// Each rank trains for `period` steps from the same weights, the synchronized weights. Then these
// minus the rank's own weights, averaged over the ranks, are the gradient with which an outer
// optimizer steps the synchronized weights, and each rank continues from the result.
// Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language
// Models"; learning_rate and momentum are the values of the paper.
struct DiLoCo {
  int64_t period = 100;
  // Options of the outer optimizer, SGD with Nesterov momentum (plain SGD if the momentum is 0).
  double learning_rate = 0.7;
  double momentum = 0.9;
  // Makes another outer optimizer for the synchronized weights, which are one tensor for each
  // trained parameter, in their order. All ranks make the same one.
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> weights)>
      make_optimizer = {};
  // How the ranks add what they exchange, one bucket for each parameter: for example in 8 bits, by
  // comm_hooks::quantize_per_tensor(). Null: by one all_reduce for each dtype.
  std::shared_ptr<const CommHook> exchange = {};
};

enum class GossipGraph : uint8_t {
  // Pairs of neighbours on a ring, which change from exchange to exchange. With an odd number of
  // ranks, a different rank has no partner in each exchange.
  kRing,
  // Each rank sends to the rank 2^j places behind it and averages with the rank 2^j places before
  // it; j grows from exchange to exchange and begins again at 0. With 2^k ranks the models are
  // equal after k exchanges without training between them.
  kExponential,
};

// Every `period` steps each rank averages its model with that of one other rank. The mean over all
// ranks does not change by that, and the models come closer to it.
// Source: Lian et al. 2017, D-PSGD (pairs of a ring); Assran et al. 2019, stochastic gradient push,
// whose weights are 1 here because exchanges are synchronous (one-peer exponential graph).
struct Gossip {
  GossipGraph graph = GossipGraph::kRing;
  int64_t period = 1;
};

using AveragingMethod = std::variant<PeriodicAveraging, HierarchicalAveraging, DiLoCo, Gossip>;

namespace averaging {

// Returns the method and its options as a text that the ranks compare. Throws kInvalidArgument for
// values without a meaning.
std::string text_of(const AveragingMethod& method, int num_ranks);

// The ranks with which a rank exchanges its model; both are its own rank if it has no partner.
struct Partners {
  int destination;
  int source;

  bool operator==(const Partners&) const = default;
};
// exchange: the number of the exchange, from 0.
struct GossipPlace {
  int64_t exchange;
  int rank;
  int num_ranks;
};
Partners partners_of(GossipGraph graph, const GossipPlace& place);

}  // namespace averaging
}  // namespace cadre
