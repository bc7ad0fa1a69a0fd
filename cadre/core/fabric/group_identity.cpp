#include "cadre/core/fabric/group_identity.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"

namespace cadre {
namespace {

// The way in which a group was made. Groups that were made in different ways have different birth
// numbers, also if their ids are equal.
enum class Origin : uint64_t { kConnected = 1, kCreation, kCreated, kChild, kNamed };

// Keys below this one are not given to groups: fabric.cpp uses one of them.
constexpr GroupKey kFirstKey = 16;
constexpr size_t kMaxFileNameChars = 100;

// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), a bijection.
uint64_t scrambled(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t mixed(uint64_t state, std::span<const uint64_t> items) {
  for (const uint64_t item : items) state = scrambled(state ^ scrambled(item + 0x9e3779b97f4a7c15));
  return state;
}

uint64_t mixed(Origin origin, std::initializer_list<uint64_t> items) {
  return mixed(static_cast<uint64_t>(origin), std::span(items.begin(), items.size()));
}

}  // namespace

GroupIdentity::GroupIdentity(std::string id, uint64_t birth)
    : id_(std::move(id)), birth_(birth), key_(birth < kFirstKey ? birth + kFirstKey : birth) {}

GroupIdentity GroupIdentity::of_connection(std::string id, uint64_t connection) {
  const uint64_t birth = mixed(Origin::kConnected, {connection, fnv1a(id)});
  return {std::move(id), birth};
}

GroupIdentity GroupIdentity::of_creation(std::string id, uint64_t connection,
                                         std::span<const int> members) {
  uint64_t birth = mixed(Origin::kCreation, {connection, fnv1a(id)});
  for (const int member : members) {
    const auto rank = static_cast<uint64_t>(member);
    birth = mixed(birth, std::span(&rank, 1));
  }
  return {std::move(id), birth};
}

GroupIdentity GroupIdentity::created(std::span<const uint64_t> stamps) const {
  return {id_, mixed(mixed(Origin::kCreated, {birth_}), stamps)};
}

GroupIdentity GroupIdentity::child(uint64_t number, std::optional<int> color) const {
  const uint64_t color_word = color ? static_cast<uint64_t>(*color) + 1 : 0;
  return {color ? format("{}/{}.{}", id_, number, *color) : format("{}/{}", id_, number),
          mixed(Origin::kChild, {birth_, number, color_word})};
}

std::string GroupIdentity::unique_name() const {
  return format("{}@{:016x}", id_, birth_);
}

std::string GroupIdentity::file_name(std::string_view name) const {
  std::string text(name.substr(0, kMaxFileNameChars));
  const auto is_plain = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' ||
           c == '_';
  };
  std::ranges::replace_if(
      text, [&](char c) { return !is_plain(c); }, '.');
  return format("{}@{:016x}", text, birth_);
}

std::string connection_name(std::string_view membership_group, std::string_view id) {
  if (membership_group == id || membership_group.starts_with(format("{}@", id))) {
    return std::string(membership_group);
  }
  return format("{}@{:016x}", id, mixed(Origin::kNamed, {fnv1a(membership_group), fnv1a(id)}));
}

}  // namespace cadre
