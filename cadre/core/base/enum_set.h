// A set of values of an enumeration with at most 63 values.
//
// Threads: a plain value. Blocking: never. Errors: none; a number that is no value of the
// enumeration is in no set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace cadre {

template <typename Enum>
class EnumSet {
 public:
  constexpr EnumSet() = default;
  constexpr EnumSet(std::initializer_list<Enum> values) {
    for (const Enum value : values) insert(value);
  }
  // Returns the set of the first `count` values of the enumeration.
  static constexpr EnumSet first(size_t count) {
    EnumSet set;
    set.bits_ = (uint64_t{1} << count) - 1;
    return set;
  }

  constexpr bool contains(Enum value) const {
    const auto index = static_cast<size_t>(value);
    return index < 64 && (bits_ >> index & 1) != 0;
  }
  constexpr void insert(Enum value) { bits_ |= uint64_t{1} << static_cast<size_t>(value); }
  constexpr void erase(Enum value) { bits_ &= ~(uint64_t{1} << static_cast<size_t>(value)); }
  constexpr bool is_empty() const { return bits_ == 0; }

  friend constexpr bool operator==(const EnumSet&, const EnumSet&) = default;

 private:
  uint64_t bits_ = 0;
};

}  // namespace cadre
