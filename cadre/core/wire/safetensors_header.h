// The header of a safetensors file: names, dtypes, shapes and positions of its tensors.
//
// Threads: plain values. Blocking: never. Lifetime: a header owns its texts.
// Errors: kCorruption with what is wrong and what was expected, for every byte sequence that is not
// a valid header; parsing allocates at most a small multiple of the header's size.
// Source: github.com/huggingface/safetensors, format 1 (docs/formats/safetensors.md).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::wire {

// The description of a tensor. `dtype` has the name that the format uses: "F32", "BF16", "I64", ...
// Dtypes whose elements are smaller than a byte are not supported.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  // The first byte of the tensor, counted from the start of the data, which follows the header.
  uint64_t begin = 0;
  uint64_t end = 0;

  friend bool operator==(const SafetensorsEntry&, const SafetensorsEntry&) = default;
};

struct SafetensorsHeader {
  // The tensors are ordered by `begin`. Together they cover the data without gaps.
  std::vector<SafetensorsEntry> tensors;
  std::map<std::string, std::string> metadata;
  // The offset of the data in the file, which parse_safetensors_header() sets.
  uint64_t data_offset = 0;

  friend bool operator==(const SafetensorsHeader&, const SafetensorsHeader&) = default;
};

// The largest header that the format allows. The length is checked before memory is allocated.
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;
inline constexpr size_t kSafetensorsLengthBytes = 8;
// The key of the metadata in the JSON object. No tensor can have this name.
inline constexpr std::string_view kSafetensorsMetadataKey = "__metadata__";

// Returns the size of one element in bytes; 0 if this library does not support the dtype.
CADRE_EXPORT size_t safetensors_dtype_bytes(std::string_view dtype);

// Returns the header of a file with these tensors and sets their `begin` and `end`. The order is
// that of the format: by descending size of an element, so that every tensor is aligned, then by
// name. REQUIRES: this library supports all dtypes, and the names are UTF-8 and differ from
// kSafetensorsMetadataKey.
CADRE_EXPORT SafetensorsHeader lay_out_safetensors(std::vector<SafetensorsEntry> tensors,
                                                   std::map<std::string, std::string> metadata);

// Returns the length of the JSON, which is the first word of a file; 0 if `prefix` is shorter than
// a word.
CADRE_EXPORT uint64_t safetensors_header_bytes(ConstBytes prefix);

// Parses the header of a file of `file_bytes` bytes. `prefix` has the first bytes of the file: at
// least the length word and the JSON, at most the whole file.
CADRE_EXPORT Result<SafetensorsHeader> parse_safetensors_header(ConstBytes prefix,
                                                                uint64_t file_bytes);

// Returns the length word and the JSON, padded with spaces so that the data starts at a multiple of
// 8. REQUIRES: parse_safetensors_header() would accept a file with this header and its data.
CADRE_EXPORT std::string encode_safetensors_header(const SafetensorsHeader& header);

}  // namespace cadre::wire
