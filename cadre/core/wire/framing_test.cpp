#include "cadre/core/wire/framing.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cadre/core/base/random.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::wire {
namespace {

TEST(StreamBuffer, KeepsTheOrderHoweverItIsCut) {
  Random random(7);
  std::string sent;
  std::string received;
  StreamBuffer buffer;
  for (int i = 0; i < 2000; ++i) {
    const std::string piece(random.below(300), static_cast<char>('a' + random.below(26)));
    sent += piece;
    buffer.append(as_bytes(piece));
    const size_t taken = random.below(buffer.size() + 1);
    received += as_text(buffer.view().first(taken));
    buffer.consume(taken);
  }
  received += as_text(buffer.view());
  EXPECT_EQ(received, sent);
}

TEST(Framing, FindsFramesInAStreamThatComesByteByByte) {
  StreamBuffer stream;
  const std::vector<std::string> payloads = {"one", "", std::string(70'000, 'x'), "last"};
  for (const std::string& payload : payloads) append_frame(stream, as_bytes(payload));
  StreamBuffer in;
  std::vector<std::string> found;
  for (const std::byte byte : stream.view()) {
    in.append(ConstBytes(&byte, 1));
    const auto frame = peek_frame(in, 70'000);
    ASSERT_TRUE(frame.ok());
    if (!frame->has_value()) continue;
    found.emplace_back(as_text(**frame));
    in.consume(kFrameHeaderBytes + (*frame)->size());
  }
  EXPECT_EQ(found, payloads);
  EXPECT_TRUE(in.empty());
}

TEST(Framing, IsLittleEndian) {
  StreamBuffer stream;
  append_frame(stream, as_bytes(std::string(258, 'x')));
  EXPECT_EQ(as_text(stream.view().first(4)), std::string("\x02\x01\0\0", 4));
}

TEST(Framing, RefusesAFrameOverTheLimitFromItsHeaderAlone) {
  StreamBuffer in;
  in.append(as_bytes(std::string("\x05\0\0\0", 4)));
  EXPECT_TRUE(peek_frame(in, 5).ok());
  const auto refused = peek_frame(in, 4);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kCorruption);
}

}  // namespace
}  // namespace cadre::wire
