#include "cadre/core/wire/tokens/token_file_header.h"

#include <algorithm>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::wire {
namespace {

struct TokenFileKind {
  uint32_t magic;
  uint32_t version;
  int bytes_per_token;
};

constexpr std::array<TokenFileKind, 2> kTokenFileKinds = {
    TokenFileKind{.magic = 20240520, .version = 1, .bytes_per_token = 2},
    TokenFileKind{.magic = 20240801, .version = 7, .bytes_per_token = 4}};

Error damaged(size_t offset, const std::string& what) {
  return {ErrorCode::kCorruption,
          cadre::format("at byte {}: {}; expected a file of tokens in the format of llm.c", offset,
                        what)};
}

}  // namespace

Result<TokenFileHeader> parse_token_file_header(ConstBytes begin, uint64_t file_bytes) {
  if (file_bytes < kTokenFileHeaderBytes || begin.size() < kTokenFileHeaderBytes) {
    return damaged(
        static_cast<size_t>(file_bytes),
        cadre::format("the file ends within its header of {} bytes", kTokenFileHeaderBytes));
  }
  ByteReader in(begin);
  const auto magic = in.integer<uint32_t>();
  const auto version = in.integer<uint32_t>();
  const auto num_tokens = static_cast<int64_t>(in.integer<int32_t>());
  const auto* kind = std::ranges::find(kTokenFileKinds, magic, &TokenFileKind::magic);
  if (kind == kTokenFileKinds.end()) {
    return damaged(0, cadre::format("the magic is {} instead of {} or {}", magic,
                                    kTokenFileKinds[0].magic, kTokenFileKinds[1].magic));
  }
  if (version != kind->version) {
    return damaged(4, cadre::format("the version is {} instead of {}", version, kind->version));
  }
  if (num_tokens < 0) {
    return damaged(8, cadre::format("the number of tokens is {}", num_tokens));
  }
  const uint64_t expected =
      kTokenFileHeaderBytes +
      static_cast<uint64_t>(num_tokens) * static_cast<uint64_t>(kind->bytes_per_token);
  if (file_bytes != expected) {
    return damaged(8, cadre::format("the number of tokens is {}, which gives a file of {} bytes, "
                                    "and the file has {}",
                                    num_tokens, expected, file_bytes));
  }
  return TokenFileHeader{.num_tokens = num_tokens, .bytes_per_token = kind->bytes_per_token};
}

std::array<std::byte, kTokenFileHeaderBytes> encode_token_file_header(
    const TokenFileHeader& header) {
  const TokenFileKind& kind = kTokenFileKinds[header.bytes_per_token == 2 ? 0 : 1];
  ByteWriter out;
  out.integer(kind.magic);
  out.integer(kind.version);
  out.integer(static_cast<int32_t>(header.num_tokens));
  std::array<std::byte, kTokenFileHeaderBytes> bytes{};
  std::ranges::copy(out.bytes(), bytes.begin());
  return bytes;
}

}  // namespace cadre::wire
