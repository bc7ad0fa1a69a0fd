// A rendezvous of ranks that know their rank number and the address of the store:
// "tcp://host:port".
//
// Rank 0 hosts the store in its own process if no process listens at the address; the Membership
// then owns the server. Each rank listens at the addresses that follow from its route to the store
// (exchange_addresses.h), so the only host name that is resolved is that of the store. With port 0,
// which the other ranks could not know, only a world of one may join.
//
// Threads, blocking, lifetime and errors: rendezvous.h; the System and the log outlive the
// Membership. Source: torch/distributed/rendezvous.py, "tcp://".
#pragma once

#include <chrono>
#include <string_view>

#include "cadre/core/base/log.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/rendezvous/rendezvous.h"
#include "cadre/core/store/tcp/tcp_store.h"

namespace cadre {

struct TcpRendezvousOptions {
  os::Address address;
  Rank rank = 0;
  int world_size = 1;
  os::Secret job_token;
  StoreProtocol protocol = StoreProtocol::kNative;
  // False if a launcher hosts the store; then rank 0 is a client, too.
  bool may_host_store = true;
  uint64_t round = 0;  // must differ from that of any earlier Membership in the same store
  // The process that listens at the address must send its greeting within `greeting_timeout`. After
  // `warn_after` a wait is logged, once.
  Duration greeting_timeout = std::chrono::seconds(5);
  Duration warn_after = kStoreWarnTime;
  // Receives log lines about waits, and those of a store that this process hosts. If it is null,
  // nothing is logged.
  LogSink* log = nullptr;
};

// Parses "tcp://host:port".
CADRE_EXPORT Result<os::Address> parse_tcp_url(std::string_view url);

class CADRE_EXPORT TcpRendezvous final : public Rendezvous {
 public:
  TcpRendezvous(os::System& system, TcpRendezvousOptions options)
      : system_(system), options_(std::move(options)) {}

  Result<Membership> join(Deadline deadline) override;

 private:
  Result<std::shared_ptr<Store>> open_store(Deadline deadline, StoreRoute& route);

  os::System& system_;
  TcpRendezvousOptions options_;
};

}  // namespace cadre
