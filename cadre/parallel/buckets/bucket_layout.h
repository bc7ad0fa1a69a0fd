// Defines which gradients are reduced together in one bucket, and the order in which buckets are
// reduced.
//
// Errors: kCorruption for a malformed text, kInvalidArgument for a layout of another model. The
// layout influences the last bits of the reduced gradients, because it determines how collectives
// divide the sums. So a snapshot contains the layout, and a resumed run uses it instead of learning
// a new one. Source: c10d's compute_bucket_assignment_by_size (first bucket 1 MiB, then 25 MiB).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/parallel/shard/flat_layout.h"

namespace cadre {

struct BucketLayout {
  struct Bucket {
    DType dtype = DType::kFloat32;
    // Indices of the parameters, in the order of their gradients in the bucket.
    std::vector<int64_t> parameters;

    friend bool operator==(const Bucket&, const Bucket&) = default;
  };
  std::vector<Bucket> buckets;

  friend bool operator==(const BucketLayout&, const BucketLayout&) = default;

  // Returns a text such as "float32:3,2,1;float32:0". parse(to_string()) is the same layout.
  CADRE_EXPORT std::string to_string() const;
  CADRE_EXPORT static BucketLayout parse(std::string_view text);
};

struct BucketCaps {
  int64_t first_bytes = int64_t{1} << 20;  // small, so that communication starts early
  int64_t bytes = int64_t{25} << 20;
};

// Returns the indices num_parameters - 1 to 0. The reverse order of registration is a first guess
// at the order in which gradients become ready.
CADRE_EXPORT std::vector<int64_t> reverse_order(size_t num_parameters);

// Distributes the parameters over buckets, in the order in which their gradients become ready:
// `order`, a permutation of the parameters. Each bucket has one dtype, and is closed when it has
// reached its cap. The returned buckets are in the order in which they become complete. Equal
// arguments give equal layouts on every rank.
CADRE_EXPORT BucketLayout plan_bucket_layout(std::span<const ParameterSize> parameters,
                                             std::span<const int64_t> order,
                                             const BucketCaps& caps);

// Throws kInvalidArgument unless the layout has each of these parameters exactly once, in a bucket
// of its dtype.
CADRE_EXPORT void check_layout_fits(const BucketLayout& layout,
                                    std::span<const ParameterSize> parameters);

}  // namespace cadre
