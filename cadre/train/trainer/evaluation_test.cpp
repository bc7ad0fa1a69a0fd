// Compares the trainer's evaluation of held-out data with an independent calculation from the
// snapshot's parameters and the bytes of the files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/idx_file.h"
#include "cadre/testing/torch/trainer_runs.h"
#include "cadre/train/data/mnist.h"
#include "cadre/train/trainer/tasks/task.h"

namespace cadre::train {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kSide = 28;
constexpr int64_t kNumTraining = 30;
// This is more than one batch of 2 ranks, and not a multiple of the batch size.
constexpr int64_t kNumHeldOut = 37;

struct Images {
  torch::Tensor pixels;  // (N, 28, 28) uint8
  torch::Tensor labels;  // (N) uint8
};

Images random_images(int64_t count, uint64_t seed) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return {.pixels = torch::randint(256, {count, kSide, kSide}, generator, torch::kByte),
          .labels = torch::randint(10, {count}, generator, torch::kByte)};
}

struct Judgement {
  double loss;
  double accuracy;
};

// Computes loss and accuracy of the model mlp with one hidden layer, in double precision.
Judgement judge(const Images& images, const std::vector<NamedTensor>& weights) {
  std::map<std::string, torch::Tensor> w;
  for (const auto& [name, tensor] : weights) w[name] = tensor.to(torch::kDouble);
  const auto x = ((images.pixels.to(torch::kDouble) / 255 - 0.1307) / 0.3081).flatten(1);
  const auto hidden = (x.matmul(w["hidden_0.weight"].t()) + w["hidden_0.bias"]).clamp_min(0);
  const auto scores = hidden.matmul(w["head.weight"].t()) + w["head.bias"];
  const auto labels = images.labels.to(torch::kLong);
  const auto of_label = scores.gather(1, labels.unsqueeze(1)).squeeze(1);
  return {.loss = (scores.exp().sum(1).log() - of_label).mean().item<double>(),
          .accuracy = scores.argmax(1).eq(labels).to(torch::kDouble).mean().item<double>()};
}

class TrainerEvaluationTest : public TrainerTest {
 protected:
  TrainerEvaluationTest() {
    write_pair(kMnistTrain, training_);
    write_pair(kMnistTest, held_out_);
  }

  void write_pair(std::string_view part, const Images& images) const {
    write(std::string(part) + "-images-idx3-ubyte", images.pixels);
    write(std::string(part) + "-labels-idx1-ubyte", images.labels);
  }

  void write(const std::string& name, const torch::Tensor& array) const {
    const auto* first = array.const_data_ptr<uint8_t>();
    const auto bytes =
        encode_idx({.shape = array.sizes().vec(), .elements = {first, first + array.numel()}});
    std::ofstream(folder_ + "/" + name, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }

  Config config(const std::string& run_name) const {
    Config config;
    config.model = {.kind = "mlp", .layers = 1, .width = 8};
    config.data = {.kind = "mnist", .path = folder_, .held_out = 0.5};
    config.optimizer = default_optimizer("adam");
    config.schedule = {.kind = "constant", .warmup_steps = 0};
    config.run = {.name = run_name,
                  .folder = folder_,
                  .steps = 4,
                  .global_batch_size = kNumTraining,  // so each step uses every image once
                  .evaluate_every = 0};
    return config;
  }

  std::vector<NamedTensor> weights_after(const std::string& run_name, int64_t step) const {
    return tensors(run_name, step, "model.safetensors");
  }

  Images training_ = random_images(kNumTraining, 1);
  Images held_out_ = random_images(kNumHeldOut, 2);
};

TEST_F(TrainerEvaluationTest, TrainsOnOnePairAndJudgesTheOther) {
  for (const int world_size : {1, 2, 3}) {
    SCOPED_TRACE(world_size);
    Config config = this->config("ranks" + std::to_string(world_size));
    config.run.snapshot_every = 1;
    const Run run = this->run(config, world_size);
    ASSERT_EQ(run.failures, "");
    EXPECT_THAT(run.screen, HasSubstr("on 30 images (mnist; 37 held out)"));

    const Judgement expected = judge(held_out_, weights_after(config.run.name, 4));
    EXPECT_NEAR(run.result.held_out.loss, expected.loss, 1e-5 * expected.loss);
    EXPECT_NEAR(run.result.held_out.accuracy.value(), expected.accuracy, 1e-12);
    const nlohmann::json said = metrics(config.run.name).back();
    EXPECT_EQ(said["held_out_loss"], run.result.held_out.loss);
    EXPECT_EQ(said["accuracy"], *run.result.held_out.accuracy);

    // The loss that step 4 reports is that of the training images before its update, so it equals
    // the loss with the weights after step 3.
    const double before_last = judge(training_, weights_after(config.run.name, 3)).loss;
    EXPECT_NEAR(metrics(config.run.name)[3]["loss"].get<double>(), before_last, 1e-5);
  }
}

TEST_F(TrainerEvaluationTest, OfOnePairTheEndIsHeldOut) {
  for (const char* kind : {"images-idx3-ubyte", "labels-idx1-ubyte"}) {
    std::filesystem::remove(cadre::format("{}/{}-{}", folder_, kMnistTest, kind));
  }
  Config config = this->config("one-pair");
  config.run.global_batch_size = kNumTraining / 2;
  const Run run = this->run(config, 2);
  ASSERT_EQ(run.failures, "");
  EXPECT_THAT(run.screen, HasSubstr("on 15 images (mnist; 15 held out)"));
  const Images end = {.pixels = training_.pixels.narrow(0, kNumTraining / 2, kNumTraining / 2),
                      .labels = training_.labels.narrow(0, kNumTraining / 2, kNumTraining / 2)};
  const Judgement expected = judge(end, weights_after("one-pair", 4));
  EXPECT_NEAR(run.result.held_out.loss, expected.loss, 1e-5 * expected.loss);
  EXPECT_NEAR(run.result.held_out.accuracy.value(), expected.accuracy, 1e-12);
}

TEST_F(TrainerEvaluationTest, GoesOnWithBothPairsUnchangedOnly) {
  Config config = this->config("run");
  ASSERT_EQ(run(config, 1).failures, "");
  config.run.resume = "auto";
  config.run.steps = 5;
  held_out_.labels[3] = (held_out_.labels[3].item<int64_t>() + 1) % 10;
  write_pair(kMnistTest, held_out_);
  EXPECT_THAT(
      run(config, 1).failures,
      HasSubstr("was trained on other data: the same number of samples, but with other content"));

  held_out_ = random_images(kNumHeldOut, 2);
  write_pair(kMnistTest, held_out_);
  const Run resumed = run(config, 1);
  EXPECT_EQ(resumed.failures, "");
  EXPECT_EQ(resumed.result.steps, 5);
}

TEST_F(TrainerEvaluationTest, PairsThatChangePlacesAreOtherData) {
  const auto identity = [&] {
    return make_task(config("none"), os::make_native_system()->deadline_in(std::chrono::seconds(9)))
        ->data_identity();
  };
  const DataIdentity as_written = identity();
  EXPECT_EQ(as_written, identity());
  EXPECT_EQ(as_written.size, kNumTraining + kNumHeldOut);
  write_pair(kMnistTrain, held_out_);
  write_pair(kMnistTest, training_);
  EXPECT_EQ(identity().size, as_written.size);
  EXPECT_NE(identity().fingerprint, as_written.fingerprint);
}

}  // namespace
}  // namespace cadre::train
