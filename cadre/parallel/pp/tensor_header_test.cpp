// Tests that a header can describe every list of tensors that stages can exchange, and that an
// invalid header is rejected before memory is allocated for it.
#include "cadre/parallel/pp/tensor_header.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <limits>
#include <vector>

namespace cadre::parallel {
namespace {

std::vector<at::Tensor> some_tensors() {
  return {torch::zeros({2, 3}, torch::kDouble).requires_grad_(), torch::zeros({2}, torch::kLong),
          torch::tensor(1.0F), torch::zeros({0, 4}, torch::kBool)};
}

TEST(TensorHeader, DescribesTensors) {
  const TensorHeader header = TensorHeader::of(some_tensors()).value_or_throw();
  const TensorHeader decoded = TensorHeader::decode(header.encode()).value_or_throw();
  EXPECT_EQ(decoded, header);
  const auto allocated = decoded.allocate(c10::Device(at::kCPU));
  ASSERT_EQ(allocated.size(), 4u);
  for (size_t i = 0; i < allocated.size(); ++i) {
    EXPECT_EQ(allocated[i].sizes(), some_tensors()[i].sizes());
    EXPECT_EQ(allocated[i].scalar_type(), some_tensors()[i].scalar_type());
  }
  EXPECT_EQ(decoded.text(), "(2, 3) float64 with gradient, (2) int64, () float32, (0, 4) bool");
  EXPECT_EQ(TensorHeader::decode(TensorHeader().encode()).value_or_throw(), TensorHeader());
}

TEST(TensorHeader, RefusesNumbersThatDescribeNoTensors) {
  const std::vector<int64_t> good = TensorHeader::of(some_tensors()).value_or_throw().encode();
  struct Change {
    size_t word;
    int64_t value;
  };
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  for (const Change change : std::initializer_list<Change>{
           {0, 0},   // a wrong magic number
           {1, -1},  // a negative number of tensors
           {1, 17},
           {2, -1},  // an invalid dtype of the first tensor
           {2, 1000},
           {3, 4},  // flags that do not exist
           {3, -1},
           {4, -1},  // a negative number of dimensions
           {4, 9},
           {5, -2},  // a negative size
           {5, kHuge},
           {6, int64_t{1} << 41},
           {14, 1},  // an integer tensor cannot require grad
       }) {
    std::vector<int64_t> words = good;
    words[change.word] = change.value;
    const auto decoded = TensorHeader::decode(words);
    ASSERT_FALSE(decoded.ok()) << change.word << " = " << change.value;
    EXPECT_EQ(decoded.error().code(), ErrorCode::kCorruption);
  }
  EXPECT_FALSE(TensorHeader::decode(std::vector<int64_t>(good.begin(), good.end() - 1)).ok());
}

TEST(TensorHeader, RefusesTensorsThatItCannotDescribe) {
  const auto code_of = [](const std::vector<at::Tensor>& tensors) {
    const auto header = TensorHeader::of(tensors);
    return header.ok() ? ErrorCode::kInternal : header.error().code();
  };
  EXPECT_EQ(code_of(std::vector<at::Tensor>(17, torch::zeros({1}))), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of({at::Tensor()}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of({torch::zeros({1}, torch::kComplexFloat)}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of({torch::zeros({1, 1, 1, 1, 1, 1, 1, 1, 1})}), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace cadre::parallel
