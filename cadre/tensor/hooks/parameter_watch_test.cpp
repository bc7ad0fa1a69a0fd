// Tests which changes count as writes to a parameter.
#include "cadre/tensor/hooks/parameter_watch.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "cadre/tensor/hooks/autograd_hooks.h"
#include "cadre/tensor/hooks/output_tensors.h"

namespace cadre::wrap {
namespace {

TEST(WriteWatch, SeesChangesInPlaceAndOtherMemory) {
  at::Tensor a = torch::ones({2}).requires_grad_(true);
  at::Tensor b = torch::ones({2});
  at::Tensor c = torch::ones({2});
  WriteWatch watch({{"a", a}, {"b", b}, {"c", c}});
  EXPECT_TRUE(watch.written().empty());
  const uint32_t before = watch.num_writes();
  {
    const torch::NoGradGuard no_grad;
    a.mul_(2);
  }
  c.set_data(torch::zeros({2}));
  EXPECT_EQ(watch.written(), (std::vector<size_t>{0, 2}));
  EXPECT_EQ(watch.num_writes(), before + 1);
  watch.begin();
  EXPECT_TRUE(watch.written().empty());
  b.narrow(0, 0, 1).fill_(3);  // a view
  EXPECT_EQ(watch.written(), (std::vector<size_t>{1}));
}

// The second tensor is not a leaf, so it has no gradient accumulator and the constructor throws.
// The hook on the first tensor must be removed then.
TEST(AccumulationHooks, AreRemovedWhereTheirConstructionFails) {
  const at::Tensor leaf = torch::ones({1}).requires_grad_(true);
  const std::vector<at::Tensor> parameters = {leaf, leaf * 2};
  EXPECT_THROW(AccumulationHooks(parameters, [](size_t) {}), std::exception);
  EXPECT_FALSE(AccumulationHooks::has_hook(leaf));
}

TEST(NumRows, AreThoseOfTheFirstTensorWithADimension) {
  const at::Tensor scalar = torch::ones({});
  const at::Tensor batch = torch::ones({5, 2});
  EXPECT_EQ(num_rows_of(scalar, batch), 5);
  EXPECT_EQ(num_rows_of(std::vector<at::Tensor>{scalar, batch}, torch::ones({3})), 5);
  EXPECT_EQ(num_rows_of(scalar), 1);
  EXPECT_EQ(num_rows_of(2.0), 1);
  struct Unknown {};
  EXPECT_EQ(num_rows_of(scalar, Unknown{}), std::nullopt);
  EXPECT_EQ(num_rows_of(Unknown{}, batch), 5);
}

}  // namespace
}  // namespace cadre::wrap
