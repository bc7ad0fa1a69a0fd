// Messages with which the ranks of a job connect: the ticket, which tells a rank from which rank it
// gets the layout, and the layout, which has the addresses of all ranks and the settings that rank
// 0 gives to them.
//
// Threads: plain values. Blocking: never.
// Errors: kCorruption for bytes that are not such a message; all input counts as untrusted.
// Format: docs/formats/layout.md.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/wire/control.h"

namespace cadre::wire {

inline constexpr size_t kMaxLayoutBytes = 16 << 20;
inline constexpr size_t kMaxLayoutRanks = 1 << 16;
inline constexpr size_t kMaxSettingsBytes = 4 << 10;
// The size of the length prefix of a layout.
inline constexpr size_t kLayoutPrefixBytes = sizeof(uint32_t);

// Tells a rank which rank, its sponsor, will send it the layout.
struct Ticket {
  int32_t sponsor = 0;
  RankAddress rank_address;  // the address of the sponsor

  friend bool operator==(const Ticket&, const Ticket&) = default;
};

std::string encode_ticket(const Ticket& ticket);
Result<Ticket> decode_ticket(std::string_view text);

struct LayoutMessage {
  std::vector<RankAddress> rank_addresses;  // the addresses in rank order
  std::string settings;                     // the text that rank 0 gives to all ranks

  friend bool operator==(const LayoutMessage&, const LayoutMessage&) = default;
};

// Returns the layout with its length prefix. A text that occurs in several addresses is written
// once. REQUIRES: the settings have at most kMaxSettingsBytes.
std::vector<std::byte> encode_layout(std::span<const RankAddress> address_by_rank,
                                     std::string_view settings = {});
// Returns the number of bytes that follow the length prefix of a layout.
Result<size_t> decode_layout_prefix(ConstBytes prefix);
// Decodes a layout; `body` has all but its length prefix.
Result<LayoutMessage> decode_layout(ConstBytes body);

}  // namespace cadre::wire
