// The fixture of the tests of TcpLinks, with functions that send and receive bytes.
//
// Threads: one owner. Blocking: 20 s at most. For tests only.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <vector>

#include "cadre/core/os/system.h"
#include "cadre/core/transport/transport.h"

namespace cadre {

inline std::vector<std::byte> pattern(size_t size, size_t seed) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>((i * 37 + i / 241 + seed * 101) & 0xff);
  }
  return bytes;
}

struct Transfer {
  Rank peer;
  ConstBytes out;
  Bytes in;
};

// Sends and receives all bytes of the transfer, both directions at the same time.
inline Status transfer(Transport& transport, Transfer what, Deadline deadline) {
  Channel& channel = transport.channel(what.peer);
  while (!what.out.empty() || !what.in.empty()) {
    const auto sent = channel.try_send(what.out);
    if (!sent.ok()) return sent.error();
    const auto received = channel.try_recv(what.in);
    if (!received.ok()) return received.error();
    what.out = what.out.subspan(*sent);
    what.in = what.in.subspan(*received);
    if (*sent + *received > 0) continue;
    const ChannelInterest interest{what.peer, !what.out.empty(), !what.in.empty()};
    if (!interest.want_send && !interest.want_recv) continue;
    CADRE_RETURN_IF_ERROR(transport.wait(std::span(&interest, 1), deadline));
  }
  return {};
}

class TcpLinksTest : public ::testing::Test {
 protected:
  Deadline soon() { return system_->deadline_in(std::chrono::seconds(20)); }
  void send_all(Transport& transport, Rank peer, ConstBytes bytes) {
    transfer(transport, {peer, bytes, {}}, soon()).value_or_throw();
  }
  std::vector<std::byte> receive(Transport& transport, Rank peer, size_t size) {
    std::vector<std::byte> bytes(size);
    transfer(transport, {peer, {}, bytes}, soon()).value_or_throw();
    return bytes;
  }
  // Sends until the channel accepts no more bytes for 60 ms (back-pressure). Returns the number of
  // bytes that it has accepted.
  size_t send_until_full(Transport& transport, Rank peer) {
    const std::vector<std::byte> piece(1 << 20);
    size_t total = 0;
    while (true) {
      while (const size_t taken = transport.channel(peer).try_send(piece).value_or_throw()) {
        total += taken;
      }
      const ChannelInterest interest{.peer = peer, .want_send = true};
      const Deadline patience = system_->deadline_in(std::chrono::milliseconds(60));
      if (!transport.wait(std::span(&interest, 1), patience).ok()) return total;
    }
  }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
};

}  // namespace cadre
