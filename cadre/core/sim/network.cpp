#include "cadre/core/sim/network.h"

#include <algorithm>

#include "cadre/core/base/format.h"

namespace cadre::sim {
namespace {

constexpr int64_t kDelayFactor = 50;
constexpr int64_t kSlowLinkLatencyFactor = 10;
constexpr int64_t kSlowLinkNsPerByte = 1000;  // gives 1 MB/s
constexpr int64_t kNsPerByte = 1;             // gives 1 GB/s
constexpr int64_t kSameHostFactor = 10;       // within a host the latency is divided by this

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "127.0.0.1" || host == "::1";
}

bool is_any(const std::string& host) {
  return host == "0.0.0.0" || host == "::";
}

}  // namespace

std::string address_of_host(int host) {
  return cadre::format("10.0.0.{}", host + 1);
}

// A connection that is being established. The connecting rank and the packets in flight share the
// object.
struct Network::Attempt {
  bool is_done = false;
  bool is_abandoned = false;
  bool is_refused = false;
  os::Address local;
  std::shared_ptr<Connection> connection;
};

Network::Network(Scheduler& scheduler, const SimOptions& options, FaultCounts& counts)
    : scheduler_(scheduler), options_(options), counts_(counts) {
  const int num_hosts = static_cast<int>(options.ranks_per_host.size());
  for (int host = 0; host < num_hosts; ++host) {
    const int num_ranks = options.ranks_per_host[static_cast<size_t>(host)];
    host_of_rank_.insert(host_of_rank_.end(), static_cast<size_t>(num_ranks), host);
    for (int other = 0; other < host; ++other) {
      links_[{other, host}].is_slow = chance(options.slow_link_probability);
    }
  }
}

Result<int> Network::host_named(int rank, const std::string& name) const {
  if (is_loopback(name) || is_any(name)) return host_of(rank);
  for (int host = 0; host <= host_of_rank_.back(); ++host) {
    if (name == address_of_host(host) || name == cadre::format("node{}", host)) return host;
  }
  return Error(ErrorCode::kUnavailable, cadre::format("host name \"{}\" does not resolve", name));
}

Result<Network::Place> Network::place_of(int rank, const os::Address& address) const {
  if (address.kind == os::Address::Kind::kUnix) {
    return Place{host_of(rank), address.to_string()};
  }
  auto host = host_named(rank, address.host);
  if (!host.ok()) return host.error();
  return Place{*host, cadre::format("tcp:{}", address.port)};
}

Result<std::shared_ptr<ListenPoint>> Network::listen(int rank, const os::Address& address) {
  os::Address chosen = address;
  if (chosen.kind == os::Address::Kind::kTcp && chosen.port == 0) chosen.port = next_port_++;
  auto place = place_of(rank, chosen);
  if (!place.ok()) return place.error();
  const std::string what = cadre::format("listen on {}", chosen.to_string());
  if (place->host != host_of(rank)) {
    return Error(ErrorCode::kInvalidArgument, what + ": the address is another host's");
  }
  if (listeners_.contains(*place)) {
    return Error(ErrorCode::kUnavailable, what + ": Address already in use");
  }
  auto point = std::make_shared<ListenPoint>(ListenPoint{rank, chosen, true, {}});
  listeners_[*place] = point;
  return point;
}

void Network::close(ListenPoint& point) {
  if (!point.is_open) return;
  point.is_open = false;
  std::erase_if(listeners_, [&](const auto& entry) { return entry.second.get() == &point; });
  for (const auto& connection : point.backlog) connection->close(1);
  point.backlog.clear();
}

Result<std::shared_ptr<Connection>> Network::connect(int rank, const os::Address& address,
                                                     Deadline deadline) {
  const std::string what = cadre::format("connect to {}", address.to_string());
  auto place = place_of(rank, address);
  if (!place.ok()) return place.error();
  auto attempt = std::make_shared<Attempt>();
  attempt->local =
      address.kind == os::Address::Kind::kUnix
          ? os::Address{os::Address::Kind::kUnix, "", 0}
          : os::Address{os::Address::Kind::kTcp, address_of_host(host_of(rank)), next_port_++};
  // The transit time depends only on the hosts, so any rank of the other host can be used.
  const auto other = std::find(host_of_rank_.begin(), host_of_rank_.end(), place->host);
  const int there = static_cast<int>(other - host_of_rank_.begin());
  deliver_soon(rank, there, [this, rank, address, place = *place, attempt] {
    arrive(rank, address, place, attempt);
  });
  // Abandons the attempt also if this rank is killed while it waits.
  struct AbandonUnlessDone {
    Attempt& attempt;
    ~AbandonUnlessDone() { attempt.is_abandoned = !attempt.is_done; }
  };
  const AbandonUnlessDone guard{*attempt};
  if (!scheduler_.wait(
          what, [attempt] { return attempt->is_done; }, deadline)) {
    if (attempt->connection) attempt->connection->close(0);
    return Error(ErrorCode::kTimeout, what + ": no answer before the deadline");
  }
  if (attempt->is_refused) return Error(ErrorCode::kUnavailable, what + ": Connection refused");
  return attempt->connection;
}

void Network::arrive(int rank, const os::Address& address, const Place& place,
                     const std::shared_ptr<Attempt>& attempt) {
  const auto found = listeners_.find(place);
  const bool is_reachable =
      found != listeners_.end() &&
      (place.host == host_of(rank) || !is_loopback(found->second->address.host));
  if (attempt->is_abandoned) return;
  if (!is_reachable) {
    attempt->is_refused = true;
    const auto other = std::find(host_of_rank_.begin(), host_of_rank_.end(), place.host);
    return answer(static_cast<int>(other - host_of_rank_.begin()), rank, attempt);
  }
  ListenPoint& point = *found->second;
  os::Address there = address;
  if (there.kind == os::Address::Kind::kTcp) there.host = address_of_host(place.host);
  attempt->connection = std::make_shared<Connection>(
      *this, std::array{Connection::End{rank, attempt->local}, Connection::End{point.rank, there}});
  // Removes expired entries only when the table has reached max_connections_, so that the average
  // cost of a connection does not depend on the number of entries.
  if (connections_.size() >= max_connections_) {
    std::erase_if(connections_, [](const auto& known) { return known.expired(); });
    max_connections_ = std::max(max_connections_, 2 * connections_.size());
  }
  connections_.push_back(attempt->connection);
  point.backlog.push_back(attempt->connection);
  scheduler_.touch(point.rank);
  answer(point.rank, rank, attempt);
}

void Network::answer(int from, int to, const std::shared_ptr<Attempt>& attempt) {
  deliver_soon(from, to, [attempt] {
    attempt->is_done = !attempt->is_abandoned;
    if (attempt->is_abandoned && attempt->connection) attempt->connection->close(0);
  });
}

void Network::deliver_soon(int from, int to, std::function<void()> action) {
  const Transit soon = transit(from, to, 0);
  deliver(from, to, scheduler_.now() + soon.time, soon, std::move(action));
}

void Network::deliver(int from, int to, TimePoint arrival, const Transit& transit,
                      std::function<void()> action) {
  const std::pair<int, int> hosts = std::minmax(host_of(from), host_of(to));
  scheduler_.at(arrival, [this, hosts, transit, action = std::move(action)]() mutable {
    if (transit.is_delayed) counts_.add(FaultKind::kDelay);
    if (transit.is_slow) counts_.add(FaultKind::kSlowLink);
    if (!partitions_.contains(hosts)) return action();
    counts_.add(FaultKind::kPartition);
    held_.push_back({hosts, std::move(action)});
  });
}

Network::Transit Network::transit(int from, int to, size_t num_bytes) {
  Transit result;
  const int64_t least = options_.min_latency.count();
  const int64_t spread = std::max<int64_t>(1, options_.max_latency.count() - least);
  int64_t ns =
      least + static_cast<int64_t>(scheduler_.random().below(static_cast<uint64_t>(spread)));
  const std::pair<int, int> hosts = std::minmax(host_of(from), host_of(to));
  const auto bytes = static_cast<int64_t>(num_bytes);
  if (hosts.first == hosts.second) {
    ns = ns / kSameHostFactor + bytes * kNsPerByte;
  } else if (links_[hosts].is_slow) {
    result.is_slow = true;
    ns = ns * kSlowLinkLatencyFactor + bytes * kSlowLinkNsPerByte;
  } else {
    ns += bytes * kNsPerByte;
  }
  if (chance(options_.delay_probability)) {
    result.is_delayed = true;
    ns *= kDelayFactor;
  }
  result.time = Duration(ns);
  return result;
}

void Network::note_arrival(uint64_t packet_number) {
  if (packet_number < latest_arrival_) counts_.add(FaultKind::kReorder);
  latest_arrival_ = std::max(latest_arrival_, packet_number);
}

void Network::cut(int rank, int other) {
  for (const auto& known : connections_) {
    const std::shared_ptr<Connection> connection = known.lock();
    if (!connection) continue;
    const std::pair<int, int> ranks = std::minmax(connection->end(0).rank, connection->end(1).rank);
    if (ranks != std::pair<int, int>(std::minmax(rank, other))) continue;
    if (connection->is_open()) counts_.add(FaultKind::kCut);
    connection->reset();
  }
}

void Network::heal(int host, int other) {
  const std::pair<int, int> hosts = std::minmax(host, other);
  partitions_.erase(hosts);
  std::vector<HeldAction> held;
  held.swap(held_);
  for (HeldAction& entry : held) {
    if (entry.hosts == hosts) {
      counts_.add(FaultKind::kHeal);
      entry.action();
    } else {
      held_.push_back(std::move(entry));
    }
  }
}

void Network::end_rank(int rank) {
  for (const auto& known : connections_) {
    const std::shared_ptr<Connection> connection = known.lock();
    if (!connection) continue;
    for (const int side : {0, 1}) {
      if (connection->end(side).rank == rank) connection->close(side);
    }
  }
  // close() changes the table, so the listening addresses to close are collected first.
  std::vector<std::shared_ptr<ListenPoint>> points;
  for (const auto& [place, point] : listeners_) {
    if (point->rank == rank) points.push_back(point);
  }
  for (const auto& point : points) close(*point);
}

}  // namespace cadre::sim
