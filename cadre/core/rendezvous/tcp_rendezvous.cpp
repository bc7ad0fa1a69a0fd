#include "cadre/core/rendezvous/tcp_rendezvous.h"

#include <chrono>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/rendezvous/exchange_addresses.h"
#include "cadre/core/rendezvous/lost_rank.h"
#include "cadre/core/store/tcp/tcp_store_server.h"

namespace cadre {
namespace {

// The store of a rank that also hosts the server. The client must be destroyed before the server.
struct HostedStore {
  std::unique_ptr<TcpStoreServer> server;
  std::unique_ptr<TcpStore> client;
};

// Returns the host of a TCP address; an empty text for a unix address.
std::string host_of(const os::Address& address) {
  return address.kind == os::Address::Kind::kTcp ? address.host : std::string();
}

// Waits for a while, so that ranks that have joined can read the store. That takes a few round
// trips.
void linger(os::System& system, Deadline deadline) {
  constexpr Duration kLingerTime = std::chrono::seconds(1);
  system.make_waiter()->park(deadline.earlier(system.deadline_in(kLingerTime)));
}

// Returns the beginning of the error message of a rank 0 that could not host the store and did not
// reach a store at the address either.
std::string why_not_hosted(const os::Address& address, const std::string& reason) {
  const bool is_in_use = reason.find("Address already in use") != std::string::npos;
  if (!is_in_use || address.kind != os::Address::Kind::kTcp) {
    return format("rank 0 could not host the store ({}): ", reason);
  }
  return format("port {} of rank 0 is in use by another program ({}): ", address.port, reason);
}

// Rejects port 0, which the other ranks could not know. parse_tcp_url() accepts it for a world of
// one.
Status check_port(const os::Address& address) {
  if (address.kind != os::Address::Kind::kTcp || address.port != 0) return {};
  return Error(ErrorCode::kInvalidArgument,
               format("rendezvous tcp://{}:0: port 0 stands for any free port, which the other "
                      "ranks could not know; choose one from 1 to 65535",
                      address.host));
}

}  // namespace

Result<os::Address> parse_tcp_url(std::string_view url) {
  constexpr std::string_view kScheme = "tcp://";
  if (!url.starts_with(kScheme)) {
    return Error(ErrorCode::kInvalidArgument,
                 format("rendezvous \"{}\" is not of the form tcp://HOST:PORT", url));
  }
  Result<os::Address> address = os::Address::parse(format("tcp:{}", url.substr(kScheme.size())));
  if (!address.ok()) return address.error().with_context(format("rendezvous \"{}\"", url));
  return address;
}

Status check_place(Rank rank, int world_size) {
  if (world_size >= 1 && rank.value >= 0 && rank < world_size) return {};
  return Error(ErrorCode::kInvalidArgument,
               format("rank {} is not in a world of {}; ranks go from 0 to the size less one", rank,
                      world_size));
}

Result<Membership> TcpRendezvous::join(Deadline deadline) {
  const int world_size = options_.world_size;
  CADRE_RETURN_IF_ERROR(check_place(options_.rank, world_size));
  Membership membership{.rank = options_.rank,
                        .world_size = world_size,
                        .round = options_.round,
                        .job_token = options_.job_token,
                        .job_size = world_size};
  if (world_size == 1) return membership;
  CADRE_RETURN_IF_ERROR(check_port(options_.address));
  StoreRoute route;
  Result<std::shared_ptr<Store>> store = open_store(deadline, route);
  if (!store.ok()) return store.error();
  membership.store = std::move(store).value();
  membership.store_host = host_of(route.server);
  // The will is left before other ranks can learn of this rank, so that none waits for a rank that
  // has died since.
  CADRE_RETURN_IF_ERROR(leave_presence_will(system_, membership, deadline));
  const auto views = exchange_addresses(system_, *membership.store,
                                        {.rank = options_.rank,
                                         .world_size = world_size,
                                         .round = options_.round,
                                         .view = {host_of(route.local), membership.store_host},
                                         .warn_after = options_.warn_after,
                                         .log = options_.log},
                                        deadline);
  if (!views.ok()) {
    // The other ranks must have time to read the contradicting entries from this rank's store,
    // which may end with this rank.
    const bool hosts = options_.rank == 0 && options_.may_host_store;
    if (hosts && views.error().code() == ErrorCode::kInvalidArgument) linger(system_, deadline);
    return views.error();
  }
  auto hosts = choose_listen_hosts(*views, options_.rank);
  if (!hosts.ok()) return hosts.error();
  membership.listen_hosts = std::move(hosts).value();
  return membership;
}

Result<std::shared_ptr<Store>> TcpRendezvous::open_store(Deadline deadline, StoreRoute& route) {
  auto hosted = std::make_shared<HostedStore>();
  std::string no_server;
  if (options_.rank == 0 && options_.may_host_store) {
    auto server = TcpStoreServer::start(
        system_, {.address = options_.address, .token = options_.job_token, .log = options_.log});
    // kUnavailable means that another process listens at the address already. Rank 0 is then its
    // client.
    if (!server.ok() && server.error().code() != ErrorCode::kUnavailable) return server.error();
    if (server.ok()) {
      hosted->server = std::move(server).value();
    } else {
      no_server = why_not_hosted(options_.address, server.error().message());
    }
  }
  auto client = TcpStore::connect(system_,
                                  {.address = options_.address,
                                   .token = options_.job_token,
                                   .protocol = options_.protocol,
                                   .greeting_timeout = options_.greeting_timeout,
                                   .warn_after = options_.warn_after,
                                   .log = options_.log},
                                  deadline);
  if (!client.ok()) {
    return Error(client.error().code(),
                 format("rank {} of {}: {}{}", options_.rank, options_.world_size, no_server,
                        client.error().message()));
  }
  hosted->client = std::move(client).value();
  route = hosted->client->route();
  return std::shared_ptr<Store>(hosted, hosted->client.get());
}

}  // namespace cadre
