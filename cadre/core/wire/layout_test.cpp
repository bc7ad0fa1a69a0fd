#include "cadre/core/wire/layout.h"

#include <gtest/gtest.h>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::wire {
namespace {

std::vector<RankAddress> address_of(int num_ranks, int ranks_per_host) {
  std::vector<RankAddress> rank_addresses;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const int host = rank / ranks_per_host;
    rank_addresses.push_back({"1.2.3", format("node{}", host), format("boot-{}", host), 1000 + rank,
                              format("tcp:10.0.0.{}:{}", host, 4000 + rank),
                              format("unix:@rank-{}", rank), static_cast<uint64_t>(rank) << 40 | 1,
                              "\x0f", 4026531836});
  }
  return rank_addresses;
}

ConstBytes body_of(const std::vector<std::byte>& message) {
  return ConstBytes(message).subspan(kLayoutPrefixBytes);
}

TEST(LayoutMessage, SurvivesARoundTripAndHasItsLengthBeforeIt) {
  const std::vector<RankAddress> rank_addresses = address_of(12, 4);
  const std::string settings(kMaxSettingsBytes, 's');
  const std::vector<std::byte> message = encode_layout(rank_addresses, settings);
  const auto size = decode_layout_prefix(ConstBytes(message).first(kLayoutPrefixBytes));
  ASSERT_TRUE(size.ok());
  EXPECT_EQ(*size, message.size() - kLayoutPrefixBytes);
  const auto decoded = decode_layout(body_of(message));
  ASSERT_TRUE(decoded.ok()) << decoded.error().message();
  EXPECT_EQ(decoded->rank_addresses, rank_addresses);
  EXPECT_EQ(decoded->settings, settings);
}

TEST(LayoutMessage, TextsThatAddressesShareAreWrittenOnce) {
  std::vector<RankAddress> rank_addresses = address_of(64, 8);
  const size_t short_bytes = encode_layout(rank_addresses).size();
  for (RankAddress& rank_address : rank_addresses) {
    rank_address.version += std::string(100, 'v');
    rank_address.host += std::string(100, 'h');
    rank_address.boot_id += std::string(100, 'b');
    rank_address.core_mask += std::string(100, 'c');
  }
  // The texts are stored once: one version, one core mask, eight hosts and eight boot ids, which
  // makes 18 texts, each 100 bytes longer than in the short layout.
  EXPECT_EQ(encode_layout(rank_addresses).size(), short_bytes + 18 * 100);
}

// The expected bytes were written by hand from docs/formats/layout.md, so this test fails if the
// format changes.
TEST(LayoutMessage, HasTheDocumentedBytes) {
  const std::vector<RankAddress> rank_addresses = {
      {"v", "h", "b", 1, "t", "u", 2, "v", 9, DeviceType::kPrivateUse1}};
  const std::string expected(
      "\x50\0\0\0"
      "CDL3"
      "\3\0\0\0"
      "\1\0\0\0v"
      "\1\0\0\0h"
      "\1\0\0\0b"
      "\1\0\0\0"
      "\0\0\0\0\1\0\0\0\2\0\0\0\0\0\0\0"
      "\1\0\0\0"
      "\1\0\0\0t"
      "\1\0\0\0u"
      "\2\0\0\0\0\0\0\0"
      "\x9\0\0\0\0\0\0\0\2"
      "\2\0\0\0no",
      84);
  EXPECT_EQ(as_text(encode_layout(rank_addresses, "no")), expected);
}

TEST(LayoutMessage, CutAndMadeUpBytesAreRefused) {
  const std::vector<std::byte> message = encode_layout(address_of(3, 2), "settings");
  const ConstBytes body = body_of(message);
  for (size_t size = 0; size < body.size(); ++size) {
    const auto layout = decode_layout(body.first(size));
    ASSERT_FALSE(layout.ok()) << "the first " << size << " bytes";
    EXPECT_EQ(layout.error().code(), ErrorCode::kCorruption);
  }
  std::vector<std::byte> longer(body.begin(), body.end());
  longer.push_back(std::byte{0});
  EXPECT_FALSE(decode_layout(longer).ok());
  EXPECT_FALSE(decode_layout(body_of(encode_layout({}))).ok())
      << "a layout without ranks is an error";
}

TEST(LayoutMessage, APlaceBeyondTheTextsIsRefused) {
  std::vector<std::byte> message =
      encode_layout(std::vector<RankAddress>{{"v", "h", "b", 1, "t", "u", 2, "v"}});
  // Changes the index of the version's text. The table has three texts, so index 3 is invalid.
  message[4 + 8 + 15 + 4] = std::byte{3};
  EXPECT_FALSE(decode_layout(body_of(message)).ok());
}

TEST(LayoutMessage, AnUnknownTypeOfDeviceIsRefused) {
  std::vector<std::byte> message =
      encode_layout(std::vector<RankAddress>{{"v", "h", "b", 1, "t", "u", 2, "v"}});
  message[message.size() - 5] = std::byte{kNumDeviceTypes};  // the byte before the empty settings
  EXPECT_FALSE(decode_layout(body_of(message)).ok());
}

TEST(LayoutMessage, SettingsOverTheLimitAreRefused) {
  const std::string settings(kMaxSettingsBytes + 1, 's');
  EXPECT_FALSE(decode_layout(body_of(encode_layout(address_of(2, 2), settings))).ok());
}

TEST(LayoutMessage, ALengthOverTheLimitIsRefused) {
  ByteWriter out;
  out.integer(static_cast<uint32_t>(kMaxLayoutBytes + 1));
  EXPECT_FALSE(decode_layout_prefix(out.bytes()).ok());
  ByteWriter largest;
  largest.integer(static_cast<uint32_t>(kMaxLayoutBytes));
  EXPECT_EQ(decode_layout_prefix(largest.bytes()).value_or_throw(), kMaxLayoutBytes);
  EXPECT_FALSE(decode_layout_prefix(ConstBytes(largest.bytes()).first(3)).ok());
}

TEST(LayoutMessage, RandomDamageNeverReadsBeyondTheBytes) {
  const std::vector<std::byte> message = encode_layout(address_of(5, 2), "settings");
  Random random(1);
  for (int i = 0; i < 2000; ++i) {
    std::vector<std::byte> damaged(body_of(message).begin(), body_of(message).end());
    for (int k = 0; k < 3; ++k) {
      damaged[random.below(damaged.size())] = static_cast<std::byte>(random.next());
    }
    const auto layout = decode_layout(damaged);
    if (layout.ok()) {
      EXPECT_EQ(layout->rank_addresses.size(), 5U);
    }
  }
}

TEST(TicketMessage, SurvivesARoundTripAndRefusesOtherBytes) {
  const Ticket ticket{7, address_of(8, 2).back()};
  const std::string text = encode_ticket(ticket);
  const auto decoded = decode_ticket(text);
  ASSERT_TRUE(decoded.ok()) << decoded.error().message();
  EXPECT_EQ(*decoded, ticket);
  for (size_t size = 0; size < text.size(); ++size) {
    EXPECT_FALSE(decode_ticket(std::string_view(text).substr(0, size)).ok());
  }
  EXPECT_FALSE(decode_ticket(encode_rank_address(ticket.rank_address)).ok());
}

}  // namespace
}  // namespace cadre::wire
