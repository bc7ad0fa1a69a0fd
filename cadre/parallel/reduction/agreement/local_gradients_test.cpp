// Tests how this rank counts the samples of gradients that were accumulated but not yet reduced.
#include "cadre/parallel/reduction/agreement/local_gradients.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <utility>
#include <vector>

namespace cadre::reduction {
namespace {

class LocalGradientsTest : public ::testing::Test {
 protected:
  // Runs a forward with num_samples samples that uses the parameters with the indices `used`, and
  // its backward.
  void train(const std::vector<size_t>& used, int64_t num_samples) {
    const auto forward = ledger_.enter({.num_samples = num_samples, .is_synchronized = false});
    at::Tensor loss = torch::zeros({});
    for (const size_t place : used) {
      const at::Tensor product = parameters_[place] * 2;
      product.register_hook([this, place, forward](const at::Tensor&) {
        local_.set_touched(place);
        local_.accumulate(forward.get(), place);
      });
      loss = loss + product.sum();
    }
    ledger_.set_returned(forward->number);
    loss.backward();
  }

  std::vector<at::Tensor> parameters_ = {torch::ones({2}).requires_grad_(),
                                         torch::ones({3}).requires_grad_()};
  ForwardLedger ledger_;
  LocalGradients local_{parameters_, ledger_, [] {}};
};

TEST_F(LocalGradientsTest, SamplesAddUpOverBackwards) {
  train({0, 1}, 3);
  train({0}, 4);
  EXPECT_EQ(local_.take_samples(), 7);
}

// The program clears all gradients, but a later backward uses only parameter 0. The samples are
// kept as long as every gradient to which a backward has added since then is nonzero. The gradient
// of the unused parameter stays cleared and does not reset the count.
TEST_F(LocalGradientsTest, AParameterThatIsUnusedSinceTheGradientsWereClearedForgetsNothing) {
  train({0, 1}, 3);
  for (at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
  train({0}, 5);
  train({0}, 7);
  EXPECT_EQ(local_.take_samples(), 12);
}

}  // namespace
}  // namespace cadre::reduction
