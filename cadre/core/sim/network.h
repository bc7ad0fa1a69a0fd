// The simulated network: hosts, links with latency and partitions, listeners and connections.
//
// Threads: the one that the simulator runs. Blocking: connect(), in virtual time.
// Lifetime: outlives all sockets. Errors: those of os/socket.h.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/os/socket.h"
#include "cadre/core/sim/connection.h"
#include "cadre/core/sim/options.h"
#include "cadre/core/sim/scheduler.h"

namespace cadre::sim {

// One listening address. Connections are queued in it until they are accepted.
struct ListenPoint {
  int rank = 0;
  os::Address address;
  bool is_open = true;
  std::vector<std::shared_ptr<Connection>> backlog;
};

// Returns the numeric address of a host.
std::string address_of_host(int host);

class Network {
 public:
  Network(Scheduler& scheduler, const SimOptions& options, FaultCounts& counts);

  Result<std::shared_ptr<ListenPoint>> listen(int rank, const os::Address& address);
  Result<std::shared_ptr<Connection>> connect(int rank, const os::Address& address,
                                              Deadline deadline);
  void close(ListenPoint& point);

  // The time that a packet takes, and the causes of that time.
  struct Transit {
    Duration time;
    bool is_delayed = false;
    bool is_slow = false;
  };
  // Chooses at random how long a packet that is sent now is in transit.
  Transit transit(int from, int to, size_t num_bytes);
  // Runs `action` at the other end of the link between two ranks: at `arrival`, or, if a partition
  // holds the packet back at that time, when the partition is healed.
  void deliver(int from, int to, TimePoint arrival, const Transit& transit,
               std::function<void()> action);
  uint64_t next_packet_number() { return ++num_packets_; }
  // Records the order in which packets arrive, to count those that overtook others.
  void note_arrival(uint64_t packet_number);
  bool chance(double probability) { return scheduler_.random().unit() < probability; }

  void cut(int rank, int other);
  void partition(int host, int other) { partitions_.insert(std::minmax(host, other)); }
  void heal(int host, int other);
  // Ends all sockets of a rank, as the kernel does for a process that has ended.
  void end_rank(int rank);

  int host_of(int rank) const { return host_of_rank_[static_cast<size_t>(rank)]; }
  Scheduler& scheduler() { return scheduler_; }
  const SimOptions& options() const { return options_; }
  FaultCounts& counts() { return counts_; }

 private:
  struct Attempt;
  struct Link {
    bool is_slow = false;
  };
  // The destination of an address: a host and a name that is unique on it.
  struct Place {
    int host = 0;
    std::string name;
    friend auto operator<=>(const Place&, const Place&) = default;
  };
  struct HeldAction {
    std::pair<int, int> hosts;
    std::function<void()> action;
  };

  Result<int> host_named(int rank, const std::string& name) const;
  Result<Place> place_of(int rank, const os::Address& address) const;
  void arrive(int rank, const os::Address& address, const Place& place,
              const std::shared_ptr<Attempt>& attempt);
  void answer(int from, int to, const std::shared_ptr<Attempt>& attempt);
  // Runs `action` at the other end after the transit of a packet without bytes.
  void deliver_soon(int from, int to, std::function<void()> action);
  bool is_partitioned(int host, int other) const {
    return partitions_.contains(std::minmax(host, other));
  }

  Scheduler& scheduler_;
  const SimOptions& options_;
  FaultCounts& counts_;
  std::vector<int> host_of_rank_;
  // The links between hosts; the lower number of the pair comes first.
  std::map<std::pair<int, int>, Link> links_;
  std::set<std::pair<int, int>> partitions_;
  std::vector<HeldAction> held_;
  std::map<Place, std::shared_ptr<ListenPoint>> listeners_;
  std::vector<std::weak_ptr<Connection>> connections_;
  size_t max_connections_ = 64;  // expired entries of connections_ are removed at this number
  uint16_t next_port_ = 40000;
  uint64_t num_packets_ = 0;
  uint64_t latest_arrival_ = 0;
};

}  // namespace cadre::sim
