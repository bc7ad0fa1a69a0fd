#include "cadre/train/data/mnist.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <cstring>
#include <filesystem>
#include <optional>
#include <span>
#include <string_view>
#include <system_error>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/wire/idx_file.h"
#include "cadre/train/data/tensor_samples.h"

namespace cadre {
namespace {

constexpr std::string_view kImages = "images-idx3-ubyte";
constexpr std::string_view kLabels = "labels-idx1-ubyte";
constexpr int64_t kNumClasses = 10;
// A limit that no file of this format reaches.
constexpr size_t kMaxFileBytes = size_t{1} << 40;
// Mean and standard deviation of the pixels of MNIST's training images, as in PyTorch's example.
constexpr double kPixelMean = 0.1307;
constexpr double kPixelDeviation = 0.3081;
constexpr double kMaxPixel = 255;

std::optional<std::string> find(const std::string& folder, std::string_view part,
                                std::string_view kind) {
  for (const std::string_view suffix : {"", ".gz"}) {
    std::string path = cadre::format("{}/{}-{}{}", folder, part, kind, suffix);
    std::error_code error;
    if (std::filesystem::exists(path, error)) return path;
  }
  return std::nullopt;
}

// Returns a uint8 tensor with the sizes that the file has.
at::Tensor read(const std::string& folder, std::string_view part, std::string_view kind,
                size_t num_axes) {
  const auto path = find(folder, part, kind);
  if (!path) {
    throw Error(
        ErrorCode::kUnavailable,
        cadre::format("there is neither {0}/{1}-{2} nor {0}/{1}-{2}.gz; download MNIST's files "
                      "to that folder, or name another one",
                      folder, part, kind));
  }
  const std::string file = os::read_file(*path, kMaxFileBytes).value_or_throw();
  const Result<IdxArray> array = parse_idx(std::as_bytes(std::span(file)));
  if (!array.ok()) throw array.error().with_context(*path);
  if (array->shape.size() != num_axes) {
    throw Error(ErrorCode::kCorruption,
                cadre::format("{} has {} axes; expected {}", *path, array->shape.size(), num_axes));
  }
  const at::Tensor tensor = at::empty(array->shape, at::kByte);
  if (!array->elements.empty()) {
    std::memcpy(tensor.mutable_data_ptr(), array->elements.data(), array->elements.size());
  }
  return tensor;
}

}  // namespace

Mnist::Mnist(const std::string& folder, std::string_view part)
    : images_(read(folder, part, kImages, 3)), labels_(read(folder, part, kLabels, 1)) {
  if (images_.size(0) != labels_.size(0)) {
    throw Error(
        ErrorCode::kCorruption,
        cadre::format("{}: {} images but {} labels of {}; expected one label for each image",
                      folder, images_.size(0), labels_.size(0), part));
  }
  if (images_.numel() == 0) {
    throw Error(ErrorCode::kCorruption, cadre::format("{}: no images of {}", folder, part));
  }
  const auto largest = labels_.max().item<int64_t>();
  if (largest >= kNumClasses) {
    throw Error(ErrorCode::kCorruption, cadre::format("{}: a label of {} is {}; expected 0 to {}",
                                                      folder, part, largest, kNumClasses - 1));
  }
}

bool Mnist::has(const std::string& folder, std::string_view part) {
  return find(folder, part, kImages).has_value();
}

Batch Mnist::get(std::span<const int64_t> indices) const {
  const at::Tensor rows = at::tensor(at::IntArrayRef(indices.data(), indices.size()), at::kLong);
  at::Tensor images = images_.index_select(0, rows).unsqueeze(1).to(at::kFloat);
  images.div_(kMaxPixel).sub_(kPixelMean).div_(kPixelDeviation);
  return {.data = images, .target = labels_.index_select(0, rows).to(at::kLong)};
}

Mnist Mnist::slice(int64_t begin, int64_t end) const {
  check_slice("Mnist", begin, end, size());
  Mnist part = *this;
  part.images_ = images_.narrow(0, begin, end - begin);
  part.labels_ = labels_.narrow(0, begin, end - begin);
  return part;
}

uint64_t Mnist::fingerprint() const {
  Fnv1a hash;
  hash.add(sample_bytes(images_));
  hash.add(sample_bytes(labels_));
  return hash.value();
}

std::optional<uint64_t> Mnist::digest() const {
  return digest_of({images_, labels_});
}

}  // namespace cadre
