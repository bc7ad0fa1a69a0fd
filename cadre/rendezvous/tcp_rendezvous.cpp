#include "cadre/rendezvous/tcp_rendezvous.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cadre/base/format.h"
#include "cadre/store/tcp_store_server.h"

namespace cadre {
namespace {

// The store of a rank that hosts the server too: the client ends before the server does.
struct HostedStore {
  std::unique_ptr<TcpStoreServer> server;
  std::unique_ptr<TcpStore> client;
};

// "rank 2, rank 5 and 3 more", for a message.
std::string missing_ranks(Store& store, const std::vector<std::string>& keys, Deadline deadline) {
  constexpr int kMaxNamed = 8;
  std::string names;
  int num_missing = 0;
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    const Result<bool> is_there = store.check(std::span(&keys[rank], 1), deadline);
    if (!is_there.ok() || *is_there) continue;
    if (++num_missing <= kMaxNamed) names += format("{}rank {}", names.empty() ? "" : ", ", rank);
  }
  if (num_missing == 0) return "one rank or more";
  return num_missing <= kMaxNamed ? names : names + format(" and {} more", num_missing - kMaxNamed);
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

Result<Membership> TcpRendezvous::join(Deadline deadline) {
  const int world_size = options_.world_size;
  if (world_size < 1 || options_.rank < 0 || options_.rank >= world_size) {
    return Error(ErrorCode::kInvalidArgument,
                 format("rank {} is not in a world of {}; ranks go from 0 to the size less one",
                        options_.rank, world_size));
  }
  Membership membership{.rank = options_.rank,
                        .world_size = world_size,
                        .round = options_.round,
                        .job_token = options_.job_token};
  if (world_size == 1) return membership;
  Result<std::shared_ptr<Store>> store = open_store(deadline);
  if (!store.ok()) return store.error();
  CADRE_RETURN_IF_ERROR(meet(**store, deadline));
  membership.store = std::move(store).value();
  return membership;
}

Result<std::shared_ptr<Store>> TcpRendezvous::open_store(Deadline deadline) {
  auto hosted = std::make_shared<HostedStore>();
  if (options_.rank == 0 && options_.may_host_store) {
    auto server = TcpStoreServer::start(
        system_, {.address = options_.address, .token = options_.job_token, .log = options_.log});
    // kUnavailable: somebody listens there already, and then rank 0 is a client of it.
    if (!server.ok() && server.error().code() != ErrorCode::kUnavailable) return server.error();
    if (server.ok()) hosted->server = std::move(server).value();
  }
  auto client = TcpStore::connect(
      system_,
      {.address = options_.address, .token = options_.job_token, .protocol = options_.protocol},
      deadline);
  if (!client.ok()) {
    return client.error().with_context(format("rank {} of {}", options_.rank, options_.world_size));
  }
  hosted->client = std::move(client).value();
  return std::shared_ptr<Store>(hosted, hosted->client.get());
}

std::string TcpRendezvous::card_key(int rank) const {
  return format("cadre/{}/rendezvous/{}", options_.round, rank);
}

Status TcpRendezvous::meet(Store& store, Deadline deadline) {
  const os::HostInfo host = system_.host();
  const std::string world = format("a world of {}", options_.world_size);
  const std::string card = format("{}, on {} (pid {})", world, host.name, host.pid);
  const auto holder = store.compare_set(card_key(options_.rank), "", card, deadline);
  if (!holder.ok()) return holder.error();
  // The same card again is this process joining a second time.
  if (*holder != card) {
    return Error(ErrorCode::kInvalidArgument,
                 format("rank {} was taken before by a process in {}; this one is in {}: give "
                        "every process its own RANK",
                        options_.rank, *holder, card));
  }
  std::vector<std::string> keys;
  for (int rank = 0; rank < options_.world_size; ++rank) keys.push_back(card_key(rank));
  // What is left after the patience is for finding out who is missing.
  const TimePoint now = system_.now();
  const Duration budget = deadline.remaining(now);
  const Deadline patience(now + (budget - std::min<Duration>(budget / 8, std::chrono::seconds(1))));
  const auto cards = store.multi_get(keys, patience);
  if (!cards.ok()) {
    if (cards.error().code() != ErrorCode::kTimeout) return cards.error();
    return Error(
        ErrorCode::kTimeout,
        format("rank {} waited for {} at the store, but {} did not come before the "
               "deadline; check that every rank was started with WORLD_SIZE={}",
               options_.rank, world, missing_ranks(store, keys, deadline), options_.world_size));
  }
  for (int rank = 0; rank < options_.world_size; ++rank) {
    const std::string& other = (*cards)[static_cast<size_t>(rank)];
    if (other.starts_with(world + ",")) continue;
    return Error(ErrorCode::kInvalidArgument,
                 format("rank {} joined {}, but rank {} joined {}: give all ranks the same "
                        "WORLD_SIZE",
                        options_.rank, card, rank, other));
  }
  return {};
}

}  // namespace cadre
