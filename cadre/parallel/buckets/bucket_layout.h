// Says which parameter's gradient lies in which bucket, in the order in which buckets are reduced.
//
// Threads: plain values. Blocking: never. Errors: cadre::Error; kCorruption for a malformed text,
// kInvalidArgument for a layout of another model.
// A layout decides where sums are cut into messages, and so the last bits of a result: it is part
// of a snapshot, and a resumed run imports it instead of learning it again.
// Source: c10d's compute_bucket_assignment_by_size (first bucket 1 MiB, then 25 MiB).
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
    std::vector<int64_t> parameters;  // the indices of the parameters, in memory order

    friend bool operator==(const Bucket&, const Bucket&) = default;
  };
  std::vector<Bucket> buckets;

  friend bool operator==(const BucketLayout&, const BucketLayout&) = default;

  // Returns a text such as "float32:3,2,1;float32:0". parse(to_string()) is the same layout.
  CADRE_EXPORT std::string to_string() const;
  CADRE_EXPORT static BucketLayout parse(std::string_view text);
};

struct BucketCaps {
  int64_t first_bytes = int64_t{1} << 20;  // is small, so that communication starts early
  int64_t bytes = int64_t{25} << 20;
};

// Returns the reverse order of registration: a first guess at the order in which gradients become
// ready.
CADRE_EXPORT std::vector<int64_t> reverse_order(size_t num_parameters);

// Fills buckets in `order` (a permutation of the parameters, first ready first); a bucket is full
// when it has reached its cap, and has one dtype. The buckets are in the order in which they become
// complete. A pure function: equal arguments give equal layouts on every rank.
CADRE_EXPORT BucketLayout plan_bucket_layout(std::span<const ParameterSize> parameters,
                                             std::span<const int64_t> order,
                                             const BucketCaps& caps);

// Throws unless the layout holds each of these parameters once, in a bucket of its dtype.
CADRE_EXPORT void check_layout_fits(const BucketLayout& layout,
                                    std::span<const ParameterSize> parameters);

}  // namespace cadre
