// Small greyscale images and their labels, from the files of MNIST or of a dataset in its format.
//
// Threads: all methods are const and may be called from any thread. Blocking: the constructor reads
// both files. Lifetime: owns the images, one byte per pixel; slices share them. Errors:
// kUnavailable for missing files; kCorruption for files in another format, or with different
// numbers of images and labels. Source: LeCun et al., "Gradient-based learning applied to document
// recognition", 1998; pixels scaled as in PyTorch's MNIST example. Format: docs/formats/idx.md.
// Guide: docs/guide/training/data.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/core/base/export.h"
#include "cadre/train/data/dataset.h"

namespace cadre {

// The two halves of the dataset, named by the prefix of their files.
inline constexpr std::string_view kMnistTrain = "train";
inline constexpr std::string_view kMnistTest = "t10k";

// data: (B, 1, rows, columns) float32 with a mean of about 0 and a deviation of about 1;
// target: (B) int64, from 0 to 9.
class CADRE_EXPORT Mnist : public Dataset {
 public:
  // Reads `part`-images-idx3-ubyte and `part`-labels-idx1-ubyte of the folder, each plain or .gz.
  explicit Mnist(const std::string& folder, std::string_view part = kMnistTrain);

  // Returns whether the folder has the image file of that part.
  static bool has(const std::string& folder, std::string_view part);

  int64_t size() const override { return labels_.size(0); }
  Batch get(std::span<const int64_t> indices) const override;
  // Returns samples [begin, end). Throws kInvalidArgument unless they are within [0, size()].
  Mnist slice(int64_t begin, int64_t end) const;
  // Returns a hash of all pixels and labels.
  uint64_t fingerprint() const;
  std::optional<uint64_t> digest() const override;

 private:
  at::Tensor images_;  // shape (N, rows, columns), dtype uint8
  at::Tensor labels_;  // shape (N), dtype uint8
};

}  // namespace cadre
