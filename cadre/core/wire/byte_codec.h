// Little-endian integers and length-prefixed texts: the primitives of all formats of this project.
//
// Threads: one owner at a time. Blocking: never. Lifetime: a ByteReader borrows its bytes.
// Errors: once a ByteReader was asked for more bytes than there are, ok() is false and it returns
// only zeros, so a decoder can read all fields and check ok() once. If messages have no length
// prefix, is_truncated() tells an incomplete message from invalid bytes.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "cadre/core/base/types.h"

namespace cadre::wire {

inline ConstBytes as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}
inline std::string_view as_text(ConstBytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Converts between a word of the CPU and a little-endian word. It is faster than a ByteWriter, for
// headers that every message has.
inline uint64_t word_of(uint64_t value) {
  return std::endian::native == std::endian::little ? value : __builtin_bswap64(value);
}
inline void store_word(std::byte* at, uint64_t value) {
  const uint64_t word = word_of(value);
  std::memcpy(at, &word, sizeof(word));
}
inline uint64_t load_word(const std::byte* at) {
  uint64_t word = 0;
  std::memcpy(&word, at, sizeof(word));
  return word_of(word);
}

class ByteWriter {
 public:
  template <typename T>
    requires(std::is_integral_v<T> || std::is_enum_v<T>)
  void integer(T value) {
    // The bytes are written by shifts and not by memcpy, because the format is little-endian on
    // every CPU.
    const auto bits = static_cast<uint64_t>(value);
    for (size_t i = 0; i < sizeof(T); ++i)
      bytes_.push_back(static_cast<std::byte>(bits >> (8 * i)));
  }
  void raw(ConstBytes data) { bytes_.insert(bytes_.end(), data.begin(), data.end()); }
  // Writes the length of the text, then its bytes. REQUIRES: the length fits into the type Length.
  template <typename Length = uint32_t>
  void text(std::string_view value) {
    integer(static_cast<Length>(value.size()));
    raw(as_bytes(value));
  }

  const std::vector<std::byte>& bytes() const { return bytes_; }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

class ByteReader {
 public:
  explicit ByteReader(ConstBytes bytes) : all_(bytes), rest_(bytes) {}

  template <typename T>
    requires std::is_integral_v<T>
  T integer() {
    const ConstBytes field = take(sizeof(T));
    uint64_t bits = 0;
    for (size_t i = 0; i < field.size(); ++i) {
      bits |= static_cast<uint64_t>(std::to_integer<uint8_t>(field[i])) << (8 * i);
    }
    return static_cast<T>(bits);
  }
  void raw(Bytes out) {
    const ConstBytes field = take(out.size());
    if (!field.empty()) std::memcpy(out.data(), field.data(), field.size());
  }
  // Reads a length, and then that many bytes. The read fails if the length exceeds `max_bytes`.
  template <typename Length = uint32_t>
  std::string text(size_t max_bytes) {
    return std::string(view<Length>(max_bytes));
  }
  // Reads the same as text(), but returns a view of the reader's bytes instead of a copy.
  template <typename Length = uint32_t>
  std::string_view view(size_t max_bytes) {
    const auto size = integer<Length>();
    if (size > max_bytes) fail();
    return as_text(take(static_cast<size_t>(size)));
  }

  // Continues at `offset`, which an earlier reader of the same bytes has reached. REQUIRES:
  // offset() <= offset.
  void skip_to(size_t offset) { rest_ = all_.subspan(offset); }

  // Called by a decoder that finds an invalid value. Afterwards ok() is false, as after a failed
  // read.
  void fail() { ok_ = false; }
  bool ok() const { return ok_; }
  size_t offset() const { return all_.size() - rest_.size(); }
  size_t remaining() const { return rest_.size(); }
  // Returns whether a read failed because there were too few bytes. num_needed() is the total
  // number of bytes that this read needs at least.
  bool is_truncated() const { return num_needed_ > 0; }
  size_t num_needed() const { return num_needed_; }
  // Returns whether every read succeeded and no byte is left.
  bool is_complete() const { return ok_ && rest_.empty(); }

 private:
  ConstBytes take(size_t size) {
    if (ok_ && size > rest_.size()) {
      ok_ = false;
      num_needed_ = offset() + size;
    }
    if (!ok_) return {};
    const ConstBytes field = rest_.first(size);
    rest_ = rest_.subspan(size);
    return field;
  }

  ConstBytes all_;
  ConstBytes rest_;
  bool ok_ = true;
  size_t num_needed_ = 0;
};

}  // namespace cadre::wire
