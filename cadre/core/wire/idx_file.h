// The idx format of the MNIST files: an array of bytes with its shape, plain or compressed by gzip.
//
// Threads: plain values. Blocking: never. Lifetime: an array owns its bytes.
// Errors: kCorruption, with what is wrong and what was expected, for every byte sequence that is
// not such a file; kInvalidArgument for an element type other than bytes. Before memory is
// allocated, the sizes in the header are checked against the size of the file.
// Source: yann.lecun.com/exdb/mnist; RFC 1952 (docs/formats/idx.md).
#pragma once

#include <cstdint>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre {

struct IdxArray {
  std::vector<int64_t> shape;     // the sizes of the axes, the slowest axis first
  std::vector<uint8_t> elements;  // row-major

  friend bool operator==(const IdxArray&, const IdxArray&) = default;
};

// The largest number of elements; a larger array is an error. The largest array of MNIST has 47 MB.
inline constexpr uint64_t kMaxIdxBytes = uint64_t{1} << 31;
inline constexpr size_t kMaxIdxAxes = 8;

// Parses the whole file. If it begins with the magic of gzip (1f 8b), it is decompressed while it
// is read. The contents of several gzip members are concatenated.
CADRE_EXPORT Result<IdxArray> parse_idx(ConstBytes file);

// Encodes the array without compression. REQUIRES: the array is one that parse_idx() could return.
CADRE_EXPORT std::vector<std::byte> encode_idx(const IdxArray& array);

}  // namespace cadre
