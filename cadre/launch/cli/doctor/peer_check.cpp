#include "cadre/launch/cli/doctor/peer_check.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/io/interfaces.h"
#include "cadre/core/rendezvous/tcp_rendezvous.h"
#include "cadre/core/store/tcp/tcp_store_server.h"

namespace cadre::cli {
namespace {

using State = FindingState;

constexpr int kNumPeers = 2;
constexpr Duration kProbeTime = std::chrono::seconds(1);
constexpr Duration kBackTime = std::chrono::seconds(8);
constexpr Duration kCloseTime = std::chrono::seconds(2);

// The words for the direction in which a connection is opened.
std::string_view direction_text(bool is_from_this_host) {
  return is_from_this_host ? "from this host to the peer" : "from the peer to this host";
}

class PeerCheck {
 public:
  PeerCheck(os::System& system, const PeerOptions& options) : system_(system), options_(options) {}

  std::vector<Finding> run() {
    if (options_.listens) {
      if (const Status listening = listen(); !listening.ok())
        return {cannot_listen(listening.error())};
    }
    PeerReport report{.listens = options_.listens};
    const auto failure = meet(report);
    if (!failure) report.back_failure = connect_back();
    if (failure || !report.back_failure.empty()) linger();
    return failure ? std::vector<Finding>{*failure} : judge_peer(report);
  }

 private:
  Status listen() {
    auto server = TcpStoreServer::start(system_, {.address = options_.address,
                                                  .token = options_.token,
                                                  .serve_c10d = false,
                                                  .log = options_.log});
    if (!server.ok()) return server.error();
    server_ = *std::move(server);
    address_ = server_->address();
    if (options_.on_listening) options_.on_listening(address_);
    return {};
  }

  // Returns this process's place in the pair of a round. The listener is rank 0 in the first round
  // and rank 1 in the second one, so that each end opens connections to the other in one of them.
  Result<Membership> join(uint64_t round, Deadline deadline) {
    const bool is_first = options_.listens == (round == 0);
    return TcpRendezvous(system_, {.address = options_.listens ? address_ : options_.address,
                                   .rank = is_first ? 0 : 1,
                                   .world_size = kNumPeers,
                                   .job_token = options_.token,
                                   .may_host_store = false,
                                   .round = kFirstDoctorRound + round})
        .join(deadline);
  }

  std::unique_ptr<Communicator> connect(const Membership& membership, Deadline deadline) {
    return Communicator::connect(
        system_, membership,
        {.name = "doctor", .timeout = options_.measure_limit, .transport = TransportChoice::kTcp},
        deadline);
  }

  // Connects the pair of the first round, and measures. Returns why that has failed.
  std::optional<Finding> meet(PeerReport& report) {
    const auto membership = join(0, system_.deadline_in(options_.patience));
    if (!membership.ok()) return no_peer(membership.error());
    has_met_ = true;
    std::unique_ptr<Communicator> pair;
    try {
      pair = connect(*membership, system_.deadline_in(options_.connect_limit));
    } catch (const Error& error) {
      return not_connected(error);
    }
    report.own_address = membership->listen_hosts.front();
    report.is_same_host = pair->hosts().front() == pair->hosts().back();
    for (const PeerStatus& peer : pair->peers()) {
      if (peer.rank != pair->rank()) report.peer_host = peer.host;
    }
    describe_interface(report);
    try {
      report.measured = measure_peer(*pair, system_.deadline_in(options_.measure_limit));
      pair->close(system_.deadline_in(kCloseTime));
    } catch (const Error& error) {
      return broken(error);
    }
    return std::nullopt;
  }

  // Connects the pair of the second round. Returns why that has failed.
  std::string connect_back() {
    const Deadline deadline = system_.deadline_in(kBackTime);
    const auto membership = join(1, deadline);
    if (!membership.ok()) return membership.error().message();
    try {
      const auto pair = connect(*membership, deadline);
      pair->barrier({.deadline = deadline});
      pair->close(system_.deadline_in(kCloseTime));
    } catch (const Error& error) {
      return error.message();
    }
    return "";
  }

  // The peer reads from this host's store why the connection has failed, if it is still waiting.
  void linger() {
    constexpr Duration kLingerTime = std::chrono::seconds(3);
    if (server_ && has_met_) system_.make_waiter()->park(system_.deadline_in(kLingerTime));
  }

  static void describe_interface(PeerReport& report) {
    for (const os::InterfaceAddress& own : os::interface_addresses()) {
      if (own.host == report.own_address) report.interface = own.interface;
    }
    const std::string folder = cadre::format("/sys/class/net/{}", report.interface);
    // Virtual interfaces, such as those of containers, report a speed that means nothing.
    std::error_code failure;
    if (!std::filesystem::exists(folder + "/device", failure)) return;
    // The file has the speed in Mbit/s, or -1 if it is unknown.
    constexpr double kBytesPerMegabit = 1e6 / 8;
    const auto text = os::read_file(folder + "/speed", 64);
    int megabits = 0;
    if (!text.ok()) return;
    std::from_chars(text->data(), text->data() + text->size(), megabits);
    if (megabits > 0) report.link_bytes_per_s = megabits * kBytesPerMegabit;
  }

  std::string where() const {
    return host_and_port(options_.listens ? address_ : options_.address);
  }

  Finding cannot_listen(const Error& error) const {
    Finding finding{.section = "peer",
                    .name = "listen",
                    .state = State::kProblem,
                    .seen = error.message(),
                    .meaning = "No other host can reach this one at the address.",
                    .remedy = cadre::format("sudo ss -ltnp 'sport = :{}'; ip -brief address",
                                            options_.address.port)};
    return finding;
  }

  Finding no_peer(const Error& error) const {
    Finding finding{
        .section = "peer", .name = "connection", .state = State::kProblem, .seen = error.message()};
    const bool is_timeout = error.code() == ErrorCode::kTimeout;
    if (error.code() == ErrorCode::kInvalidArgument) {
      finding.meaning =
          "The process at the other end has another token or another build of Cadre, serves "
          "another peer already, or is no cadre doctor. A listener serves one peer.";
      finding.remedy = "cadre --version; sha256sum TOKEN_FILE";
    } else if (options_.listens) {
      if (is_timeout) finding.seen = cadre::format("no peer came to {} in time", where());
      finding.meaning =
          "If cadre doctor was started on the other host with this address and the same token, a "
          "firewall or a missing route keeps its packets away.";
      finding.remedy = cadre::format("sudo tcpdump -n 'tcp port {}'", address_.port);
    } else if (is_timeout && error.details().culprit) {
      finding.seen = cadre::format("a store answers at {}, but no cadre doctor --listen", where());
      finding.meaning = "It is probably the store of a job. The job was not disturbed.";
      finding.remedy = "cadre doctor --listen --token-file FILE";
    } else {
      // The error of the store has advice for jobs.
      const auto probe = system_.connect(options_.address, system_.deadline_in(kProbeTime));
      if (!probe.ok()) finding.seen = probe.error().message();
      finding.meaning =
          "No cadre doctor --listen answers there: it was not started, it has ended, or a firewall "
          "or a missing route is in between.";
      finding.remedy = cadre::format("ping -c 3 {0}; ip route get {0}", options_.address.host);
    }
    return finding;
  }

  // The rank with the higher number opens the connection; in the first round that is the host
  // without --listen.
  Finding not_connected(const Error& error) const {
    return {.section = "peer",
            .name = "connection",
            .state = State::kProblem,
            .seen = error.message(),
            .meaning = cadre::format(
                "The two hosts met at the port of the store, but then no connection {} was "
                "possible. Ranks listen at ports that the kernel chooses, so a firewall must "
                "accept all TCP connections between the hosts of a job. Or the peer has ended.",
                direction_text(!options_.listens)),
            .remedy = "sudo nft list ruleset; sudo iptables -S"};
  }

  static Finding broken(const Error& error) {
    return {.section = "peer",
            .name = "measurement",
            .state = State::kProblem,
            .seen = error.message(),
            .meaning = error.code() == ErrorCode::kPeerLost
                           ? "The peer was reached, and has ended or was cut off."
                           : "The peer was reached, but then it or the network stopped, or the "
                             "network carries less than about 1 Mbit/s.",
            .remedy = "nstat -az TcpRetransSegs; ip -statistics link"};
  }

  os::System& system_;
  const PeerOptions& options_;
  os::Address address_;  // the listener's, with its port
  std::unique_ptr<TcpStoreServer> server_;
  bool has_met_ = false;  // both were at the store
};

std::string readable_rate(double bytes_per_s) {
  const double megabytes = bytes_per_s / 1e6;
  const double megabits = bytes_per_s * 8 / 1e6;
  return megabytes < 100 ? cadre::format("{:.1f} MB/s ({:.0f} Mbit/s)", megabytes, megabits)
                         : cadre::format("{:.0f} MB/s ({:.2f} Gbit/s)", megabytes, megabits / 1e3);
}

Finding judge_connection(const PeerReport& report) {
  Finding finding{
      .section = "peer",
      .name = "connection",
      .seen = cadre::format("reached {} from {} on {}, and it reaches this host", report.peer_host,
                            report.own_address, report.interface.empty() ? "?" : report.interface)};
  if (report.back_failure.empty()) return finding;
  finding.state = State::kProblem;
  finding.seen = cadre::format("{}, but not {}: {}", direction_text(!report.listens),
                               direction_text(report.listens), report.back_failure);
  finding.meaning =
      "Each host of a job must be able to open connections to each other one. A firewall of one of "
      "the two refuses them, or the peer has ended.";
  finding.remedy = "sudo nft list ruleset; sudo iptables -S";
  return finding;
}

Finding judge_latency(const PeerReport& report) {
  constexpr double kSlowUs = 1000;
  constexpr double kJitter = 20;
  const PeerMeasurement& measured = report.measured;
  Finding finding{.section = "peer",
                  .name = "round trip",
                  .seen = cadre::format("{:.0f} us median, {:.0f} us p99",
                                        measured.round_trip_us_median, measured.round_trip_us_p99),
                  .numbers = {{"round_trip_us_median", measured.round_trip_us_median},
                              {"round_trip_us_p99", measured.round_trip_us_p99}}};
  if (measured.round_trip_us_median >= kSlowUs) {
    finding.state = State::kNote;
    finding.meaning =
        "Hosts of one switch need 20 to 200 us. Each small collective waits for several round "
        "trips.";
    finding.remedy = cadre::format("ping -c 20 {}", report.peer_host);
  } else if (measured.round_trip_us_p99 >= kSlowUs &&
             measured.round_trip_us_p99 > kJitter * measured.round_trip_us_median) {
    finding.state = State::kNote;
    finding.meaning =
        "A few round trips take far longer than the others: cores are busy, packets are lost, or a "
        "virtual machine is interrupted.";
    finding.remedy = "nstat -az TcpRetransSegs; cat /proc/pressure/cpu";
  }
  return finding;
}

struct Direction {
  std::string_view name;
  double bytes_per_s = 0;
};

Finding judge_bandwidth(const PeerReport& report, const Direction& direction) {
  constexpr double kSlow = 100e6;  // a link of 1 Gbit/s carries about 117 MB/s
  constexpr double kShareOfLink = 0.6;
  Finding finding{.section = "peer",
                  .name = std::string(direction.name),
                  .seen = readable_rate(direction.bytes_per_s),
                  .numbers = {{"bytes_per_s", direction.bytes_per_s}}};
  const double link = report.link_bytes_per_s.value_or(0);
  if (!report.is_same_host && direction.bytes_per_s < kShareOfLink * link) {
    finding.state = State::kNote;
    finding.seen += cadre::format(" of {} of {}", readable_rate(link), report.interface);
    finding.meaning =
        "Other traffic, lost packets, a slower link in between, or one core that handles all "
        "interrupts limits it.";
    finding.remedy =
        cadre::format("ethtool {0}; ethtool -S {0} | grep -iE 'drop|err'", report.interface);
  } else if (direction.bytes_per_s < kSlow) {
    finding.state = State::kNote;
    finding.meaning = cadre::format(
        "An all_reduce of the gradients of 25 million float32 parameters (100 MB) takes at least "
        "{:.1f} s between two hosts.",
        100e6 / std::max(direction.bytes_per_s, 1.0));
    finding.remedy = cadre::format("ip -statistics link show {0}; ethtool {0}", report.interface);
  }
  return finding;
}

Finding judge_wall_clocks(const PeerReport& report) {
  constexpr double kToleratedMs = 500;
  const double offset_ms = report.measured.wall_clock_offset_ms;
  Finding finding{.section = "peer",
                  .name = "wall clocks",
                  .seen = cadre::format("the peer's is {:.1f} ms {}", std::abs(offset_ms),
                                        offset_ms < 0 ? "behind" : "ahead"),
                  .numbers = {{"offset_ms", offset_ms}}};
  if (std::abs(offset_ms) < kToleratedMs) return finding;
  finding.state = State::kNote;
  finding.meaning = "Times in the logs of the two hosts cannot be compared.";
  finding.remedy = "timedatectl; sudo apt-get install chrony";
  return finding;
}

}  // namespace

std::string host_and_port(const os::Address& address) {
  const std::string text = address.to_string();
  return text.substr(text.find(':') + 1);
}

std::vector<Finding> check_peer(os::System& system, const PeerOptions& options) {
  return PeerCheck(system, options).run();
}

std::vector<Finding> judge_peer(const PeerReport& report) {
  return {judge_connection(report), judge_latency(report),
          judge_bandwidth(report, {"to the peer", report.measured.sent_bytes_per_s}),
          judge_bandwidth(report, {"from the peer", report.measured.received_bytes_per_s}),
          judge_wall_clocks(report)};
}

}  // namespace cadre::cli
