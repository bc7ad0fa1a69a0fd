#include "cadre/launch/cli/doctor/peer_measurement.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/host/clock_status.h"

namespace cadre::cli {
namespace {

constexpr int kPingTag = 1;
constexpr int kStreamTag = 2;
constexpr int kResultTag = 3;

constexpr size_t kMaxWarmUpPings = 10;
constexpr size_t kMinPings = 4;
constexpr size_t kMaxPings = 4000;
constexpr Duration kPingTime = std::chrono::milliseconds(300);

constexpr uint64_t kFirstStreamBytes = 64 << 10;
constexpr uint64_t kMaxChunkBytes = 1 << 20;
constexpr uint64_t kMaxStreamBytes = uint64_t{4} << 30;
constexpr size_t kMaxMessages = 8;  // that are in flight
// A stream takes at least this long, unless it has kMaxStreamBytes.
constexpr double kStreamSeconds = 0.3;

double seconds_of(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

class PairMeter {
 public:
  PairMeter(Communicator& pair, Deadline deadline)
      : pair_(pair), peer_(1 - pair.rank()), options_{.deadline = deadline} {}

  void lead(PeerMeasurement& result) {
    lead_pings(result);
    result.sent_bytes_per_s = lead_streams();
    send(kStreamTag, StreamHeader{});  // no further stream
  }

  void follow() {
    Ping ping{.has_more = 1};
    while (ping.has_more != 0) {
      ping = receive<Ping>(kPingTag);
      send(kPingTag, Ping{.has_more = ping.has_more, .wall_ns = os::read_clocks().wall_ns});
    }
    while (true) {
      const auto header = receive<StreamHeader>(kStreamTag);
      if (header.num_bytes == 0) return;
      check(header);
      transfer(header, OpKind::kRecv);
      send(kStreamTag, header);
    }
  }

  // Each rank sends the other one the bandwidth that it has measured.
  void exchange(PeerMeasurement& result) {
    if (pair_.rank() == 0) send(kResultTag, result.sent_bytes_per_s);
    result.received_bytes_per_s = receive<double>(kResultTag);
    if (pair_.rank() != 0) send(kResultTag, result.sent_bytes_per_s);
  }

 private:
  struct Ping {
    int64_t has_more = 0;
    int64_t wall_ns = 0;
  };
  // A stream of messages of chunk_bytes each, of which the last may be shorter.
  struct StreamHeader {
    uint64_t num_bytes = 0;
    uint64_t chunk_bytes = 0;
  };

  template <typename T>
  void send(int tag, const T& value) {
    pair_.send(std::as_bytes(std::span(&value, 1)), DType::kUint8, peer_, tag, options_);
  }
  template <typename T>
  T receive(int tag) {
    T value{};
    pair_.recv(std::as_writable_bytes(std::span(&value, 1)), DType::kUint8, peer_, tag, options_);
    return value;
  }

  void lead_pings(PeerMeasurement& result) {
    os::System& system = pair_.system();
    std::vector<Duration> times;
    Duration fastest = Duration::max();
    const Deadline end = system.deadline_in(kPingTime);
    for (bool is_last = false; !is_last;) {
      is_last = times.size() + 1 == kMaxPings ||
                (times.size() + 1 >= kMinPings && end.has_passed(system.now()));
      const os::ClockReading begin = os::read_clocks();
      send(kPingTag, Ping{.has_more = is_last ? 0 : 1, .wall_ns = begin.wall_ns});
      const auto answer = receive<Ping>(kPingTag);
      const Duration time = system.now() - begin.monotonic;
      times.push_back(time);
      if (time < fastest) {
        fastest = time;
        const int64_t middle_ns = begin.wall_ns + time.count() / 2;
        result.wall_clock_offset_ms = static_cast<double>(answer.wall_ns - middle_ns) / 1e6;
      }
    }
    const size_t num_warm_up = std::min(kMaxWarmUpPings, times.size() / 2);
    times.erase(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(num_warm_up));
    std::ranges::sort(times);
    result.round_trip_us_median = seconds_of(times[times.size() / 2]) * 1e6;
    result.round_trip_us_p99 = seconds_of(times[times.size() * 99 / 100]) * 1e6;
  }

  // Returns the rate of the first stream that takes kStreamSeconds. A stream has at most four times
  // the bytes of the one before, because a rate limiter lets the first bytes pass at full speed. A
  // stream that took longer is repeated, in case a pause of a busy host was measured.
  double lead_streams() {
    constexpr double kMargin = 1.5;
    constexpr double kTooLongToRepeat = 2;
    uint64_t num_bytes = kFirstStreamBytes;
    while (true) {
      double seconds = lead_stream(num_bytes);
      if (seconds >= kStreamSeconds && seconds < kTooLongToRepeat) {
        seconds = std::min(seconds, lead_stream(num_bytes));
      }
      if (seconds >= kStreamSeconds || num_bytes == kMaxStreamBytes) {
        return static_cast<double>(num_bytes) / seconds;
      }
      const double growth = std::min(4.0, kMargin * kStreamSeconds / seconds);
      num_bytes =
          std::min(static_cast<uint64_t>(growth * static_cast<double>(num_bytes)), kMaxStreamBytes);
    }
  }

  // Sends the bytes and waits for the peer's answer; returns the seconds.
  double lead_stream(uint64_t num_bytes) {
    const StreamHeader header{.num_bytes = num_bytes,
                              .chunk_bytes = std::min(num_bytes, kMaxChunkBytes)};
    const TimePoint begin = pair_.system().now();
    send(kStreamTag, header);
    transfer(header, OpKind::kSend);
    receive<StreamHeader>(kStreamTag);
    return seconds_of(std::max(pair_.system().now() - begin, Duration(1)));
  }

  // The peer has proved that it has the token, but may run another program.
  static void check(const StreamHeader& header) {
    if (header.num_bytes <= kMaxStreamBytes && header.chunk_bytes >= 1 &&
        header.chunk_bytes <= kMaxChunkBytes) {
      return;
    }
    throw Error(
        ErrorCode::kCorruption,
        cadre::format("the peer announces {} bytes in messages of {}; expected at most {} "
                      "in messages of 1 to {}: run cadre doctor of one build on both hosts",
                      header.num_bytes, header.chunk_bytes, kMaxStreamBytes, kMaxChunkBytes));
  }

  void transfer(const StreamHeader& header, OpKind kind) {
    CollectiveOptions options = options_;
    options.keep_alive = buffer_;
    uint64_t rest = header.num_bytes;
    while (rest > 0) {
      std::vector<MessageCall> calls;
      for (size_t i = 0; i < kMaxMessages && rest > 0; ++i) {
        const uint64_t size = std::min(rest, header.chunk_bytes);
        const Bytes piece = Bytes(*buffer_).subspan(i * kMaxChunkBytes, size);
        calls.push_back(kind == OpKind::kSend
                            ? MessageCall::send(piece, DType::kUint8, peer_, kStreamTag)
                            : MessageCall::recv(piece, DType::kUint8, peer_, kStreamTag));
        rest -= size;
      }
      for (Work& work : pair_.issue(calls, options)) work.wait(*options_.deadline);
    }
  }

  Communicator& pair_;
  const Rank peer_;
  const CollectiveOptions options_;
  // Shared with messages that are pending when another one has failed.
  const std::shared_ptr<std::vector<std::byte>> buffer_ =
      std::make_shared<std::vector<std::byte>>(kMaxMessages * kMaxChunkBytes);
};

}  // namespace

PeerMeasurement measure_peer(Communicator& pair, Deadline deadline) {
  PeerMeasurement result;
  PairMeter meter(pair, deadline);
  for (int leader = 0; leader < 2; ++leader) {
    if (pair.rank() == leader) {
      meter.lead(result);
    } else {
      meter.follow();
    }
  }
  meter.exchange(result);
  return result;
}

}  // namespace cadre::cli
