#include "cadre/core/wire/layout.h"

#include <map>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::wire {
namespace {

constexpr uint32_t kTicketMagic = 0x31544443;  // "CDT1"
constexpr uint32_t kLayoutMagic = 0x334c4443;  // "CDL3"
// The smallest size of an address in a layout: four indices of texts, the pid, the lengths of two
// empty texts, the probe, the PID namespace and the type of the device.
constexpr size_t kMinAddressBytes = 4 * 4 + 4 + 2 * 4 + 8 + 8 + 1;

std::string_view cut(std::string_view text) {
  return text.substr(0, kMaxControlTextBytes);
}

Error malformed(std::string_view what) {
  return Error(ErrorCode::kCorruption,
               format("malformed {}: expected one of this version; check that all ranks run the "
                      "same build",
                      what));
}

// A table that stores each text once, in the order of first use. Addresses have indices into it.
class TextTable {
 public:
  uint32_t place_of(std::string_view text) {
    const auto [found, is_new] =
        places_.try_emplace(cut(text), static_cast<uint32_t>(texts_.size()));
    if (is_new) texts_.push_back(found->first);
    return found->second;
  }
  const std::vector<std::string_view>& texts() const { return texts_; }

 private:
  std::map<std::string_view, uint32_t> places_;
  std::vector<std::string_view> texts_;
};

std::vector<std::string> read_texts(ByteReader& in) {
  std::vector<std::string> texts;
  const auto num_texts = in.integer<uint32_t>();
  if (num_texts > in.remaining() / sizeof(uint32_t)) in.fail();
  for (uint32_t i = 0; i < num_texts && in.ok(); ++i) {
    texts.push_back(in.text(kMaxControlTextBytes));
  }
  return texts;
}

RankAddress read_address(ByteReader& in, const std::vector<std::string>& texts) {
  RankAddress rank_address;
  for (std::string* const text : {&rank_address.version, &rank_address.host, &rank_address.boot_id,
                                  &rank_address.core_mask}) {
    const auto place = in.integer<uint32_t>();
    if (place < texts.size()) {
      *text = texts[place];
    } else {
      in.fail();
    }
  }
  rank_address.pid = in.integer<int32_t>();
  rank_address.tcp_address = in.text(kMaxControlTextBytes);
  rank_address.unix_address = in.text(kMaxControlTextBytes);
  rank_address.probe = in.integer<uint64_t>();
  rank_address.pid_namespace = in.integer<uint64_t>();
  rank_address.device = read_device_type(in);
  return rank_address;
}

}  // namespace

std::string encode_ticket(const Ticket& ticket) {
  ByteWriter out;
  out.integer(kTicketMagic);
  out.integer(ticket.sponsor);
  return std::string(as_text(out.bytes())) + encode_rank_address(ticket.rank_address);
}

Result<Ticket> decode_ticket(std::string_view text) {
  ByteReader in(as_bytes(text));
  const auto magic = in.integer<uint32_t>();
  Ticket ticket;
  ticket.sponsor = in.integer<int32_t>();
  if (!in.ok() || magic != kTicketMagic) return malformed("ticket of a rank in the store");
  auto rank_address = decode_rank_address(text.substr(in.offset()));
  if (!rank_address.ok()) return rank_address.error();
  ticket.rank_address = std::move(rank_address).value();
  return ticket;
}

std::vector<std::byte> encode_layout(std::span<const RankAddress> address_by_rank,
                                     std::string_view settings) {
  TextTable table;
  ByteWriter rank_addresses;
  for (const RankAddress& rank_address : address_by_rank) {
    for (const std::string* text : {&rank_address.version, &rank_address.host,
                                    &rank_address.boot_id, &rank_address.core_mask}) {
      rank_addresses.integer(table.place_of(*text));
    }
    rank_addresses.integer(rank_address.pid);
    rank_addresses.text(cut(rank_address.tcp_address));
    rank_addresses.text(cut(rank_address.unix_address));
    rank_addresses.integer(rank_address.probe);
    rank_addresses.integer(rank_address.pid_namespace);
    rank_addresses.integer(static_cast<uint8_t>(rank_address.device));
  }
  ByteWriter body;
  body.integer(kLayoutMagic);
  body.integer(static_cast<uint32_t>(table.texts().size()));
  for (const std::string_view text : table.texts()) body.text(text);
  body.integer(static_cast<uint32_t>(address_by_rank.size()));
  body.raw(rank_addresses.bytes());
  body.text(settings);
  ByteWriter out;
  out.integer(static_cast<uint32_t>(body.bytes().size()));
  out.raw(body.bytes());
  return out.take();
}

Result<size_t> decode_layout_prefix(ConstBytes prefix) {
  ByteReader in(prefix);
  const auto size = in.integer<uint32_t>();
  if (!in.is_complete() || size > kMaxLayoutBytes) {
    return malformed(format("layout of {} bytes (at most {})", size, kMaxLayoutBytes));
  }
  return size_t{size};
}

Result<LayoutMessage> decode_layout(ConstBytes body) {
  ByteReader in(body);
  const auto magic = in.integer<uint32_t>();
  const std::vector<std::string> texts = read_texts(in);
  const auto num_ranks = in.integer<uint32_t>();
  const bool has_ranks = num_ranks > 0 && num_ranks <= kMaxLayoutRanks;
  if (magic != kLayoutMagic || !has_ranks || num_ranks > in.remaining() / kMinAddressBytes)
    in.fail();
  LayoutMessage layout;
  for (uint32_t i = 0; i < num_ranks && in.ok(); ++i)
    layout.rank_addresses.push_back(read_address(in, texts));
  layout.settings = in.text(kMaxSettingsBytes);
  if (!in.is_complete()) return malformed("layout of a job");
  return layout;
}

}  // namespace cadre::wire
