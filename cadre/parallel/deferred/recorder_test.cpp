// Tests that the program gets an error at the operation that cannot be recorded, and that its text
// says what to do.
#include "cadre/parallel/deferred/deferred_init.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "cadre/core/base/error.h"

// gcc 12 warns that the default values of libtorch's optional arguments may be uninitialized.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace cadre {
namespace {

using torch::nn::Module;

// Returns the text of the cadre::Error or c10::Error that run() throws, or "nothing".
template <typename Run>
std::string error_of(const Run& run) {
  try {
    run();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.message();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "nothing";
}

TEST(DeferInitTest, RefusesToShowMemory) {
  const auto module = defer_init([] { return torch::nn::Linear(100, 90); });
  EXPECT_THAT(error_of([&] { module->weight.data_ptr<float>(); }),
              testing::HasSubstr("has no values yet"));
  EXPECT_THAT(error_of([&] {
                defer_init([] {
                  const torch::Tensor zeros = torch::zeros({4});
                  return zeros.accessor<float, 1>()[0];
                });
              }),
              testing::HasSubstr("has no values yet"));
}

TEST(DeferInitTest, RefusesWritesThatCameTooLate) {
  EXPECT_EQ(
      error_of([] {
        defer_init([] {
          torch::Tensor table = torch::empty({4});
          auto* elements = table.data_ptr<float>();
          table.zero_();
          elements[2] = 1;
          return table;
        });
      }),
      "defer_init(): the memory of a small tensor made by empty() was written to through a pointer "
      "or an accessor after an operation on the tensor, and such a write is not recorded. Write "
      "before the tensor is used in operations, or make the tensor before defer_init()");
}

TEST(DeferInitTest, RefusesAForwardWithoutValues) {
  auto module = defer_init([] { return torch::nn::Linear(4, 3); });
  EXPECT_THAT(error_of([&] {
                module->forward(torch::ones({2, 4}));
              }),
              testing::HasSubstr("a forward with grad needs values"));
}

TEST(DeferInitTest, RefusesChangesAfterTheFirstMaterialization) {
  const auto module = defer_init(
      [] { return torch::nn::Sequential(torch::nn::Linear(3, 3), torch::nn::Linear(3, 2)); });
  materialize(*module->ptr(0));
  const torch::NoGradGuard no_grad;
  EXPECT_THAT(error_of([&] { module->at<torch::nn::LinearImpl>(1).weight.zero_(); }),
              testing::HasSubstr("nothing is recorded any more"));
}

struct Unregistered : Module {
  Unregistered() : scale(torch::full({4}, 2.0)) {
    weight = register_parameter("weight", torch::rand({4}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x * weight * scale; }
  torch::Tensor weight;
  torch::Tensor scale;
};

TEST(DeferInitTest, RefusesATensorThatIsNotRegistered) {
  const auto module = defer_init([] { return std::make_shared<Unregistered>(); });
  materialize(*module);
  EXPECT_THAT(error_of([&] { module->forward(torch::ones({4})); }),
              testing::HasSubstr("use register_buffer()"));
}

TEST(DeferInitTest, RefusesMetaTensorsOfTheProgram) {
  const auto options = torch::TensorOptions().device(torch::kMeta);
  Module module;
  module.register_parameter("weight", torch::empty({3}, options));
  EXPECT_EQ(
      error_of([&] { materialize(module); }),
      "materialize(): \"weight\" is on the meta device, but was not made by defer_init(), so its "
      "values are not known. Construct the module inside cadre::defer_init(), without a device");
  const auto deferred = defer_init([] { return torch::nn::Linear(3, 3); });
  const torch::NoGradGuard no_grad;
  EXPECT_THAT(error_of([&] { deferred->bias.copy_(torch::empty({3}, options)); }),
              testing::HasSubstr("its values cannot be recorded"));
}

TEST(DeferInitTest, PlainLeafErrorsStay) {
  EXPECT_THAT(error_of([] {
                defer_init([] {
                  torch::nn::Linear linear(3, 3);
                  linear->weight.zero_();
                  return linear;
                });
              }),
              testing::HasSubstr("a leaf Variable that requires grad"));
}

}  // namespace
}  // namespace cadre
