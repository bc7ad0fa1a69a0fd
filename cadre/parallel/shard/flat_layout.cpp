#include "cadre/parallel/shard/flat_layout.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/group/symmetric_tensor.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {

std::vector<ParameterSize> sizes_of(std::span<const NamedTensor> parameters) {
  std::vector<ParameterSize> sizes;
  for (const NamedTensor& named : parameters) {
    const at::Tensor& parameter = named.tensor;
    const std::optional<DType> dtype = to_dtype(parameter.scalar_type());
    if (!dtype) {
      throw Error(ErrorCode::kInvalidArgument,
                  format("the parameter \"{}\" is {}, which no group can reduce; use float16, "
                         "bfloat16, float32 or float64",
                         named.name, c10::toString(parameter.scalar_type())));
    }
    sizes.push_back({.name = named.name,
                     .sizes = parameter.sizes().vec(),
                     .dtype = *dtype,
                     .is_trained = parameter.requires_grad()});
  }
  return sizes;
}

namespace shard {
namespace {

int64_t divided_up(int64_t count, int64_t divisor) {
  return (count + divisor - 1) / divisor;
}

int64_t rounded_up(int64_t count, int64_t unit) {
  return divided_up(count, unit) * unit;
}

// Returns the alignment of shards in elements. With kMapped, shards are whole pages even if the
// ranks of this group cannot map them, because the ranks of another replica with the same layout
// may be able to.
int64_t shard_alignment(const FlatMemory::Options& options) {
  if (options.form != ShardForm::kMapped) return options.alignment;
  const at::ScalarType dtype = options.compute_dtype.value_or(options.dtype);
  return std::lcm(options.alignment,
                  SymmetricTensor::kPageBytes / static_cast<int64_t>(c10::elementSize(dtype)));
}

}  // namespace

FlatLayout::FlatLayout(std::vector<int64_t> numels, int num_shards, FlatAlignment alignment)
    : numels_(std::move(numels)), num_shards_(num_shards) {
  const int64_t least_alignment = std::min(alignment.of_shards, alignment.of_tensors);
  if (num_shards < 1 || least_alignment < 1) {
    throw Error(ErrorCode::kInvalidArgument, format("FlatLayout: {} shards with an alignment of {} "
                                                    "elements; both numbers must be at least 1",
                                                    num_shards, least_alignment));
  }
  int64_t offset = 0;
  for (size_t i = 0; i < numels_.size(); ++i) {
    if (numels_[i] < 0) {
      throw Error(
          ErrorCode::kInvalidArgument,
          format("FlatLayout: tensor {} has {} elements; a count is at least 0", i, numels_[i]));
    }
    offsets_.push_back(rounded_up(offset, alignment.of_tensors));
    if (numels_[i] > 0) offset = offsets_.back() + numels_[i];
  }
  shard_numel_ = rounded_up(divided_up(offset, num_shards), alignment.of_shards);
}

FlatRange FlatLayout::range(size_t parameter, int shard) const {
  const int64_t first = shard * shard_numel_ - offsets_[parameter];
  const int64_t numel = numels_[parameter];
  return {.begin = std::clamp<int64_t>(first, 0, numel),
          .end = std::clamp<int64_t>(first + shard_numel_, 0, numel)};
}

int64_t FlatLayout::offset_in_shard(size_t parameter, int shard) const {
  const int64_t first = shard * shard_numel_ - offsets_[parameter];
  return std::clamp<int64_t>(range(parameter, shard).begin - first, 0, shard_numel_);
}

FlatMemory::FlatMemory(std::vector<int64_t> numels, int num_shards, const Options& options)
    : options_(options),
      layout_(std::move(numels), num_shards,
              {.of_shards = shard_alignment(options), .of_tensors = options.alignment}) {}

bool FlatMemory::shares_memory() const {
  if (is_mapped_ || options_.is_in_files || compute_dtype() != dtype()) return false;
  return options_.keep_full || layout_.num_shards() == 1;
}

FlatMemory::Buffers FlatMemory::buffers() const {
  const FlatBuffer whole{.numel = layout_.numel(), .dtype = compute_dtype()};
  const FlatBuffer shard{.numel = layout_.shard_numel(), .dtype = dtype()};
  const bool is_cast = compute_dtype() != dtype();
  Buffers buffers;
  if (is_mapped_) {
    buffers.part = mapped_part();
    if (is_cast) buffers.shard = shard;
    return buffers;
  }
  (keeps_whole() ? buffers.whole : buffers.gathered) = whole;
  if (!shares_memory()) buffers.shard = shard;
  if (is_cast && !options_.is_in_files) {
    buffers.sent = FlatBuffer{.numel = layout_.shard_numel(), .dtype = compute_dtype()};
  }
  return buffers;
}

}  // namespace shard

}  // namespace cadre
