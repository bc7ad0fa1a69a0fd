// Runs programs that use a model between two optimizer steps in many ways: on ranks that are
// threads, and without a wrapper in one process with the whole batch. All ranks must have the same
// gradients as the one process, and no gradient where that process has none. The ranks have equal
// or unequal numbers of rows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/torch/ddp_peers.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/wrap_training.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::Net;
using testing::require;
using testing::run_groups;
using testing::Share;
using testing::share_of;
using torch::Tensor;

// The models of one rank, with or without wrappers. Programs use them in the same way.
struct Replica {
  std::shared_ptr<Net> net = std::make_shared<Net>();
  std::shared_ptr<Net> critic = std::make_shared<Net>();
  Tensor x = {};  // (rows, 3): the samples of this rank
  std::function<Tensor(const Tensor&)> forward = {};
  std::function<Tensor(const Tensor&)> judge = {};  // calls the critic
  std::function<void(const std::function<void()>&)> without_sync = {};
};

// Makes (rows, 3) of (rows, 2), so that the output of one model can be the input of another one.
Tensor widened(const Tensor& y) {
  return torch::cat({y, y.narrow(1, 0, 1)}, 1);
}

Tensor slope_of(const Tensor& y, const Tensor& x) {
  return torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true,
                               /*create_graph=*/true)[0];
}

void freeze(torch::nn::Linear& layer, bool frozen) {
  for (Tensor& parameter : layer->parameters()) parameter.set_requires_grad(!frozen);
}

void several_pairs(Replica& replica) {
  for (const double scale : {1.0, 2.0, -0.5}) {
    loss_of(replica.forward(replica.x * scale)).backward();
  }
}

void several_pairs_reduced_once(Replica& replica) {
  replica.without_sync([&] {
    loss_of(replica.forward(replica.x)).backward();
    loss_of(replica.forward(replica.x * 2)).backward();
  });
  loss_of(replica.forward(replica.x * 3)).backward();
}

void two_forwards_one_backward(Replica& replica) {
  const Tensor a = replica.forward(replica.x);
  const Tensor b = replica.forward(replica.x * 2);
  (loss_of(a) + loss_of(b) * 3).backward();
}

void two_forwards_two_backwards_in_reverse(Replica& replica) {
  const Tensor a = replica.forward(replica.x);
  const Tensor b = replica.forward(replica.x * 2);
  loss_of(b).backward();
  loss_of(a).backward();
}

void model_of_its_own_output(Replica& replica) {
  const Tensor once = replica.forward(replica.x);
  const Tensor twice = replica.forward(widened(once));
  (loss_of(once) + loss_of(replica.forward(widened(twice)))).backward();
}

void two_wrappers_in_one_graph(Replica& replica) {
  for (int round = 0; round < 2; ++round) {
    loss_of(replica.judge(widened(replica.forward(replica.x)))).backward();
    loss_of(replica.judge(replica.x)).backward();
  }
}

void gradient_penalty(Replica& replica) {
  const Tensor x = replica.x.clone().requires_grad_(true);
  const Tensor y = replica.forward(x);
  (slope_of(y, x).pow(2).sum(1).mean() + loss_of(y)).backward();
}

// The loss is a gradient penalty alone and does not contain an output of the forward.
void gradient_penalty_alone(Replica& replica) {
  const Tensor x = replica.x.clone().requires_grad_(true);
  slope_of(replica.forward(x), x).pow(2).sum(1).mean().backward();
}

void cleared_in_every_way(Replica& replica) {
  torch::optim::SGD optimizer(replica.net->parameters(), 0.1);
  for (const char clearing : {'n', '0', 'n', 'n', '0', '0', 'h', '0', 'o', 'n'}) {
    if (clearing == 'n') optimizer.zero_grad(/*set_to_none=*/true);
    if (clearing == '0') optimizer.zero_grad(/*set_to_none=*/false);
    for (const Tensor& parameter : replica.net->parameters()) {
      if (clearing == 'h') parameter.mutable_grad() = Tensor();  // the program resets each gradient
      // The program assigns zeros.
      if (clearing == 'o') parameter.mutable_grad() = torch::zeros_like(parameter);
    }
    loss_of(replica.forward(replica.x)).backward();
    optimizer.step();
  }
}

void output_changed_in_place(Replica& replica) {
  for (int round = 0; round < 2; ++round) {
    const Tensor y = replica.forward(replica.x);
    y.mul_(2);
    y.narrow(1, 0, 1).add_(1);
    loss_of(y).backward();
  }
}

void only_some_inputs(Replica& replica) {
  loss_of(replica.forward(replica.x)).backward();
  replica.net->zero_grad();
  const Tensor loss = loss_of(replica.forward(replica.x));
  torch::autograd::backward({loss}, {}, /*retain_graph=*/false, /*create_graph=*/false,
                            /*inputs=*/{replica.net->first->weight, replica.net->side->bias});
}

void unused_in_some_steps(Replica& replica) {
  for (const bool use_side : {true, false, false, true, false}) {
    replica.net->use_side = use_side;
    replica.net->zero_grad(/*set_to_none=*/!use_side);
    loss_of(replica.forward(replica.x)).backward();
  }
}

// A layer is frozen after the wrapping. Its gradients must stay undefined, or keep their values if
// they were defined.
void frozen_after_wrapping(Replica& replica) {
  loss_of(replica.forward(replica.x)).backward();
  freeze(replica.net->second, true);
  loss_of(replica.forward(replica.x * 2)).backward();
  replica.net->side->zero_grad();
  freeze(replica.net->side, true);
  for (int step = 0; step < 2; ++step) loss_of(replica.forward(replica.x)).backward();
}

void frozen_for_a_while(Replica& replica) {
  for (const bool frozen : {true, false, true, false}) {
    freeze(replica.net->side, frozen);
    replica.net->zero_grad();
    loss_of(replica.forward(replica.x)).backward();
  }
}

void frozen_between_forward_and_backward(Replica& replica) {
  for (int step = 0; step < 2; ++step) {
    freeze(replica.net->side, false);
    const Tensor loss = loss_of(replica.forward(replica.x));
    freeze(replica.net->side, true);
    loss.backward();
  }
}

void values_changed_by_hand(Replica& replica) {
  loss_of(replica.forward(replica.x)).backward();
  replica.net->zero_grad();
  {
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : replica.net->parameters()) parameter.mul_(0.5);
    Tensor weight = replica.net->first->weight;
    weight.set_data(weight.data() + 0.25);  // gives the weight other memory, with the same sizes
  }
  loss_of(replica.forward(replica.x)).backward();
}

struct NamedProgram {
  const char* name;
  void (*run)(Replica&);
};

constexpr NamedProgram kPrograms[] = {
    {"several_pairs", several_pairs},
    {"several_pairs_reduced_once", several_pairs_reduced_once},
    {"two_forwards_one_backward", two_forwards_one_backward},
    {"two_forwards_two_backwards_in_reverse", two_forwards_two_backwards_in_reverse},
    {"model_of_its_own_output", model_of_its_own_output},
    {"two_wrappers_in_one_graph", two_wrappers_in_one_graph},
    {"gradient_penalty", gradient_penalty},
    {"gradient_penalty_alone", gradient_penalty_alone},
    {"cleared_in_every_way", cleared_in_every_way},
    {"output_changed_in_place", output_changed_in_place},
    {"only_some_inputs", only_some_inputs},
    {"unused_in_some_steps", unused_in_some_steps},
    {"frozen_after_wrapping", frozen_after_wrapping},
    {"frozen_for_a_while", frozen_for_a_while},
    {"frozen_between_forward_and_backward", frozen_between_forward_and_backward},
    {"values_changed_by_hand", values_changed_by_hand},
};

Tensor whole_batch(int64_t rows) {
  return torch::sin(torch::arange(rows * 3, testing::kDouble)).view({rows, 3});
}

// Returns the gradients of both models. A gradient may be undefined.
std::vector<Tensor> gradients_of(const Replica& replica) {
  std::vector<Tensor> gradients;
  for (const auto& net : {replica.net, replica.critic}) {
    for (const Tensor& parameter : net->parameters()) {
      const Tensor& gradient = parameter.grad();
      gradients.push_back(gradient.defined() ? gradient.detach().clone() : Tensor());
    }
  }
  return gradients;
}

std::vector<Tensor> run_alone(const NamedProgram& program, int64_t batch) {
  Replica replica;
  replica.x = whole_batch(batch);
  replica.forward = [&](const Tensor& x) { return replica.net->forward(x); };
  replica.judge = [&](const Tensor& x) { return replica.critic->forward(x); };
  replica.without_sync = [](const std::function<void()>& body) { body(); };
  program.run(replica);
  return gradients_of(replica);
}

// Runs the program on world_size ranks and returns the gradients of each rank.
std::vector<std::vector<Tensor>> run_on_ranks(const NamedProgram& program, int64_t batch,
                                              int world_size) {
  // The replicas are constructed before the ranks start, because the ranks are threads and share
  // the default random generator.
  std::vector<Replica> replicas(static_cast<size_t>(world_size));
  std::vector<std::vector<Tensor>> gradients(replicas.size());
  const auto result = run_groups(world_size, [&](const ProcessGroup& group, std::string&) {
    Replica& replica = replicas[group.rank()];
    const bool is_even = batch % world_size == 0;
    const DistributedDataParallelOptions options{
        .weighting = is_even ? GradientWeighting::kEqual : GradientWeighting::kSamples,
        .bucket_caps = {.first_bytes = 64, .bytes = 64}};
    DistributedDataParallel model{replica.net, group, options};
    DistributedDataParallel critic{replica.critic, group, options};
    const Share share = share_of(batch, group.rank(), world_size);
    replica.x = whole_batch(batch).narrow(0, share.begin, share.size());
    const auto call = [is_even](DistributedDataParallel<Net>& wrapped, const Tensor& x) {
      if (!is_even) wrapped.set_num_samples(x.size(0));
      return wrapped(x);
    };
    replica.forward = [&](const Tensor& x) { return call(model, x); };
    replica.judge = [&](const Tensor& x) { return call(critic, x); };
    replica.without_sync = [&](const std::function<void()>& body) {
      const auto guard = model.no_sync();
      body();
    };
    program.run(replica);
    gradients[group.rank()] = gradients_of(replica);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return gradients;
}

struct Split {
  int64_t batch;
  int world_size;
};

class DdpPrograms : public ::testing::TestWithParam<std::tuple<NamedProgram, Split>> {};

TEST_P(DdpPrograms, HaveTheGradientsOfOneProcessOnTheWholeBatch) {
  const auto& [program, split] = GetParam();
  const std::vector<Tensor> expected = run_alone(program, split.batch);
  const auto by_rank = run_on_ranks(program, split.batch, split.world_size);
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    ASSERT_EQ(by_rank[rank].size(), expected.size()) << "rank " << rank;
    for (size_t i = 0; i < expected.size(); ++i) {
      const Tensor& gradient = by_rank[rank][i];
      ASSERT_EQ(gradient.defined(), expected[i].defined()) << "rank " << rank << ", gradient " << i;
      if (!gradient.defined()) continue;
      EXPECT_TRUE(torch::allclose(gradient, expected[i], 1e-12, 1e-14))
          << "rank " << rank << ", gradient " << i << "\n"
          << gradient << "\n"
          << expected[i];
      EXPECT_TRUE(torch::equal(gradient, by_rank[0][i])) << "bits of rank " << rank;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, DdpPrograms,
                         ::testing::Combine(::testing::ValuesIn(kPrograms),
                                            ::testing::Values(Split{12, 2}, Split{13, 3})),
                         [](const auto& test) {
                           return format("{}_on_{}", std::get<0>(test.param).name,
                                         std::get<1>(test.param).world_size);
                         });

// Tests programs that are an error on all ranks, or on rank 1 only. No rank must hang, and the next
// step must be correct on all ranks.
class DdpRefusals : public ::testing::TestWithParam<bool> {
 protected:
  // Runs wrong(model, x) on all ranks, or on rank 1 only; the other ranks then run right(model, x).
  // check(failure, is_wrong) checks the error of each rank, where is_wrong says which of the two
  // ran.
  void refuse(const std::function<void(DistributedDataParallel<Net>&, const Tensor&)>& wrong,
              const std::function<void(DistributedDataParallel<Net>&, const Tensor&)>& right,
              const std::function<void(const std::string&, bool)>& check) {
    constexpr int kRanks = 3;
    constexpr int64_t kBatch = 12;
    std::vector<std::shared_ptr<Net>> nets;
    for (int rank = 0; rank < kRanks; ++rank) nets.push_back(std::make_shared<Net>());
    const auto expected = testing::local_gradients(
        *nets[0], [](Net& net) { loss_of(net.forward(whole_batch(kBatch))).backward(); });
    const auto result = run_groups(kRanks, [&](const ProcessGroup& group, std::string&) {
      DistributedDataParallel<Net> model{
          nets[group.rank()], group, {.bucket_caps = {.first_bytes = 64, .bytes = 64}}};
      const Share share = share_of(kBatch, group.rank(), kRanks);
      const Tensor x = whole_batch(kBatch).narrow(0, share.begin, share.size());
      const bool is_wrong = GetParam() || group.rank() == 1;
      for (int round = 0; round < 2; ++round) {
        check(failure_of([&] { (is_wrong ? wrong : right)(model, x); }), is_wrong);
        model->zero_grad();
        loss_of(model(x)).backward();
        for (size_t i = 0; i < expected.size(); ++i) {
          require(torch::allclose(model->parameters()[i].grad(), expected[i], 1e-12, 1e-14),
                  format("gradient {} after the refusal", i));
        }
        model->zero_grad();
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
};

TEST_P(DdpRefusals, SecondBackwardThroughOneForward) {
  const auto one_backward = [](DistributedDataParallel<Net>& model, const Tensor& x) {
    loss_of(model(x)).backward();
  };
  const auto two_backwards = [](DistributedDataParallel<Net>& model, const Tensor& x) {
    const Tensor loss = loss_of(model(x));
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  };
  refuse(two_backwards, one_backward, [](const std::string& failure, bool is_wrong) {
    if (is_wrong) {
      require(failure.find("second backward() through one forward") != std::string::npos, failure);
      require(failure.find("no_sync()") != std::string::npos, failure);
    } else {
      require(failure.empty(), failure);  // the other ranks are not affected
    }
  });
}

TEST_P(DdpRefusals, CreateGraph) {
  const auto plain = [](DistributedDataParallel<Net>& model, const Tensor& x) {
    loss_of(model(x)).backward();
  };
  const auto with_graph = [](DistributedDataParallel<Net>& model, const Tensor& x) {
    loss_of(model(x)).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  };
  refuse(with_graph, plain, [](const std::string& failure, bool is_wrong) {
    if (is_wrong) {
      require(failure.find("create_graph=true") != std::string::npos, failure);
      require(failure.find("torch::autograd::grad()") != std::string::npos, failure);
    } else {
      require(failure.find("rank 1 left this backward by an exception") != std::string::npos,
              failure);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, DdpRefusals, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "all" : "one"; });

// A module whose forward also returns a parameter. This output is a leaf, and the same tensor in
// all steps.
struct ReturnsItsWeight : Net {
  std::tuple<Tensor, Tensor> forward(const Tensor& x) { return {Net::forward(x), second->weight}; }
};

TEST(DdpOutputs, AParameterMayBeAnOutput) {
  const auto step = [](auto&& forward) {
    const auto [y, weight] = forward(testing::input());
    (loss_of(y) + weight.pow(2).sum()).backward();
  };
  const auto net = std::make_shared<ReturnsItsWeight>();
  const auto formula = std::make_shared<testing::DdpPeers>(2);
  DistributedDataParallel model{net, testing::FakeGroup(formula).group()};
  const auto expected = testing::local_gradients(*net, [&](Net& copy) {
    step([&](const Tensor& x) { return std::make_tuple(copy.forward(x), copy.second->weight); });
  });
  for (int round = 0; round < 3; ++round) {
    net->zero_grad();
    step([&](const Tensor& x) { return model(x); });
    testing::expect_gradients(*net, expected, formula->mean_factor());
  }
}

}  // namespace
}  // namespace cadre
