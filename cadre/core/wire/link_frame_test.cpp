// Tests the headers of frames on data connections: their bytes, and which headers are rejected.
#include "cadre/core/wire/link_frame.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cadre/core/wire/hex.h"

namespace cadre::wire {
namespace {

using ::testing::HasSubstr;

std::string refusal_of(const std::array<std::byte, LinkFrame::kBytes>& bytes) {
  const auto frame = LinkFrame::parse(bytes);
  if (frame.ok()) return "";
  EXPECT_EQ(frame.error().code(), ErrorCode::kCorruption);
  return frame.error().message();
}

TEST(LinkFrameTest, HasTheseBytes) {
  const LinkFrame frame{LinkFrame::Kind::kCredit, 2, 0x00030201, 0x1122334455667788};
  EXPECT_EQ(to_hex(frame.encode()), "434c0202010203008877665544332211");
}

TEST(LinkFrameTest, EachKindComesBack) {
  for (const LinkFrame& frame :
       {LinkFrame{}, LinkFrame{LinkFrame::Kind::kData, 1, LinkFrame::kMaxPayloadBytes, 7},
        LinkFrame{LinkFrame::Kind::kCredit, 255, LinkFrame::kWindowBytes, ~uint64_t{0}},
        LinkFrame{LinkFrame::Kind::kClose, 0, 0, 1}, LinkFrame{LinkFrame::Kind::kProbe, 2, 0, 9}}) {
    EXPECT_EQ(LinkFrame::parse(frame.encode()).value_or_throw(), frame);
  }
}

TEST(LinkFrameTest, WhatNobodySendsIsRefused) {
  const LinkFrame good{LinkFrame::Kind::kData, 1, 8, 7};
  auto bytes = good.encode();
  bytes[0] = std::byte{0};
  EXPECT_THAT(refusal_of(bytes), HasSubstr("the magic is 0x4c00"));
  bytes = good.encode();
  bytes[2] = std::byte{5};
  EXPECT_THAT(refusal_of(bytes), HasSubstr("the kind is 0x5"));
  for (LinkFrame bad :
       {LinkFrame{LinkFrame::Kind::kData, 1, 0, 7},
        LinkFrame{LinkFrame::Kind::kData, 1, LinkFrame::kMaxPayloadBytes + 1, 7},
        LinkFrame{LinkFrame::Kind::kCredit, 1, 0, 7},
        LinkFrame{LinkFrame::Kind::kCredit, 1, LinkFrame::kWindowBytes + 1, 7},
        LinkFrame{LinkFrame::Kind::kClose, 1, 1, 7}, LinkFrame{LinkFrame::Kind::kOpen, 0, 1, 0}}) {
    EXPECT_THAT(refusal_of(bad.encode()), HasSubstr("the length is")) << int(bad.kind);
  }
  EXPECT_THAT(refusal_of(LinkFrame{LinkFrame::Kind::kOpen, 0, 0, 9}.encode()),
              HasSubstr("the group is 0x9"));
}

}  // namespace
}  // namespace cadre::wire
