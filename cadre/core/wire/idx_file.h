// The idx format of the MNIST files: an array of bytes with its shape, plain or compressed by gzip.
//
// Threads: plain values. Blocking: never. Lifetime: an array owns its bytes.
// Errors: kCorruption, with what is wrong and what was expected, for every byte sequence that is
// not such a file; kInvalidArgument for an element type other than bytes. The sizes in the file are
// checked against the size of the file before anything is allocated for them.
// Source: yann.lecun.com/exdb/mnist; RFC 1952 (docs/formats/idx.md).
#pragma once

#include <cstdint>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre {

struct IdxArray {
  std::vector<int64_t> shape;     // the sizes of the axes, of which the slowest comes first
  std::vector<uint8_t> elements;  // row-major

  friend bool operator==(const IdxArray&, const IdxArray&) = default;
};

// Larger arrays are an error; MNIST's largest has 47 MB.
inline constexpr uint64_t kMaxIdxBytes = uint64_t{1} << 31;
inline constexpr size_t kMaxIdxAxes = 8;

// Parses the whole file. Bytes that start like gzip (1f 8b) are decompressed while they are read;
// the contents of several gzip members are concatenated.
CADRE_EXPORT Result<IdxArray> parse_idx(ConstBytes file);

// Encodes without compression. REQUIRES: the shape and the elements are such that parse_idx() could
// return them.
CADRE_EXPORT std::vector<std::byte> encode_idx(const IdxArray& array);

}  // namespace cadre
