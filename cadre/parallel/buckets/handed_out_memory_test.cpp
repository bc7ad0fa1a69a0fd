#include "cadre/parallel/buckets/handed_out_memory.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

namespace cadre::handed_out_memory_test {
namespace {

// `flat` is the last four of the six elements of a storage. It and its view must keep their values
// and still share memory, while the returned tensor has the original memory.
TEST(HandedOutMemory, TheProgramsTensorsKeepTheirValuesElsewhere) {
  const at::Tensor storage = at::arange(6, at::kFloat);
  const at::Tensor flat = storage.slice(0, 2, 6);
  const at::Tensor view = flat.slice(0, 1, 3);
  const void* const memory = flat.const_data_ptr();

  const at::Tensor taken = take_memory_back(flat);
  EXPECT_EQ(taken.const_data_ptr(), memory);
  EXPECT_EQ(taken.sizes(), flat.sizes());
  EXPECT_NE(flat.const_data_ptr(), memory);
  EXPECT_TRUE(taken.equal(at::arange(2, 6, at::kFloat)));

  taken.fill_(-1);
  EXPECT_TRUE(flat.equal(at::arange(2, 6, at::kFloat)));
  EXPECT_TRUE(view.equal(at::arange(3, 5, at::kFloat))) << "a view of the buffer moves with it";
  view.fill_(7);
  EXPECT_TRUE(taken.equal(at::full({4}, -1.0, at::kFloat)));
  EXPECT_EQ(flat[1].item<float>(), 7) << "the program's tensors still share memory";
}

}  // namespace
}  // namespace cadre::handed_out_memory_test
