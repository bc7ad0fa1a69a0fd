// Tests properties that only the kernel's sockets have: socket options, and descriptors in
// messages.
#include "cadre/core/os/native/native_socket.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <memory>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/socket_address.h"
#include "cadre/core/os/system.h"

namespace cadre::os {
namespace {

int option(const Socket& socket, int level, int name) {
  int value = -1;
  socklen_t size = sizeof(value);
  EXPECT_EQ(::getsockopt(socket.poll_handle(), level, name, &value, &size), 0);
  return value;
}

int64_t num_open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

class NativeSocketTest : public ::testing::Test {
 protected:
  struct Pair {
    std::unique_ptr<Socket> client;
    std::unique_ptr<Socket> server;
  };

  Deadline soon() { return system_->deadline_in(std::chrono::seconds(20)); }

  Pair connect(const Address& address) {
    const auto listener = system_->listen(address).value_or_throw();
    Pair pair{.client = system_->connect(listener->address(), soon()).value_or_throw()};
    PollItem item{.target = listener.get(), .want_read = true};
    EXPECT_TRUE(system_->poll(std::span(&item, 1), soon()));
    pair.server = listener->try_accept().value_or_throw();
    return pair;
  }
  Pair connect_unix() {
    return connect({Address::Kind::kUnix, cadre::format("cadre-fd-test-{}", ::getpid()), 0});
  }

  // Sends a message of one byte that carries these descriptors.
  static void send_descriptors(const Socket& socket, const std::vector<int>& numbers) {
    std::byte mark{0};
    iovec part{&mark, 1};
    const size_t num_bytes = numbers.size() * sizeof(int);
    std::vector<std::byte> control(CMSG_SPACE(num_bytes));
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(num_bytes);
    std::memcpy(CMSG_DATA(header), numbers.data(), num_bytes);
    ASSERT_EQ(::sendmsg(socket.poll_handle(), &message, MSG_NOSIGNAL), 1);
  }

  std::unique_ptr<System> system_ = make_native_system();
};

TEST_F(NativeSocketTest, EveryTcpSocketAsksAfterASilentPeer) {
  for (const char* host : {"127.0.0.1", "::1"}) {
    const Pair pair = connect({Address::Kind::kTcp, host, 0});
    for (const Socket* socket : {pair.client.get(), pair.server.get()}) {
      EXPECT_EQ(option(*socket, SOL_SOCKET, SO_KEEPALIVE), 1);
      const int idle = option(*socket, IPPROTO_TCP, TCP_KEEPIDLE);
      const int interval = option(*socket, IPPROTO_TCP, TCP_KEEPINTVL);
      const int count = option(*socket, IPPROTO_TCP, TCP_KEEPCNT);
      EXPECT_LE(std::chrono::seconds(idle + interval * count), kMaxPeerSilence);
      EXPECT_GE(count, 2);  // one lost packet must not mean that the peer is lost
      EXPECT_EQ(option(*socket, IPPROTO_TCP, TCP_NODELAY), 1);
    }
  }
}

// TCP_USER_TIMEOUT must be off by default: a peer that does not read may be alive, but the kernel
// counts its full buffer as silence. Only connections whose peers always read set this limit.
TEST_F(NativeSocketTest, OnlyWhoeverAsksForItLimitsTheTimeOfUnacknowledgedBytes) {
  const Pair pair = connect({Address::Kind::kTcp, "127.0.0.1", 0});
  EXPECT_EQ(option(*pair.server, IPPROTO_TCP, TCP_USER_TIMEOUT), 0);
  pair.server->limit_silence(std::chrono::seconds(6));
  EXPECT_EQ(option(*pair.server, IPPROTO_TCP, TCP_USER_TIMEOUT), 6000);
  EXPECT_LE(option(*pair.server, IPPROTO_TCP, TCP_KEEPIDLE) +
                option(*pair.server, IPPROTO_TCP, TCP_KEEPINTVL) *
                    option(*pair.server, IPPROTO_TCP, TCP_KEEPCNT),
            6);
  connect_unix().client->limit_silence(std::chrono::seconds(6));  // has no effect on a unix socket
}

// The parts must arrive in order. Parts with a small total size are copied together before they are
// sent; the total sizes here are below and above that limit.
TEST_F(NativeSocketTest, PartsArriveOneAfterTheOther) {
  const Pair pairs[] = {connect({Address::Kind::kTcp, "127.0.0.1", 0}), connect_unix()};
  for (const Pair& pair : pairs) {
    for (const size_t size : {1, 16, 257, 4096, 4112, 4159, 4160, 4161, 20'000}) {
      std::vector<std::byte> sent(size);
      for (size_t i = 0; i < size; ++i) sent[i] = static_cast<std::byte>(i * 131 + i / 256);
      const size_t header = std::min<size_t>(size, 16);
      const ConstBytes payload = ConstBytes(sent).subspan(header);
      const std::array<ConstBytes, 4> parts = {{{},
                                                ConstBytes(sent).first(header),
                                                payload.first(payload.size() / 3),
                                                payload.subspan(payload.size() / 3)}};
      ASSERT_EQ(pair.client->try_send_parts(parts).value_or_throw(), size);
      std::vector<std::byte> received(size);
      for (size_t count = 0; count < size;) {
        PollItem item{.target = pair.server.get(), .want_read = true};
        ASSERT_TRUE(system_->poll(std::span(&item, 1), soon()));
        count += pair.server->try_recv(Bytes(received).subspan(count)).value_or_throw();
      }
      EXPECT_EQ(received, sent) << size;
    }
    EXPECT_EQ(pair.client->try_send_parts(std::array<ConstBytes, 2>{}).value_or_throw(), 0u);
  }
}

TEST_F(NativeSocketTest, AConnectWithoutADescriptorNamesTheLimitOfThisProcess) {
  auto listener = system_->listen({Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
  const Address address = listener->address();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{.rlim_cur = 3, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto refused = system_->connect(address, soon());
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable);
  EXPECT_TRUE(refused.error().details().is_own_limit);
  EXPECT_NE(refused.error().message().find("3 open descriptors (RLIMIT_NOFILE)"), std::string::npos)
      << refused.error().message();
  listener.reset();
  const auto ended = system_->connect(address, soon());
  ASSERT_FALSE(ended.ok());
  EXPECT_FALSE(ended.error().details().is_own_limit) << ended.error().message();
}

TEST_F(NativeSocketTest, OfTooManyPartsTheFirstAreSent) {
  const Pair pair = connect({Address::Kind::kTcp, "127.0.0.1", 0});
  const std::vector<std::byte> small(10);
  const std::vector<std::byte> large(1 << 20);
  std::vector<ConstBytes> parts(64, ConstBytes(small));
  parts.emplace_back(large);
  EXPECT_EQ(pair.client->try_send_parts(parts).value_or_throw(), 640u);
}

TEST_F(NativeSocketTest, DescriptorsTooManyAreRefusedAndClosed) {
  const Pair pair = connect_unix();
  const Fd memory(::memfd_create("cadre", MFD_CLOEXEC));
  for (const size_t count : {size_t{2}, size_t{5}}) {
    const int64_t before = num_open_descriptors();
    send_descriptors(*pair.client, std::vector<int>(count, memory.get()));
    const auto received = pair.server->try_recv_segment();
    ASSERT_FALSE(received.ok());
    EXPECT_EQ(received.error().code(), ErrorCode::kCorruption);
    EXPECT_EQ(num_open_descriptors(), before) << count;
  }
}

TEST_F(NativeSocketTest, ADescriptorForWhichThereIsNoRoomSaysSo) {
  const Pair pair = connect_unix();
  const auto segment = system_->create_segment(4096).value_or_throw();
  ASSERT_TRUE(pair.client->try_send_segment(*segment).value_or_throw());
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none{static_cast<rlim_t>(::dup(0)), limit.rlim_max};
  ::close(static_cast<int>(none.rlim_cur));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto received = pair.server->try_recv_segment();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_FALSE(received.ok());
  EXPECT_EQ(received.error().code(), ErrorCode::kUnavailable) << received.error().message();
  EXPECT_NE(received.error().message().find("ulimit -n"), std::string::npos)
      << received.error().message();
}

}  // namespace
}  // namespace cadre::os
