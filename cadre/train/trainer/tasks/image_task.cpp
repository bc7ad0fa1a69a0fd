#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/train/data/mnist.h"
#include "cadre/train/data/synthetic_dataset.h"
#include "cadre/train/trainer/models/image_classifier.h"
#include "cadre/train/trainer/tasks/task.h"

namespace cadre::train {
namespace {

// The height and width in pixels of the images that the models accept.
constexpr int64_t kSide = 28;

// Splits one dataset: the first samples are for training, the last ones are held out.
template <typename D>
std::pair<std::shared_ptr<const D>, std::shared_ptr<const D>> split(const D& all,
                                                                    double held_out_fraction) {
  const int64_t size = all.size();
  const auto held_out =
      std::max<int64_t>(std::llround(std::floor(static_cast<double>(size) * held_out_fraction)), 1);
  return {std::make_shared<const D>(all.slice(0, size - held_out)),
          std::make_shared<const D>(all.slice(size - held_out, size))};
}

// Classifies images into ten classes.
class ImageTask : public Task {
 public:
  explicit ImageTask(const Config& config);

  std::shared_ptr<Model> make_model() const override;
  std::shared_ptr<const Dataset> training_data() const override { return training_data_; }
  std::shared_ptr<const Dataset> held_out_data() const override { return held_out_data_; }
  DataIdentity data_identity() const override { return identity_; }
  at::Tensor loss(const at::Tensor& output, const at::Tensor& target) const override;
  bool is_classification() const override { return true; }
  std::optional<double> bigram_entropy() const override { return std::nullopt; }
  std::string sample(const Inference& /*infer*/) const override { return ""; }
  std::string data_text() const override;
  std::string_view item_name() const override { return "samples"; }
  int64_t items_per_sample() const override { return 1; }

 private:
  void open_mnist();
  void make_synthetic();

  Config config_;
  DataIdentity identity_;
  std::shared_ptr<const Dataset> training_data_;
  std::shared_ptr<const Dataset> held_out_data_;
};

ImageTask::ImageTask(const Config& config) : config_(config) {
  if (config.data.kind == "mnist") {
    open_mnist();
  } else {
    make_synthetic();
  }
}

void ImageTask::open_mnist() {
  const std::string& folder = config_.data.path;
  const bool has_train = Mnist::has(folder, kMnistTrain);
  const bool has_test = Mnist::has(folder, kMnistTest);
  // If both files are missing, the constructor throws an error that names them.
  const Mnist first(folder, has_test && !has_train ? kMnistTest : kMnistTrain);
  identity_ = {.size = first.size(), .fingerprint = first.fingerprint()};
  if (has_train && has_test) {
    const auto second = std::make_shared<const Mnist>(folder, kMnistTest);
    training_data_ = std::make_shared<const Mnist>(first);
    held_out_data_ = second;
    identity_.size += second->size();
    Fnv1a both;
    both.add(first.fingerprint());
    both.add(second->fingerprint());
    identity_.fingerprint = both.value();
  } else {
    std::tie(training_data_, held_out_data_) = split(first, config_.data.held_out);
  }
  const at::Tensor image = training_data_->get(std::array<int64_t, 1>{0}).data;
  if (image.size(2) != kSide || image.size(3) != kSide) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("{}: images of {} x {} pixels; the models take {} x {}", folder,
                              image.size(2), image.size(3), kSide, kSide));
  }
}

void ImageTask::make_synthetic() {
  const SyntheticImages all({.num_samples = config_.data.samples, .size = kSide});
  // The fingerprint is a constant, because the generated data depend only on the options.
  identity_ = {.size = all.size(), .fingerprint = 0};
  std::tie(training_data_, held_out_data_) = split(all, config_.data.held_out);
}

std::shared_ptr<Model> ImageTask::make_model() const {
  return make_image_classifier(config_.model, static_cast<uint64_t>(config_.run.seed));
}

at::Tensor ImageTask::loss(const at::Tensor& output, const at::Tensor& target) const {
  return classification_loss(output, target);
}

std::string ImageTask::data_text() const {
  return cadre::format("{} images ({}; {} held out)", training_data_->size(), config_.data.kind,
                       held_out_data_->size());
}

}  // namespace

std::unique_ptr<Task> make_image_task(const Config& config) {
  return std::make_unique<ImageTask>(config);
}

}  // namespace cadre::train
