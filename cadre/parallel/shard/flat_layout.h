// Computes the offsets of tensors in a flat buffer that is divided into equal consecutive shards,
// one for each rank, and the buffers that FlatParameters allocates for them.
//
// Errors: kInvalidArgument for negative sizes, and for less than one shard. All numbers are in
// elements unless a name says bytes. Source: the flat parameters of torch.distributed.fsdp.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/parallel/shard/data_strategy.h"

namespace cadre {

struct NamedTensor;

// The name, the sizes and the dtype of a parameter, without its values.
struct ParameterSize {
  std::string name = {};
  std::vector<int64_t> sizes = {};
  DType dtype = DType::kFloat32;
  bool is_trained = true;
  size_t unit = 0;  // the index of the parameter's unit in a ModelSizes; 0 is the root

  int64_t numel() const {
    int64_t product = 1;
    for (const int64_t size : sizes) product *= size;
    return product;
  }
  int64_t num_bytes() const { return numel() * static_cast<int64_t>(size_of(dtype)); }
};

// Returns the ParameterSize of each parameter, with `unit` 0. Throws kInvalidArgument for a dtype
// that collectives do not support.
CADRE_EXPORT std::vector<ParameterSize> sizes_of(std::span<const NamedTensor> parameters);

// Elements [begin, end) of a tensor in row-major order.
struct FlatRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  friend bool operator==(const FlatRange&, const FlatRange&) = default;
};

namespace shard {

// The alignment of shards and tensors in a flat buffer, in elements.
struct FlatAlignment {
  int64_t of_shards = 1;  // the number of elements of each shard is a multiple of this
  // Every tensor begins at a multiple of this. libtorch aligns separate tensors to 64 bytes, and
  // its matrix products round differently for a matrix with another alignment. So if this is less
  // than 64 bytes, results differ in the last bits from those with separate tensors.
  int64_t of_tensors = 1;
};

// Tensors of one dtype lie one after the other in a buffer of num_shards equal shards; the buffer
// is padded between tensors and at its end.
class CADRE_EXPORT FlatLayout {
 public:
  // numels: the number of elements of each tensor; 0 is allowed.
  FlatLayout(std::vector<int64_t> numels, int num_shards, FlatAlignment alignment);

  size_t num_parameters() const { return numels_.size(); }
  int num_shards() const { return num_shards_; }
  // Returns the number of elements of the padded buffer: num_shards() * shard_numel().
  int64_t numel() const { return num_shards_ * shard_numel_; }
  int64_t shard_numel() const { return shard_numel_; }
  int64_t numel(size_t parameter) const { return numels_[parameter]; }
  // Returns the offset in the buffer at which the parameter begins.
  int64_t offset(size_t parameter) const { return offsets_[parameter]; }
  // Returns which of the parameter's elements are in the shard, counted from the begin of the
  // parameter; an empty range if none are.
  FlatRange range(size_t parameter, int shard) const;
  // Returns the offset in the shard at which the elements of range() begin.
  int64_t offset_in_shard(size_t parameter, int shard) const;

  friend bool operator==(const FlatLayout&, const FlatLayout&) = default;

 private:
  std::vector<int64_t> numels_;
  std::vector<int64_t> offsets_;
  int num_shards_;
  int64_t shard_numel_;
};

// The default alignment of tensors in a flat buffer, in elements: 64 bytes if an element has 2
// bytes, as in the smallest supported dtypes.
inline constexpr int64_t kFlatAlignment = 32;

struct FlatBuffer {
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;

  int64_t num_bytes() const { return numel * static_cast<int64_t>(c10::elementSize(dtype)); }
};

// Says which buffers one FlatParameters needs. FlatParameters allocates the buffers that buffers()
// returns, and a memory plan adds up their sizes.
class CADRE_EXPORT FlatMemory {
 public:
  // Says which form the shards have. FlatParametersOptions documents each of these options.
  struct Options {
    ShardForm form = ShardForm::kGathered;
    at::ScalarType dtype = at::kFloat;  // the dtype of the shards
    std::optional<at::ScalarType> compute_dtype = {};
    int64_t alignment = kFlatAlignment;
    bool keep_full = false;
    bool is_in_files = false;
  };
  FlatMemory(std::vector<int64_t> numels, int num_shards, const Options& options);

  const FlatLayout& layout() const { return layout_; }
  at::ScalarType dtype() const { return options_.dtype; }
  at::ScalarType compute_dtype() const { return options_.compute_dtype.value_or(options_.dtype); }
  // FlatParameters calls this when the ranks have mapped the shards contiguously, as
  // ShardForm::kMapped requires.
  void set_mapped() { is_mapped_ = true; }
  bool is_mapped() const { return is_mapped_; }
  // Returns whether this rank's shard is a part of its whole buffer, so that it has no memory of
  // its own.
  bool shares_memory() const;
  // Returns whether the whole buffer is never freed.
  bool keeps_whole() const { return options_.keep_full || shares_memory() || is_mapped_; }

  // The buffers of one rank. A buffer that is not allocated is nullopt.
  struct Buffers {
    std::optional<FlatBuffer> whole = {};  // all parameters; never freed
    std::optional<FlatBuffer> part = {};   // kMapped: the pages of this rank
    std::optional<FlatBuffer> shard = {};  // this rank's shard, in memory or in a file
    std::optional<FlatBuffer> sent = {};   // the shard in the compute dtype, for gathers
    // All parameters, in a buffer that is taken from the pool for each gather and given back after
    // the use.
    std::optional<FlatBuffer> gathered = {};
  };
  Buffers buffers() const;
  // Returns the buffer that each rank contributes to the mapping of ShardForm::kMapped.
  FlatBuffer mapped_part() const {
    return {.numel = layout_.shard_numel(), .dtype = compute_dtype()};
  }

 private:
  Options options_;
  FlatLayout layout_;
  bool is_mapped_ = false;
};

}  // namespace shard

}  // namespace cadre
