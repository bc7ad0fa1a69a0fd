// The places of tensors in a flat buffer that ranks hold in equal consecutive shards, and the
// buffers that FlatParameters allocates for them.
//
// Threads: plain values. Blocking: never. Lifetime: owns what it holds. Errors: kInvalidArgument
// for numbers that make no layout. All numbers are in elements unless a name says bytes. Source:
// the flat parameters of torch.distributed.fsdp.
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

// A parameter without its values.
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

// Returns the sizes, with `unit` 0. Throws kInvalidArgument for a dtype that no group moves.
CADRE_EXPORT std::vector<ParameterSize> sizes_of(std::span<const NamedTensor> parameters);

// Elements [begin, end) of a tensor in row-major order.
struct FlatRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  friend bool operator==(const FlatRange&, const FlatRange&) = default;
};

namespace shard {

// Alignment in elements.
struct FlatAlignment {
  int64_t of_shards = 1;  // the length of every shard is a multiple of this
  // Every tensor begins at a multiple of it. If a matrix does not begin at a multiple of 64 bytes,
  // as separate tensors do, matrix products of libtorch round differently. So with a smaller
  // alignment, results differ from those of plain parameters in the last bits.
  int64_t of_tensors = 1;
};

// Tensors of one dtype lie one after the other in a buffer of num_shards equal shards; the buffer
// is padded between tensors and at its end.
class CADRE_EXPORT FlatLayout {
 public:
  // numels: elements of the tensors; 0 is allowed.
  FlatLayout(std::vector<int64_t> numels, int num_shards, FlatAlignment alignment);

  size_t num_parameters() const { return numels_.size(); }
  int num_shards() const { return num_shards_; }
  // Elements of the padded buffer: num_shards() * shard_numel().
  int64_t numel() const { return num_shards_ * shard_numel_; }
  int64_t shard_numel() const { return shard_numel_; }
  int64_t numel(size_t parameter) const { return numels_[parameter]; }
  // Returns the place in the buffer at which the parameter begins.
  int64_t offset(size_t parameter) const { return offsets_[parameter]; }
  // Returns the parameter's own elements that are in the shard; empty if there are none.
  FlatRange range(size_t parameter, int shard) const;
  // Returns the place in the shard at which range() begins.
  int64_t offset_in_shard(size_t parameter, int shard) const;

  friend bool operator==(const FlatLayout&, const FlatLayout&) = default;

 private:
  std::vector<int64_t> numels_;
  std::vector<int64_t> offsets_;
  int num_shards_;
  int64_t shard_numel_;
};

// The alignment of tensors in a flat buffer, in elements: 64 bytes of the smallest dtype.
inline constexpr int64_t kFlatAlignment = 32;

struct FlatBuffer {
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;

  int64_t num_bytes() const { return numel * static_cast<int64_t>(c10::elementSize(dtype)); }
};

// The memory of one FlatParameters. FlatParameters allocates the buffers that buffers() lists, and
// a memory plan adds them up.
class CADRE_EXPORT FlatMemory {
 public:
  // See FlatParametersOptions.
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
  // Called when the ranks have mapped the shards contiguously, as ShardForm::kMapped requires.
  void set_mapped() { is_mapped_ = true; }
  bool is_mapped() const { return is_mapped_; }
  // Returns whether the shard is a part of the whole buffer.
  bool shares_memory() const;
  // Returns whether the whole buffer is never freed.
  bool keeps_whole() const { return options_.keep_full || shares_memory() || is_mapped_; }

  // A buffer that does not exist is nullopt.
  struct Buffers {
    std::optional<FlatBuffer> whole = {};  // memory of the group, which is never freed
    std::optional<FlatBuffer> part = {};   // the part of the mapping that belongs to this rank
    std::optional<FlatBuffer> shard = {};  // memory of the group, or of a file
    std::optional<FlatBuffer> sent = {};   // the shard in the compute dtype, which peers read
    // Is taken from the pool while the parameters are whole.
    std::optional<FlatBuffer> gathered = {};
  };
  Buffers buffers() const;
  // Returns each rank's part of the mapping.
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
