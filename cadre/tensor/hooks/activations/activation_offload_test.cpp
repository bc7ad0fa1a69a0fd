// An offloaded module computes the bits of the plain one, and its activations are in the file.
#include "cadre/tensor/hooks/activations/activation_offload.h"

#include <torch/csrc/autograd/autograd.h>

#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cadre/tensor/hooks/activations/activation_checkpoint.h"
#include "cadre/testing/core/file_size_limit.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: the helpers of these tests
using ::testing::HasSubstr;
namespace nn = torch::nn;

// Saves views of one memory, outputs, masks, integers and something changed in place.
struct AttentionImpl : nn::Module {
  AttentionImpl() {
    torch::manual_seed(3);
    in = register_module("in", nn::Linear(8, 24));
    out = register_module("out", nn::Linear(8, 8));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({8})));
    conv = register_module("conv", nn::Conv1d(nn::Conv1dOptions(6, 6, 3).padding(1)));
    mask = register_buffer("mask", torch::ones({6, 6}).tril() == 0);
  }
  Tensor forward(const Tensor& x) {
    const auto parts = in(norm(x)).chunk(3, -1);
    Tensor scores =
        torch::softmax(parts[0].matmul(parts[1].transpose(1, 2)).masked_fill(mask, -1e9), -1);
    scores = torch::dropout(scores, 0.3, is_training());
    Tensor y = out(scores.matmul(parts[2]));
    y = conv(y);
    torch::relu_(y);
    intermediate = y.storage().getWeakStorageImpl();
    return (y + x.expand_as(y)).index_select(1, torch::tensor({5, 0, 3}));
  }
  nn::Linear in{nullptr}, out{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Conv1d conv{nullptr};
  Tensor mask;
  c10::weak_intrusive_ptr<c10::StorageImpl> intermediate{c10::intrusive_ptr<c10::StorageImpl>()};
};

std::shared_ptr<ActivationFile> file_in(const TemporaryFolder& folder, int64_t min_bytes = 1) {
  return ActivationFile::make({.folder = folder.path(), .min_bytes = min_bytes});
}

// Gradients of the input and the parameters, and the generator's next numbers after them.
template <typename M>
std::vector<Tensor> gradients_through(M& module) {
  const Tensor x = torch::linspace(-2, 2, 4 * 6 * 8).view({4, 6, 8}).requires_grad_();
  torch::manual_seed(11);
  module.zero_grad();
  module.forward(x * 2).square().mean().backward();
  std::vector<Tensor> gradients = {torch::rand({2}), x.grad()};
  for (const Tensor& parameter : module.parameters()) gradients.push_back(parameter.grad().clone());
  return gradients;
}

void expect_equal(const std::vector<Tensor>& got, const std::vector<Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(torch::equal(got[i], expected[i])) << i;
}

TEST(ActivationOffload, ComputesTheBitsOfThePlainModule) {
  AttentionImpl plain;
  const TemporaryFolder folder;
  const auto file = file_in(folder);
  ActivationOffload<AttentionImpl> offloaded;
  EXPECT_EQ(offload_activations(offloaded, file), 1);
  for (int step = 0; step < 2; ++step) {
    expect_equal(gradients_through(offloaded), gradients_through(plain));
  }
  EXPECT_GT(file->peak_bytes(), 0);
  EXPECT_EQ(file->used_bytes(), 0);  // the graphs are gone
}

TEST(ActivationOffload, FreesTheMemoryOfActivations) {
  AttentionImpl plain;
  ActivationOffload<AttentionImpl> offloaded;
  const TemporaryFolder folder;
  offload_activations(offloaded, file_in(folder));
  const Tensor x = torch::ones({4, 6, 8});
  const Tensor kept = plain.forward(x);
  EXPECT_FALSE(plain.intermediate.expired());
  const Tensor output = offloaded.forward(x);
  EXPECT_TRUE(offloaded.intermediate.expired());
}

// Exactly what the two operations save, once each: tanh its result, which the product after it
// saves as well, and the first product its input. Parameters are not written.
TEST(ActivationOffload, WritesEachActivationOnce) {
  nn::Sequential net(nn::Linear(32, 64), nn::Tanh(), nn::Linear(64, 16));
  const TemporaryFolder folder;
  const auto file = file_in(folder);
  const Tensor x = torch::ones({128, 32});
  Tensor loss;
  {
    const OffloadActivations offload(file, *net);
    loss = net->forward(x).sum();
  }
  EXPECT_EQ(file->written_bytes(), 4 * 128 * (32 + 64));
  loss.backward();
  EXPECT_EQ(file->written_bytes(), 4 * 128 * (32 + 64));
}

// Buffers stay in memory for the time of the module, as parameters do.
TEST(ActivationOffload, WritesNoBuffer) {
  struct MaskedImpl : nn::Module {
    MaskedImpl() { mask = register_buffer("mask", torch::ones({64, 64})); }
    Tensor forward(const Tensor& x) { return x * mask; }
    Tensor mask;
  } masked;
  const TemporaryFolder folder;
  const auto file = file_in(folder);
  const Tensor x = torch::ones({64, 64}).requires_grad_();
  Tensor loss;
  {
    const OffloadActivations offload(file, masked);
    loss = masked.forward(x).sum();
  }
  EXPECT_EQ(file->written_bytes(), 0);
  loss.backward();
  EXPECT_TRUE(torch::equal(x.grad(), masked.mask));
}

// Rows of a large tensor are written without the rest, and the interleaved views of a product once.
TEST(ActivationOffload, WritesOfALargerMemoryWhatAViewNeeds) {
  nn::Linear net(8, 24);
  const TemporaryFolder folder;
  const auto file = file_in(folder);
  const Tensor all = torch::linspace(-1, 1, 1000 * 8).view({1000, 8});
  const auto gradient = [&](const std::shared_ptr<ActivationFile>& where) {
    net->zero_grad();
    const OffloadActivations offload(where, *net);
    const auto parts = net(all.slice(0, 300, 340)).chunk(3, -1);
    (parts[0] * parts[1] * parts[2].square()).sum().backward();
    return net->weight.grad().clone();
  };
  const Tensor offloaded = gradient(file);
  // The rows, the product, and the results of its parts: p0 * p1, p2^2.
  EXPECT_EQ(file->written_bytes(), 4 * 40 * (8 + 24 + 8 + 8));
  EXPECT_TRUE(torch::equal(offloaded, gradient(nullptr)));
}

TEST(ActivationOffload, LeavesSmallTensorsInMemory) {
  nn::Sequential net(nn::Linear(32, 64), nn::Tanh(), nn::Linear(64, 16));
  const TemporaryFolder folder;
  const auto file = file_in(folder, 4 * 128 * 64);
  const OffloadActivations offload(file, *net);
  const Tensor loss = net->forward(torch::ones({128, 32})).sum();
  EXPECT_EQ(file->written_bytes(), 4 * 128 * 64);
}

TEST(ActivationOffload, EndsWithItsScopeAndIsThatOfItsThread) {
  const TemporaryFolder folder;
  const auto file = file_in(folder);
  nn::Linear net(4, 4);
  const Tensor x = torch::ones({4, 4});
  Tensor outside;
  {
    const OffloadActivations offload(file, *net);
    std::thread([&] { outside = net(x).tanh(); }).join();
    {
      const OffloadActivations inner(nullptr, *net);
      outside = outside + net(x).tanh();
    }
  }
  const int64_t written = file->written_bytes();
  outside = outside + net(x).tanh();
  EXPECT_EQ(file->written_bytes(), written);
  outside.sum().backward();
}

// What is saved twice in two versions is written twice.
TEST(ActivationOffload, KeepsTheValuesOfBeforeAChangeInPlace) {
  const TemporaryFolder folder;
  const auto gradient = [&](bool offloads) {
    const Tensor weight = torch::arange(1, 9).to(torch::kFloat).requires_grad_();
    nn::Linear none(1, 1);
    const OffloadActivations offload(offloads ? file_in(folder) : nullptr, *none);
    Tensor y = weight * 2;
    const Tensor z = y.clone() * y.detach().clone();  // saves the first values
    y = y.exp();
    y.add_(1);  // the result of exp() is saved before it, so plain autograd refuses this
    return std::pair(y * z, weight);
  };
  const auto [plain, unused] = gradient(false);
  EXPECT_THROW(plain.sum().backward(), c10::Error);
  const auto [offloaded, weight] = gradient(true);
  offloaded.sum().backward();
  const Tensor x = weight.detach();
  // d/dx (exp(2x) + 1) * (2x * c), with c = 2x taken as a constant.
  const Tensor expected = 2 * (2 * x).exp() * 4 * x * x + ((2 * x).exp() + 1) * 4 * x;
  EXPECT_TRUE(torch::allclose(weight.grad(), expected, 1e-5));
}

TEST(ActivationOffload, RefusesParametersThatHaveChanged) {
  const TemporaryFolder folder;
  nn::Sequential net(nn::Linear(4, 4), nn::Linear(4, 4));
  Tensor loss;
  {
    const OffloadActivations offload(file_in(folder), *net);
    loss = net->forward(torch::ones({2, 4})).sum();
  }
  {
    const torch::NoGradGuard no_grad;
    net->parameters()[2].add_(1);
  }
  EXPECT_THAT(error_of([&] { loss.backward(); }, ErrorCode::kInvalidArgument),
              HasSubstr("of 16 elements, was changed in place before backward"));
}

TEST(ActivationOffload, ServesSecondBackwardsAndSecondDerivatives) {
  AttentionImpl plain;
  plain.eval();
  ActivationOffload<AttentionImpl> offloaded;
  offloaded.eval();
  const TemporaryFolder folder;
  offload_activations(offloaded, file_in(folder));
  const auto second = [](auto& module) {
    const Tensor x = torch::linspace(-2, 2, 4 * 6 * 8).view({4, 6, 8}).requires_grad_();
    const Tensor y = module.forward(x * 1).square().mean();
    y.backward({}, /*retain_graph=*/true);
    y.backward({}, /*retain_graph=*/true);
    const Tensor first = torch::autograd::grad({y}, {x}, {}, true, true)[0];
    const Tensor penalty = torch::autograd::grad({first.square().sum()}, {x})[0];
    return std::vector<Tensor>{x.grad(), first.detach(), penalty};
  };
  expect_equal(second(offloaded), second(plain));
}

TEST(ActivationOffload, WithACheckpointInsideWritesTheArgumentsOnly) {
  AttentionImpl plain;
  ActivationOffload<ActivationCheckpoint<AttentionImpl>> both;
  const TemporaryFolder folder;
  const auto file = file_in(folder);
  offload_activations(both, file);
  expect_equal(gradients_through(both), gradients_through(plain));
  EXPECT_EQ(file->written_bytes(), 4 * 4 * 6 * 8);
}

TEST(ActivationOffload, NamesAFullDiskAndMisuse) {
  const TemporaryFolder folder;
  ActivationOffload<AttentionImpl> offloaded;
  const auto file = file_in(folder);
  offload_activations(offloaded, file);
  {
    const FileSizeLimit limit(8192);
    EXPECT_THAT(error_of([&] { gradients_through(offloaded); }, ErrorCode::kUnavailable),
                HasSubstr("Name a folder with more space"));
  }
  EXPECT_EQ(file->used_bytes(), 0);
  AttentionImpl plain;
  expect_equal(gradients_through(offloaded), gradients_through(plain));

  EXPECT_THAT(error_of([] { ActivationFile::make({.folder = ""}); }, ErrorCode::kInvalidArgument),
              HasSubstr("name a folder on a disk"));
  EXPECT_THAT(error_of([&] { offload_activations(plain, file); }, ErrorCode::kInvalidArgument),
              HasSubstr("has no ActivationOffload"));
}

}  // namespace
}  // namespace cadre
