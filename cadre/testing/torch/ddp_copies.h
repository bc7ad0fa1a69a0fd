// Helpers for the tests of DistributedDataParallel with sharded gradients: a model with unusual
// parameters, and a function that runs a program on two copies of it. One copy is wrapped with
// replicated gradients and the other with sharded gradients. The gradients of both must be bitwise
// equal.
//
// Threads: expect_equal makes one for each rank. Blocking: until all ranks have ended. Errors: a
// difference fails the test.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/types.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::testing {

using torch::Tensor;
namespace nn = torch::nn;

// A linear layer that uses the weight of another module.
struct TiedHeadImpl : nn::Module {
  explicit TiedHeadImpl(const Tensor& weight) : weight_(register_parameter("weight", weight)) {}
  Tensor forward(const Tensor& x) { return torch::matmul(x, weight_.t()); }
  Tensor weight_;
};
TORCH_MODULE(TiedHead);

// A model with sizes that are not divisible by any number of ranks, a tied and a frozen weight, two
// dtypes, a 0-dim parameter, and branches that a forward may leave out.
struct Zoo : nn::Module {
  Zoo() {
    torch::manual_seed(5);
    embedding = register_module("embedding", nn::Embedding(7, 5));
    up = register_module("up", nn::Linear(5, 11));
    frozen = register_module("frozen", nn::Linear(11, 11));
    frozen->weight.requires_grad_(false);
    side = register_module("side", nn::Linear(11, 3));
    other = register_module("other", nn::Linear(11, 5));
    down = register_module("down", nn::Linear(11, 5));
    to(torch::kDouble);
    head = register_module("head", TiedHead(embedding->weight));
    small = register_module("small", nn::Linear(5, 13));  // the parameters have dtype float32
    scale = register_parameter("scale", torch::full({}, 0.7, torch::kDouble));
  }
  // x: (B, 3) int64. `use` selects whether the forward uses the branches `side` and `other`.
  Tensor forward(const Tensor& x, std::pair<bool, bool> use) {
    Tensor h = torch::tanh(up(embedding(x)));
    h = h + torch::gelu(frozen(h));
    Tensor y = down(h);
    if (use.first) y = y + side(h).sum(-1, true);
    if (use.second) y = y + other(h) * h.narrow(-1, 0, 5);
    const Tensor extra = small(y.to(torch::kFloat)).pow(2).mean(-1).to(torch::kDouble);
    return head(y * scale).pow(2).mean(-1) + extra;
  }
  nn::Embedding embedding{nullptr};
  nn::Linear up{nullptr}, frozen{nullptr}, side{nullptr}, other{nullptr}, down{nullptr},
      small{nullptr};
  TiedHead head{nullptr};
  Tensor scale;
};

using Wrapped = DistributedDataParallel<Zoo>;

// Returns whether the gradient is defined and readable. A wrapper may leave a gradient whose memory
// must not be read; const_data_ptr() throws for it.
inline bool has_values(const Tensor& gradient) {
  if (!gradient.defined()) return false;
  try {
    gradient.const_data_ptr();
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

inline DistributedDataParallelOptions options_of(GradientPlacement placement) {
  return {.bucket_caps = {.first_bytes = 300, .bytes = 300}, .gradients = placement};
}

// One of the two wrapped copies on one rank, as the test program sees it.
struct Copy {
  Wrapped& model;
  Zoo& net;
  int rank;
  int world_size;

  bool is_sharded() const { return !shard::WrapperAccess::flat_parameters(model).empty(); }
  // Clears, as optimizer.zero_grad() does, the gradients of the parameters, or those of their
  // shards if the gradients are sharded.
  void zero_grad(bool set_to_none = true) const {
    if (!is_sharded()) return net.zero_grad(set_to_none);
    for (const ParameterShard& shard : model.parameter_shards()) {
      Tensor gradient = shard.values.grad();
      if (!gradient.defined()) continue;
      if (set_to_none) {
        Tensor values = shard.values;
        values.mutable_grad().reset();
      } else {
        gradient.zero_();
      }
    }
  }
  // Returns rows that differ between ranks and steps.
  Tensor rows(int64_t count, int64_t step) const {
    return torch::arange(count * 3)
        .add(1 + 5 * rank + 11 * step)
        .mul(3)
        .remainder(7)
        .view({count, 3});
  }
  void backward(int64_t count, int64_t step, std::pair<bool, bool> use = {true, true}) const {
    model(rows(count, step), use).mean().backward();
  }
};

using Program = std::function<void(const Copy&, const std::function<void()>& compare)>;

inline bool equal_bits(const Tensor& a, const Tensor& b) {
  const Tensor left = a.contiguous();
  const Tensor right = b.contiguous();
  return left.scalar_type() == right.scalar_type() && left.sizes() == right.sizes() &&
         std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

// The gradients at each point where the program has called compare(): those of whole parameters, or
// of this rank's shards.
struct Seen {
  // Indexed by the call of compare() and the parameter; undefined if a parameter has no gradient.
  std::vector<std::vector<Tensor>> gradients;
  std::vector<std::string> names;
  std::vector<FlatRange> ranges;
};

inline Seen run_copy(const Program& program, Wrapped& model, const ProcessGroup& group) {
  Seen seen;
  const Copy copy{.model = model,
                  .net = *model.module(),
                  .rank = group.rank(),
                  .world_size = group.world_size()};
  const bool is_sharded = copy.is_sharded();
  if (is_sharded) {
    for (const ParameterShard& shard : model.parameter_shards()) {
      seen.names.push_back(shard.name);
      seen.ranges.push_back(shard.range);
    }
  }
  program(copy, [&] {
    std::vector<Tensor> gradients;
    const auto keep = [&gradients](const Tensor& gradient) {
      gradients.push_back(gradient.defined() ? gradient.clone() : gradient);
    };
    if (!is_sharded) {
      for (const NamedTensor& parameter : distinct_parameters(*model.module())) {
        keep(parameter.tensor.grad());
      }
    } else {
      for (const ParameterShard& shard : model.parameter_shards()) {
        require(!has_values(shard.parameter.grad()), "a full gradient has remained: " + shard.name);
        keep(shard.values.grad());
      }
    }
    seen.gradients.push_back(std::move(gradients));
  });
  return seen;
}

inline void require_slices(const Seen& replicated, const Seen& sharded) {
  require(!replicated.gradients.empty(), "the program has not called compare()");
  require(replicated.gradients.size() == sharded.gradients.size(),
          "the numbers of comparisons differ");
  for (size_t k = 0; k < sharded.gradients.size(); ++k) {
    for (size_t i = 0; i < sharded.names.size(); ++i) {
      const std::string where = format("comparison {}, \"{}\"", k, sharded.names[i]);
      const Tensor& whole = replicated.gradients[k][i];
      const Tensor& part = sharded.gradients[k][i];
      require(whole.defined() == part.defined(),
              format("{}: the replicated gradient is {}, the sharded one {}", where,
                     whole.defined() ? "defined" : "undefined",
                     part.defined() ? "defined" : "undefined"));
      if (!whole.defined()) continue;
      const FlatRange range = sharded.ranges[i];
      require(equal_bits(whole.flatten().slice(0, range.begin, range.end), part),
              format("{}: the bits of elements [{}, {}) differ", where, range.begin, range.end));
    }
  }
}

// Runs `body` on each rank with both copies, which start with the weights of rank 0. The models are
// made before the ranks start, because rank threads would share the process's random generator.
inline void run_pairs(
    int world_size,
    const std::function<void(const ProcessGroup&, Wrapped& replicated, Wrapped& sharded)>& body) {
  std::vector<std::shared_ptr<Zoo>> nets;
  for (int i = 0; i < 2 * world_size; ++i) nets.push_back(std::make_shared<Zoo>());
  const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
    Wrapped replicated{nets[2 * group.rank()], group, options_of(GradientPlacement::kReplicated)};
    Wrapped sharded{nets[2 * group.rank() + 1], group, options_of(GradientPlacement::kSharded)};
    body(group, replicated, sharded);
  });
  EXPECT_TRUE(result.ok()) << world_size << " ranks: " << result.failures();
}

inline void expect_equal(const Program& program,
                         const std::vector<int>& world_sizes = {1, 2, 3, 4, 8}) {
  for (const int world_size : world_sizes) {
    run_pairs(world_size, [&](const ProcessGroup& group, Wrapped& replicated, Wrapped& sharded) {
      const Seen expected = run_copy(program, replicated, group);
      require_slices(expected, run_copy(program, sharded, group));
    });
  }
}

}  // namespace cadre::testing
