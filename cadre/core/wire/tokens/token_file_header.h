// The header of a file of tokens, in the format of llm.c: 256 little-endian 32-bit integers, of
// which the first three are a magic, a version and the number of tokens; the tokens follow.
//
// Threads: plain values. Blocking: never. Errors: kCorruption, with the offset in the file, what is
// there and what was expected, for bytes that are no such header, and for a file of another size.
// Source: github.com/karpathy/llm.c, dev/data/data_common.py (docs/formats/token-file.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::wire {

inline constexpr size_t kTokenFileHeaderBytes = 1024;
// The largest number of tokens that the 32 bits of the header hold.
inline constexpr int64_t kMaxTokensOfFile = 0x7fffffff;

struct TokenFileHeader {
  int64_t num_tokens = 0;
  int bytes_per_token = 2;  // 2 (GPT-2: magic 20240520, version 1) or 4 (Llama 3: 20240801, 7)

  friend bool operator==(const TokenFileHeader&, const TokenFileHeader&) = default;
};

// Parses the first bytes of a file of file_bytes bytes.
CADRE_EXPORT Result<TokenFileHeader> parse_token_file_header(ConstBytes begin, uint64_t file_bytes);

// REQUIRES: num_tokens is in [0, kMaxTokensOfFile]; bytes_per_token is 2 or 4.
CADRE_EXPORT std::array<std::byte, kTokenFileHeaderBytes> encode_token_file_header(
    const TokenFileHeader& header);

}  // namespace cadre::wire
