// Measures limits of this machine, with which reports compare their figures, and prints them as one
// line of JSON.
//
//   machine_limits [core]      (with `core` it measures only core_us, in a few milliseconds)
//
// core_us       the time until a flag that one core writes is seen by another core: half a round
//               trip
// copy_gb_s     the bytes that all cores together copy per second (each byte is read and written),
//               for blocks of several sizes
// tcp_us        the time of an 8-byte message one way through TCP over loopback
// tcp_gb_s      the bytes per second of one TCP connection over loopback
// Each thread is pinned to one core. Source: the usual ping-pong and STREAM's copy kernel.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Microseconds = std::chrono::duration<double, std::micro>;

constexpr std::array<size_t, 4> kCopySizes{64 << 10, 1 << 20, 4 << 20, 64 << 20};
constexpr int kRounds = 5;

void pin_to(unsigned core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  pthread_setaffinity_np(pthread_self(), sizeof(cores), &cores);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Sends a flag back and forth between cores 0 and 1; returns half a round trip in microseconds.
// Returns 0 on a machine with one core.
double core_us() {
  if (std::thread::hardware_concurrency() < 2) return 0;
  constexpr uint64_t kTurns = 20'000;
  struct alignas(64) Flag {
    std::atomic<uint64_t> value{0};
  };
  Flag ping;
  Flag pong;
  std::thread other([&] {
    pin_to(1);
    for (uint64_t turn = 1; turn <= kTurns; ++turn) {
      while (ping.value.load(std::memory_order_acquire) != turn) {
      }
      pong.value.store(turn, std::memory_order_release);
    }
  });
  pin_to(0);
  const auto start = Clock::now();
  for (uint64_t turn = 1; turn <= kTurns; ++turn) {
    ping.value.store(turn, std::memory_order_release);
    while (pong.value.load(std::memory_order_acquire) != turn) {
    }
  }
  const Microseconds spent = Clock::now() - start;
  other.join();
  return spent.count() / (2.0 * kTurns);
}

// Copies on all cores at once, with one thread on each; returns the bytes per second of all, in
// GB/s.
double copy_gb_s(size_t num_bytes) {
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  const size_t repeats = std::max<size_t>(4, (256 << 20) / num_bytes);
  std::vector<double> rates;
  std::barrier together(cores + 1);
  std::vector<std::thread> threads;
  for (unsigned core = 0; core < cores; ++core) {
    threads.emplace_back([&, core] {
      pin_to(core);
      std::vector<char> from(num_bytes, 1);
      std::vector<char> to(num_bytes, 2);
      for (int round = 0; round < kRounds; ++round) {
        together.arrive_and_wait();
        for (size_t i = 0; i < repeats; ++i) {
          std::memcpy(to.data(), from.data(), num_bytes);
          asm volatile("" : : "r"(to.data()) : "memory");
        }
        together.arrive_and_wait();
      }
    });
  }
  for (int round = 0; round < kRounds; ++round) {
    together.arrive_and_wait();
    const auto start = Clock::now();
    together.arrive_and_wait();
    const std::chrono::duration<double> spent = Clock::now() - start;
    rates.push_back(static_cast<double>(num_bytes * repeats * cores) / spent.count() / 1e9);
  }
  for (auto& thread : threads) thread.join();
  return median(rates);
}

void must(bool done, const char* what) {
  if (!done) throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

void send_all(int socket, const std::vector<char>& data) {
  for (size_t sent = 0; sent < data.size();) {
    const ssize_t now = ::send(socket, data.data() + sent, data.size() - sent, 0);
    must(now > 0, "send");
    sent += static_cast<size_t>(now);
  }
}

void receive_all(int socket, std::vector<char>& data) {
  for (size_t received = 0; received < data.size();) {
    const ssize_t now = ::recv(socket, data.data() + received, data.size() - received, 0);
    must(now > 0, "recv");
    received += static_cast<size_t>(now);
  }
}

struct TcpPair {
  int client = -1;
  int server = -1;
};

TcpPair connect_over_loopback() {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* where = reinterpret_cast<sockaddr*>(&address);
  must(listener >= 0 && ::bind(listener, where, length) == 0 && ::listen(listener, 1) == 0 &&
           ::getsockname(listener, where, &length) == 0,
       "listen on loopback");
  TcpPair pair;
  pair.client = ::socket(AF_INET, SOCK_STREAM, 0);
  must(pair.client >= 0 && ::connect(pair.client, where, length) == 0, "connect over loopback");
  pair.server = ::accept(listener, nullptr, nullptr);
  must(pair.server >= 0, "accept");
  ::close(listener);
  const int on = 1;
  for (const int end : {pair.client, pair.server}) {
    ::setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  return pair;
}

struct TcpFigures {
  double one_way_us = 0;
  double gb_s = 0;
};

TcpFigures tcp_figures() {
  constexpr int kTurns = 2'000;
  constexpr int kBlocks = 8;
  const TcpPair pair = connect_over_loopback();
  std::vector<char> block(64 << 20, 1);
  std::thread other([&] {
    pin_to(std::thread::hardware_concurrency() > 1 ? 1 : 0);
    std::vector<char> word(8);
    for (int turn = 0; turn < kTurns; ++turn) {
      receive_all(pair.server, word);
      send_all(pair.server, word);
    }
    std::vector<char> in(block.size());
    for (int i = 0; i < kBlocks; ++i) receive_all(pair.server, in);
    send_all(pair.server, word);
  });
  pin_to(0);
  std::vector<char> word(8);
  TcpFigures figures;
  auto start = Clock::now();
  for (int turn = 0; turn < kTurns; ++turn) {
    send_all(pair.client, word);
    receive_all(pair.client, word);
  }
  figures.one_way_us = Microseconds(Clock::now() - start).count() / (2.0 * kTurns);
  start = Clock::now();
  for (int i = 0; i < kBlocks; ++i) send_all(pair.client, block);
  receive_all(pair.client, word);
  const std::chrono::duration<double> spent = Clock::now() - start;
  figures.gb_s = static_cast<double>(block.size()) * kBlocks / spent.count() / 1e9;
  other.join();
  ::close(pair.client);
  ::close(pair.server);
  return figures;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::printf("{\"core_us\": %.3f", core_us());
    if (argc < 2 || std::string_view(argv[1]) != "core") {
      std::printf(", \"copy_gb_s\": {");
      const char* separator = "";
      for (const size_t size : kCopySizes) {
        std::printf("%s\"%zu\": %.2f", separator, size, copy_gb_s(size));
        separator = ", ";
      }
      const TcpFigures tcp = tcp_figures();
      std::printf("}, \"tcp_us\": %.2f, \"tcp_gb_s\": %.2f", tcp.one_way_us, tcp.gb_s);
    }
    std::printf("}\n");
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "machine_limits: %s\n", error.what());
    return 1;
  }
}
