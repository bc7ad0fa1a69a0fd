// Conformance tests that every implementation of os::System must pass.
//
// Include this header in one test file of the implementation, with INSTANTIATE_TEST_SUITE_P over a
// SystemWorld. The bodies of the tests run inside SystemWorld::run, because the simulator must know
// their threads.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/interrupt.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {

struct SystemWorld {
  std::string name;
  std::function<void(const std::function<void(os::System&)>& body)> run;
};

class SystemConformance : public ::testing::TestWithParam<SystemWorld> {
 protected:
  static constexpr Duration kLong = std::chrono::seconds(20);
  static constexpr Duration kShort = std::chrono::milliseconds(5);

  struct Pair {
    std::unique_ptr<os::Listener> listener;
    std::unique_ptr<os::Socket> client;
    std::unique_ptr<os::Socket> server;
  };

  void run(const std::function<void(os::System&)>& body) { GetParam().run(body); }

  static bool wait_readable(os::System& system, os::Pollable& target, Duration budget = kLong) {
    os::PollItem item{&target, true};
    return system.poll(std::span(&item, 1), system.deadline_in(budget)) && item.can_read;
  }
  static bool wait_writable(os::System& system, os::Pollable& target, Duration budget = kLong) {
    os::PollItem item{&target, false, true};
    return system.poll(std::span(&item, 1), system.deadline_in(budget)) && item.can_write;
  }

  static Pair connect_pair(os::System& system, const os::Address& address) {
    Pair pair;
    pair.listener = system.listen(address).value_or_throw();
    pair.client =
        system.connect(pair.listener->address(), system.deadline_in(kLong)).value_or_throw();
    while (!pair.server) {
      require(wait_readable(system, *pair.listener), "no connection arrived");
      pair.server = pair.listener->try_accept().value_or_throw();
    }
    return pair;
  }

  static os::Address tcp(const std::string& host = "127.0.0.1") {
    return {os::Address::Kind::kTcp, host, 0};
  }
  // Returns one address of each kind: TCP over IPv4, over IPv6 and by name, and a unix socket.
  static std::vector<os::Address> addresses(os::System& system) {
    return {tcp(), tcp("::1"), tcp("localhost"), make_rendezvous_address(system)};
  }

  static std::vector<std::byte> pattern(size_t size) {
    std::vector<std::byte> bytes(size);
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 131 + i / 256);
    return bytes;
  }
  static void send_all(os::System& system, os::Socket& socket, ConstBytes data) {
    while (!data.empty()) {
      const size_t sent = socket.try_send(data).value_or_throw();
      data = data.subspan(sent);
      if (sent == 0) require(wait_writable(system, socket), "never writable");
    }
  }
  static void recv_all(os::System& system, os::Socket& socket, Bytes buffer) {
    while (!buffer.empty()) {
      const size_t got = socket.try_recv(buffer).value_or_throw();
      buffer = buffer.subspan(got);
      if (got == 0) require(wait_readable(system, socket), "never readable");
    }
  }
  // Reads until the connection fails, and returns the error.
  static Error end_of(os::System& system, os::Socket& socket) {
    std::array<std::byte, 256> buffer{};
    for (;;) {
      const Result<size_t> got = socket.try_recv(buffer);
      if (!got.ok()) return got.error();
      if (*got == 0) require(wait_readable(system, socket), "the stream never ended");
    }
  }
};

TEST_P(SystemConformance, ClockNeverGoesBack) {
  run([](os::System& system) {
    TimePoint last = system.now();
    for (int i = 0; i < 100; ++i) {
      system.yield();
      const TimePoint now = system.now();
      EXPECT_GE(now, last);
      last = now;
    }
    EXPECT_TRUE(system.deadline_in(Duration::zero()).has_passed(system.now()));
    EXPECT_FALSE(system.deadline_in(kLong).has_passed(system.now()));
  });
}

TEST_P(SystemConformance, HostNamesItself) {
  run([](os::System& system) {
    const os::HostInfo host = system.host();
    EXPECT_NE(host.name, "");
    EXPECT_NE(host.boot_id, "");
    EXPECT_GT(host.pid, 0);
    EXPECT_GE(host.num_cores, 1);
  });
}

TEST_P(SystemConformance, ThreadsRunAndAreJoined) {
  run([](os::System& system) {
    int sum = 0;
    std::vector<std::unique_ptr<os::Thread>> threads;
    for (int i = 1; i <= 3; ++i) {
      threads.push_back(system.spawn(cadre::format("adder{}", i), [&system, &sum, i] {
        system.yield();
        static_cast<void>(std::atomic_ref<int>(sum).fetch_add(i));
      }));
    }
    for (const auto& thread : threads) thread->join();
    EXPECT_EQ(sum, 6);
  });
}

TEST_P(SystemConformance, ParkEndsAtTheDeadlineAndNotBefore) {
  run([](os::System& system) {
    const auto waiter = system.make_waiter();
    const Deadline deadline = system.deadline_in(kShort);
    EXPECT_FALSE(waiter->park(deadline));
    EXPECT_TRUE(deadline.has_passed(system.now()));
  });
}

TEST_P(SystemConformance, UnparkIsRememberedOnce) {
  run([](os::System& system) {
    const auto waiter = system.make_waiter();
    waiter->unpark();
    waiter->unpark();
    EXPECT_TRUE(waiter->park(system.deadline_in(kLong)));
    EXPECT_FALSE(waiter->park(system.deadline_in(kShort)));
  });
}

TEST_P(SystemConformance, UnparkWakesAnotherThread) {
  run([](os::System& system) {
    const auto ping = system.make_waiter();
    const auto pong = system.make_waiter();
    constexpr int kRounds = 200;
    const auto thread = system.spawn("ponger", [&] {
      for (int i = 0; i < kRounds; ++i) {
        EXPECT_TRUE(ping->park(system.deadline_in(kLong)));
        pong->unpark();
      }
    });
    for (int i = 0; i < kRounds; ++i) {
      ping->unpark();
      EXPECT_TRUE(pong->park(system.deadline_in(kLong)));
    }
    thread->join();
  });
}

TEST_P(SystemConformance, WaitOnAWordEndsAtOnceWhenItDiffers) {
  run([](os::System& system) {
    os::WaitWord word;
    word.value = 7;
    EXPECT_TRUE(system.wait_while(word, 6, system.deadline_in(Duration::zero())));
    EXPECT_FALSE(system.wait_while(word, 7, system.deadline_in(Duration::zero())));
  });
}

TEST_P(SystemConformance, WaitOnAWordEndsAtTheDeadline) {
  run([](os::System& system) {
    os::WaitWord word;
    const Deadline deadline = system.deadline_in(kShort);
    while (system.wait_while(word, 0, deadline)) EXPECT_FALSE(deadline.has_passed(system.now()));
    EXPECT_TRUE(deadline.has_passed(system.now()));
  });
}

// wait_while() must return from time to time even if no thread changes the word, so that the caller
// can check its abort flag.
TEST_P(SystemConformance, WaitOnAWordNaps) {
  run([](os::System& system) {
    os::WaitWord word;
    EXPECT_TRUE(system.wait_while(word, 0, system.deadline_in(kLong)));
    EXPECT_EQ(word.sleepers.load(), 0u);
  });
}

TEST_P(SystemConformance, PublishLosesNoWakeUp) {
  run([](os::System& system) {
    os::WaitWord ping;
    os::WaitWord pong;
    constexpr uint32_t kRounds = 500;
    const auto wait_for = [&system](os::WaitWord& word, uint32_t value) {
      const Deadline deadline = system.deadline_in(kLong);
      while (word.value.load(std::memory_order_acquire) != value) {
        require(system.wait_while(word, value - 1, deadline), "the word never changed");
      }
    };
    const auto thread = system.spawn("ponger", [&] {
      for (uint32_t i = 1; i <= kRounds; ++i) {
        wait_for(ping, i);
        system.publish(pong, i);
      }
    });
    for (uint32_t i = 1; i <= kRounds; ++i) {
      system.publish(ping, i);
      wait_for(pong, i);
    }
    thread->join();
    EXPECT_EQ(pong.value.load(), kRounds);
  });
}

TEST_P(SystemConformance, EventsAreReadableUntilCleared) {
  run([](os::System& system) {
    const auto event = system.make_event();
    EXPECT_FALSE(wait_readable(system, *event, kShort));
    event->notify();
    event->notify();
    EXPECT_TRUE(wait_readable(system, *event));
    EXPECT_TRUE(wait_readable(system, *event));
    event->clear();
    EXPECT_FALSE(wait_readable(system, *event, kShort));
    const auto thread = system.spawn("notifier", [&] { event->notify(); });
    EXPECT_TRUE(wait_readable(system, *event));
    thread->join();
  });
}

TEST_P(SystemConformance, InterruptEndsAPoll) {
  run([](os::System& system) {
    os::Interrupt interrupt;
    EXPECT_FALSE(interrupt.is_raised());
    const auto event = system.make_event();
    const os::Interrupt::Registration registration(interrupt, *event);
    const auto thread = system.spawn("raiser", [&] { interrupt.raise(); });
    EXPECT_TRUE(wait_readable(system, *event));
    thread->join();
    EXPECT_TRUE(interrupt.is_raised());
  });
}

TEST_P(SystemConformance, PollPassesOverItemsThatWantNothing) {
  run([](os::System& system) {
    const auto set = system.make_event();
    const auto other = system.make_event();
    set->notify();
    std::array items = {os::PollItem{set.get()}, os::PollItem{other.get(), true}};
    EXPECT_FALSE(system.poll(items, system.deadline_in(kShort)));
    items[0].want_read = true;
    EXPECT_TRUE(system.poll(items, system.deadline_in(kLong)));
    EXPECT_TRUE(items[0].can_read);
    EXPECT_FALSE(items[1].can_read);
    EXPECT_FALSE(system.poll({}, system.deadline_in(kShort)));
  });
}

TEST_P(SystemConformance, StreamsCarryBytesInOrderBothWays) {
  run([](os::System& system) {
    for (const os::Address& address : addresses(system)) {
      SCOPED_TRACE(address.to_string());
      const Pair pair = connect_pair(system, address);
      const std::vector<std::byte> sent = pattern(300'000);
      std::vector<std::byte> there(sent.size());
      std::vector<std::byte> back(sent.size());
      const auto thread = system.spawn("echo", [&] {
        recv_all(system, *pair.server, there);
        send_all(system, *pair.server, there);
      });
      send_all(system, *pair.client, sent);
      recv_all(system, *pair.client, back);
      thread->join();
      EXPECT_EQ(there, sent);
      EXPECT_EQ(back, sent);
    }
  });
}

TEST_P(SystemConformance, AddressesNameBothEnds) {
  run([](os::System& system) {
    for (const os::Address& address : addresses(system)) {
      SCOPED_TRACE(address.to_string());
      const Pair pair = connect_pair(system, address);
      EXPECT_EQ(pair.client->peer_address().kind, address.kind);
      EXPECT_EQ(pair.client->peer_address().port, pair.listener->address().port);
      EXPECT_EQ(pair.client->local_address(), pair.server->peer_address());
      EXPECT_EQ(pair.client->peer_address(), pair.server->local_address());
      if (address.kind == os::Address::Kind::kTcp) {
        EXPECT_NE(pair.listener->address().port, 0);
      }
    }
  });
}

TEST_P(SystemConformance, NothingThereIsNoError) {
  run([](os::System& system) {
    for (const os::Address& address : addresses(system)) {
      SCOPED_TRACE(address.to_string());
      const Pair pair = connect_pair(system, address);
      std::array<std::byte, 8> buffer{};
      EXPECT_EQ(pair.server->try_recv(buffer).value_or_throw(), 0u);
      EXPECT_EQ(pair.listener->try_accept().value_or_throw(), nullptr);
      EXPECT_FALSE(wait_readable(system, *pair.server, kShort));
      EXPECT_TRUE(wait_writable(system, *pair.server));
    }
  });
}

TEST_P(SystemConformance, AFullStreamTakesNothingUntilItIsRead) {
  run([](os::System& system) {
    for (const os::Address& address : addresses(system)) {
      SCOPED_TRACE(address.to_string());
      const Pair pair = connect_pair(system, address);
      const std::vector<std::byte> block = pattern(64 << 10);
      size_t total = 0;
      // The kernel may deliver bytes to the other end between two sends, so that the stream accepts
      // more bytes.
      size_t sent = 0;
      do {
        sent = pair.client->try_send(block).value_or_throw();
        total += sent;
        ASSERT_LT(total, size_t{1} << 30);
      } while (sent > 0 || wait_writable(system, *pair.client, kShort));
      EXPECT_GT(total, 0u);
      std::vector<std::byte> drained(total);
      recv_all(system, *pair.server, drained);
      EXPECT_TRUE(wait_writable(system, *pair.client));
    }
  });
}

TEST_P(SystemConformance, TheEndOfAStreamFollowsItsBytes) {
  run([](os::System& system) {
    for (const os::Address& address : addresses(system)) {
      SCOPED_TRACE(address.to_string());
      Pair pair = connect_pair(system, address);
      const std::vector<std::byte> sent = pattern(1000);
      send_all(system, *pair.client, sent);
      pair.client.reset();
      std::vector<std::byte> received(sent.size());
      recv_all(system, *pair.server, received);
      EXPECT_EQ(received, sent);
      const Error end = end_of(system, *pair.server);
      EXPECT_EQ(end.code(), ErrorCode::kPeerLost);
      EXPECT_NE(end.message().find("ended by the other end"), std::string::npos) << end.message();
    }
  });
}

TEST_P(SystemConformance, SendingToAnEndedPeerFails) {
  run([](os::System& system) {
    for (const os::Address& address : addresses(system)) {
      SCOPED_TRACE(address.to_string());
      Pair pair = connect_pair(system, address);
      pair.server.reset();
      const std::vector<std::byte> block = pattern(64 << 10);
      Result<size_t> sent = size_t{0};
      while (sent.ok()) {
        ASSERT_TRUE(wait_writable(system, *pair.client));
        sent = pair.client->try_send(block);
      }
      EXPECT_EQ(sent.error().code(), ErrorCode::kPeerLost);
    }
  });
}

TEST_P(SystemConformance, ShutdownWakesAPollAndEndsBothWays) {
  run([](os::System& system) {
    for (const os::Address& address : addresses(system)) {
      SCOPED_TRACE(address.to_string());
      const Pair pair = connect_pair(system, address);
      const auto thread = system.spawn("closer", [&] { pair.client->shutdown(); });
      EXPECT_TRUE(wait_readable(system, *pair.client));
      EXPECT_EQ(end_of(system, *pair.server).code(), ErrorCode::kPeerLost);
      thread->join();
      const Error end = end_of(system, *pair.client);
      EXPECT_EQ(end.code(), ErrorCode::kPeerLost);
      EXPECT_NE(end.message().find("ended by this end"), std::string::npos) << end.message();
      EXPECT_EQ(pair.client->try_send(pattern(1)).error().code(), ErrorCode::kPeerLost);
    }
  });
}

TEST_P(SystemConformance, NobodyListeningIsUnavailable) {
  run([](os::System& system) {
    for (const os::Address& address : addresses(system)) {
      SCOPED_TRACE(address.to_string());
      auto listener = system.listen(address).value_or_throw();
      const os::Address gone = listener->address();
      listener.reset();
      const auto refused = system.connect(gone, system.deadline_in(kLong));
      ASSERT_FALSE(refused.ok());
      EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable) << refused.error().message();
      // The address can be used again, because its listener was destroyed.
      EXPECT_TRUE(system.listen(gone).ok());
    }
  });
}

TEST_P(SystemConformance, AnAddressInUseIsUnavailable) {
  run([](os::System& system) {
    for (const os::Address& address : addresses(system)) {
      SCOPED_TRACE(address.to_string());
      const auto listener = system.listen(address).value_or_throw();
      const auto second = system.listen(listener->address());
      ASSERT_FALSE(second.ok());
      EXPECT_EQ(second.error().code(), ErrorCode::kUnavailable) << second.error().message();
    }
  });
}

TEST_P(SystemConformance, UnknownHostsAreUnavailable) {
  run([](os::System& system) {
    const auto result = system.connect({os::Address::Kind::kTcp, "no-such-host.invalid", 1},
                                       system.deadline_in(kLong));
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.error().code(), ErrorCode::kUnavailable) << result.error().message();
  });
}

TEST_P(SystemConformance, SegmentsAreZeroedAndPageAligned) {
  run([](os::System& system) {
    const auto segment = system.create_segment(100'000).value_or_throw();
    EXPECT_EQ(segment->bytes().size(), 100'000u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(segment->bytes().data()) % 4096, 0u);
    EXPECT_TRUE(std::all_of(segment->bytes().begin(), segment->bytes().end(),
                            [](std::byte b) { return b == std::byte{0}; }));
    EXPECT_EQ(system.create_segment(0).error().code(), ErrorCode::kInvalidArgument);
  });
}

TEST_P(SystemConformance, SegmentsPassOverUnixSocketsAndShareOneMapping) {
  run([](os::System& system) {
    const Pair pair = connect_pair(system, make_rendezvous_address(system));
    auto sent = system.create_segment(8192).value_or_throw();
    sent->bytes()[4000] = std::byte{42};
    EXPECT_EQ(pair.server->try_recv_segment().value_or_throw(), nullptr);
    // The order of bytes and segments is kept: three bytes, the segment, then five bytes.
    send_all(system, *pair.client, pattern(3));
    EXPECT_TRUE(pair.client->try_send_segment(*sent).value_or_throw());
    send_all(system, *pair.client, pattern(5));
    std::array<std::byte, 5> around{};
    recv_all(system, *pair.server, Bytes(around).first(3));
    ASSERT_TRUE(wait_readable(system, *pair.server));
    const auto received = pair.server->try_recv_segment().value_or_throw();
    ASSERT_NE(received, nullptr);
    recv_all(system, *pair.server, around);
    const std::byte* start = sent->bytes().data();
    EXPECT_EQ(received->bytes().data(), start);
    EXPECT_EQ(received->bytes().size(), 8192u);
    sent.reset();
    EXPECT_EQ(received->bytes()[4000], std::byte{42});
  });
}

TEST_P(SystemConformance, AMissingSegmentIsCorruption) {
  run([](os::System& system) {
    const Pair pair = connect_pair(system, make_rendezvous_address(system));
    send_all(system, *pair.client, pattern(1));
    ASSERT_TRUE(wait_readable(system, *pair.server));
    EXPECT_EQ(pair.server->try_recv_segment().error().code(), ErrorCode::kCorruption);
  });
}

TEST_P(SystemConformance, SegmentsDoNotPassOverTcp) {
  run([](os::System& system) {
    const Pair pair = connect_pair(system, tcp());
    const auto segment = system.create_segment(1).value_or_throw();
    EXPECT_EQ(pair.client->try_send_segment(*segment).error().code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(pair.server->try_recv_segment().error().code(), ErrorCode::kInvalidArgument);
  });
}

TEST_P(SystemConformance, RandomBytesDiffer) {
  run([](os::System& system) {
    std::array<std::byte, 32> first{};
    std::array<std::byte, 32> second{};
    system.random_bytes(first);
    system.random_bytes(second);
    EXPECT_NE(first, second);
  });
}

}  // namespace cadre::testing
