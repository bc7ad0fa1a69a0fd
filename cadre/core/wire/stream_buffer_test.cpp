#include "cadre/core/wire/stream_buffer.h"

#include <gtest/gtest.h>

#include <string>

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

}  // namespace
}  // namespace cadre::wire
