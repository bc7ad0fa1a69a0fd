#include "cadre/train/data/mnist.h"

#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/wire/idx_file.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/train/data/synthetic_dataset.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;
using Indices = std::vector<int64_t>;

class MnistTest : public ::testing::Test {
 protected:
  void SetUp() override {
    write("train-images-idx3-ubyte", {.shape = {3, 1, 2}, .elements = {0, 255, 10, 20, 30, 40}});
    write("train-labels-idx1-ubyte", {.shape = {3}, .elements = {7, 0, 9}});
  }

  void write(const std::string& name, const IdxArray& array) const {
    const auto bytes = encode_idx(array);
    std::ofstream(folder_ + "/" + name, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }

  std::string refusal(std::string_view part = kMnistTrain) const {
    try {
      Mnist mnist(folder_, part);
      return "accepted";
    } catch (const Error& error) {
      return error.message();
    }
  }

  testing::TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path();
};

TEST_F(MnistTest, GivesScaledPixelsAndLabels) {
  const Mnist mnist(folder_);
  EXPECT_EQ(mnist.size(), 3);
  const Batch batch = mnist.get(Indices{2, 0});
  EXPECT_EQ(batch.data.sizes(), (at::IntArrayRef{2, 1, 1, 2}));
  EXPECT_EQ(batch.data.scalar_type(), at::kFloat);
  EXPECT_TRUE(batch.target.equal(at::tensor({9, 7}, at::kLong)));
  const auto scaled = [](double pixel) { return (pixel / 255 - 0.1307) / 0.3081; };
  EXPECT_NEAR(batch.data[0][0][0][1].item<double>(), scaled(40), 1e-6);
  EXPECT_NEAR(batch.data[1][0][0][1].item<double>(), scaled(255), 1e-6);
  EXPECT_EQ(mnist.get(Indices{}).data.sizes(), (at::IntArrayRef{0, 1, 1, 2}));
}

TEST_F(MnistTest, ASliceIsAPart) {
  const Mnist mnist(folder_);
  const Mnist end = mnist.slice(1, 3);
  EXPECT_EQ(end.size(), 2);
  EXPECT_TRUE(end.get(Indices{0}).data.equal(mnist.get(Indices{1}).data));
  EXPECT_NE(end.fingerprint(), mnist.fingerprint());
  EXPECT_NE(end.digest(), mnist.digest());
  EXPECT_EQ(mnist.digest(), Mnist(folder_).digest());
  EXPECT_THROW(mnist.slice(-1, 2), Error);
  EXPECT_THROW(mnist.slice(2, 1), Error);
  EXPECT_THROW(mnist.slice(0, 4), Error);
  EXPECT_EQ(mnist.slice(0, 3).fingerprint(), Mnist(folder_).fingerprint());
}

TEST_F(MnistTest, RefusesFilesThatAreMissingOrDoNotFit) {
  EXPECT_TRUE(Mnist::has(folder_, kMnistTrain));
  EXPECT_FALSE(Mnist::has(folder_, kMnistTest));
  EXPECT_THAT(refusal(kMnistTest), HasSubstr("/t10k-images-idx3-ubyte.gz; download MNIST"));
  write("train-labels-idx1-ubyte", {.shape = {2}, .elements = {7, 0}});
  EXPECT_THAT(refusal(), HasSubstr("3 images but 2 labels"));
  write("train-labels-idx1-ubyte", {.shape = {3}, .elements = {7, 0, 10}});
  EXPECT_THAT(refusal(), HasSubstr("a label of train is 10; expected 0 to 9"));
  write("train-labels-idx1-ubyte", {.shape = {3, 1}, .elements = {7, 0, 9}});
  EXPECT_THAT(refusal(), HasSubstr("2 axes; expected 1"));
  std::ofstream(folder_ + "/train-images-idx3-ubyte") << "<html>not found</html>";
  EXPECT_THAT(refusal(), HasSubstr("train-images-idx3-ubyte: idx file: the file starts with"));
}

}  // namespace
}  // namespace cadre
