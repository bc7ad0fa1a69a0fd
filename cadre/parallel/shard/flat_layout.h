// Where tensors lie in a flat buffer that ranks hold in equal consecutive shards, and how a rank
// reads the shards of the others.
//
// Threads: plain values. Blocking: never. Lifetime: owns what it holds. Errors: kInvalidArgument
// for numbers that make no layout. All numbers are in elements. Source: the flat parameters of
// torch.distributed.fsdp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cadre/core/base/export.h"

namespace cadre {

// How the ranks that share parameters come to the shards of the others. Equal on all ranks.
enum class ShardForm : uint8_t {
  // Each rank copies them into a buffer of its own.
  kGathered,
  // Where all ranks share memory each reads them where their owners keep them: the buffer is one
  // mapping of all shards, nothing is copied, and a host holds the parameters once. Shards are
  // whole pages. They are written in updates only, see shard_fence.h; else a write throws. Across
  // hosts they are gathered, too.
  kMapped,
};

// Elements [begin, end) of a tensor in row-major order.
struct FlatRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  friend bool operator==(const FlatRange&, const FlatRange&) = default;
};

// In elements.
struct FlatAlignment {
  int64_t of_shards = 1;  // every shard is a multiple of it long
  // Every tensor begins at a multiple of it. Matrix products of libtorch round in another way where
  // a matrix does not begin at a multiple of 64 bytes, as every tensor of its own does, so less
  // gives parameters in flat buffers other last bits than plain ones.
  int64_t of_tensors = 1;
};

// Tensors of one dtype lie one after the other in a buffer of num_shards equal shards; the buffer
// is padded between tensors and at its end.
class CADRE_EXPORT FlatLayout {
 public:
  // numels: of the tensors, 0 allowed.
  FlatLayout(std::vector<int64_t> numels, int num_shards, FlatAlignment alignment);

  size_t num_parameters() const { return numels_.size(); }
  int num_shards() const { return num_shards_; }
  // Elements of the padded buffer: num_shards() * shard_numel().
  int64_t numel() const { return num_shards_ * shard_numel_; }
  int64_t shard_numel() const { return shard_numel_; }
  int64_t numel(size_t parameter) const { return numels_[parameter]; }
  // Where the parameter begins in the buffer.
  int64_t offset(size_t parameter) const { return offsets_[parameter]; }
  // The parameter's own elements that the shard holds; empty if there are none.
  FlatRange range(size_t parameter, int shard) const;
  // Where range() begins in the shard.
  int64_t offset_in_shard(size_t parameter, int shard) const;

  friend bool operator==(const FlatLayout&, const FlatLayout&) = default;

 private:
  std::vector<int64_t> numels_;
  std::vector<int64_t> offsets_;
  int num_shards_;
  int64_t shard_numel_;
};

}  // namespace cadre
