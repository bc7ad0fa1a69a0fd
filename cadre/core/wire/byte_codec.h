// Little-endian integers and length-prefixed texts: the primitives of all formats of this project.
//
// Threads: one owner at a time. Blocking: never. Lifetime: a ByteReader borrows its bytes.
// Errors: a ByteReader that is asked for more bytes than there are has failed from then on and
// returns zeros, so a decoder reads all fields and calls ok() once. In a stream whose messages have
// no length, is_truncated() distinguishes a message that is incomplete from bytes that are no such
// message.
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

// Converts a whole word, for headers that every message has.
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
    // The code shifts and does not use memcpy, because the format is little-endian on every
    // machine.
    const auto bits = static_cast<uint64_t>(value);
    for (size_t i = 0; i < sizeof(T); ++i)
      bytes_.push_back(static_cast<std::byte>(bits >> (8 * i)));
  }
  void raw(ConstBytes data) { bytes_.insert(bytes_.end(), data.begin(), data.end()); }
  // Writes a length, then the bytes. REQUIRES: the size fits Length.
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
  // Fails if the text is longer than `max_bytes`.
  template <typename Length = uint32_t>
  std::string text(size_t max_bytes) {
    return std::string(view<Length>(max_bytes));
  }
  // Does the same without a copy; the view is valid as long as the bytes.
  template <typename Length = uint32_t>
  std::string_view view(size_t max_bytes) {
    const auto size = integer<Length>();
    if (size > max_bytes) fail();
    return as_text(take(static_cast<size_t>(size)));
  }

  // Goes on at `offset`, where an earlier reader of the same bytes was. REQUIRES: offset() <=
  // offset.
  void skip_to(size_t offset) { rest_ = all_.subspan(offset); }

  // Called by a decoder that finds an invalid value; has the effect of a read that fails.
  void fail() { ok_ = false; }
  bool ok() const { return ok_; }
  size_t offset() const { return all_.size() - rest_.size(); }
  size_t remaining() const { return rest_.size(); }
  // Returns whether a read failed because the bytes ended. num_needed() is the least number of
  // bytes with which that read succeeds.
  bool is_truncated() const { return num_needed_ > 0; }
  size_t num_needed() const { return num_needed_; }
  // Returns whether no read failed and all bytes were read.
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
