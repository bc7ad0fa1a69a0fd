// The checks between two hosts: `cadre doctor --listen` on one and `cadre doctor HOST:PORT` on the
// other form a group of two ranks as a job does, measure, and end.
//
// Threads: one. Blocking: until `patience` for the peer, then about 3 s, at most about 45 s.
// Errors: none; each failure is a finding.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/log.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/os/system.h"
#include "cadre/launch/cli/doctor/finding.h"
#include "cadre/launch/cli/doctor/peer_measurement.h"

namespace cadre::cli {

// The rounds of a job's store are smaller numbers. So a doctor that was given the address and the
// token of a job does not enter the job.
inline constexpr uint64_t kFirstDoctorRound = uint64_t{1} << 32;

struct PeerOptions {
  bool listens = false;
  os::Address address = {};  // the listener; port 0 lets the kernel choose
  os::Secret token = {};     // may be empty if the address is on loopback
  Duration patience{};
  Duration connect_limit = std::chrono::seconds(10);  // the limit of the first connection
  Duration measure_limit = std::chrono::seconds(20);
  LogSink* log = nullptr;  // receives the lines about strangers
  // The listener calls it with its address.
  std::function<void(const os::Address&)> on_listening = {};
};

// Returns "HOST:PORT", or "[HOST]:PORT" for IPv6.
std::string host_and_port(const os::Address& address);

std::vector<Finding> check_peer(os::System& system, const PeerOptions& options);

// What two hosts have found out about each other.
struct PeerReport {
  bool listens = false;  // this host is the one with --listen
  std::string own_address = {};
  std::string interface = {};  // the interface of own_address
  std::string peer_host = {};  // the name of the peer's host
  bool is_same_host = false;
  // The speed of the interface; nullopt for a virtual interface, or if the kernel does not know it.
  std::optional<double> link_bytes_per_s = {};
  PeerMeasurement measured = {};
  // Why the second connection failed, which the host with --listen opens; empty if it did not.
  std::string back_failure = {};
};

std::vector<Finding> judge_peer(const PeerReport& report);

}  // namespace cadre::cli
