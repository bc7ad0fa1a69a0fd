#include "cadre/rendezvous/meeting.h"

#include <algorithm>
#include <chrono>
#include <span>

#include "cadre/base/format.h"

namespace cadre {
namespace {

constexpr std::string_view kNoHost = "-";

// A card is a sentence for people, and a line "LOCAL_HOST STORE_HOST".
std::string write_card(const std::string& sentence, const StoreView& view) {
  const auto host = [](const std::string& name) {
    return name.empty() ? kNoHost : std::string_view(name);
  };
  return format("{}\n{} {}", sentence, host(view.local_host), host(view.store_host));
}

std::string sentence_of(const std::string& card) {
  return card.substr(0, card.find('\n'));
}

StoreView view_of(const std::string& card) {
  const size_t line = card.find('\n');
  const size_t blank = card.find(' ', line == std::string::npos ? card.size() : line);
  if (blank == std::string::npos) return {};
  StoreView view{card.substr(line + 1, blank - line - 1), card.substr(blank + 1)};
  if (view.local_host == kNoHost) view.local_host.clear();
  if (view.store_host == kNoHost) view.store_host.clear();
  return view;
}

// Whether `rank` speaks for all that have come: none of a lower number has. So a world that waits
// is told of once, and costs the store one request a rank.
bool is_lowest(Store& store, const std::vector<std::string>& keys, Rank rank, Deadline deadline) {
  for (const std::string& key : std::span(keys).first(static_cast<size_t>(rank.value))) {
    const Result<bool> is_there = store.check(std::span(&key, 1), deadline);
    if (!is_there.ok() || *is_there) return false;
  }
  return true;
}

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

// The cards of all ranks, once they are there. A wait that gets long is told in the log.
Result<std::vector<std::string>> collect_cards(os::System& system, Store& store,
                                               const std::vector<std::string>& keys,
                                               const MeetingTerms& terms, Deadline patience) {
  const Deadline warning = system.deadline_in(terms.warn_after);
  auto cards = store.multi_get(keys, patience.earlier(warning));
  if (cards.ok() || cards.error().code() != ErrorCode::kTimeout ||
      patience.has_passed(system.now())) {
    return cards;
  }
  if (terms.log != nullptr && is_lowest(store, keys, terms.rank, patience)) {
    terms.log->write(
        LogLevel::kWarning, "rendezvous",
        format("waiting for missing=\"{}\" world_size={} for_s={:g}; check that every rank was "
               "started with WORLD_SIZE={}",
               missing_ranks(store, keys, patience), terms.world_size,
               std::chrono::duration<double>(terms.warn_after).count(), terms.world_size));
  }
  return store.multi_get(keys, patience);
}

}  // namespace

bool is_loopback_host(std::string_view host) {
  return host.empty() || host == "localhost" || host == "::1" || host.starts_with("127.") ||
         host.starts_with("::ffff:127.");
}

Result<std::vector<StoreView>> meet(os::System& system, Store& store, const MeetingTerms& terms,
                                    Deadline deadline) {
  const os::HostInfo host = system.host();
  const std::string world = format("a world of {}", terms.world_size);
  const std::string own = format("{}, on {} (pid {})", world, host.name, host.pid);
  std::vector<std::string> keys;
  for (int rank = 0; rank < terms.world_size; ++rank) {
    keys.push_back(format("cadre/{}/rendezvous/{}", terms.round, rank));
  }
  const std::string card = write_card(own, terms.view);
  const auto holder =
      store.compare_set(keys[static_cast<size_t>(terms.rank.value)], "", card, deadline);
  if (!holder.ok()) return holder.error();
  // The same card again is this process joining a second time.
  if (sentence_of(*holder) != own) {
    return Error(ErrorCode::kInvalidArgument,
                 format("rank {} was taken before by a process in {}; this one is in {}: give "
                        "every process its own RANK",
                        terms.rank, sentence_of(*holder), own));
  }
  // What is left after the patience is for finding out who is missing.
  const TimePoint now = system.now();
  const Duration budget = deadline.remaining(now);
  const Deadline patience(now + (budget - std::min<Duration>(budget / 8, std::chrono::seconds(1))));
  const auto cards = collect_cards(system, store, keys, terms, patience);
  if (!cards.ok()) {
    if (cards.error().code() != ErrorCode::kTimeout) return cards.error();
    return Error(ErrorCode::kTimeout,
                 format("rank {} waited for {} at the store, but {} did not come before the "
                        "deadline; check that every rank was started with WORLD_SIZE={}",
                        terms.rank, world, missing_ranks(store, keys, deadline), terms.world_size));
  }
  std::vector<StoreView> views;
  for (size_t rank = 0; rank < cards->size(); ++rank) {
    const std::string& other = (*cards)[rank];
    if (!other.starts_with(world + ",")) {
      return Error(ErrorCode::kInvalidArgument,
                   format("rank {} joined {}, but rank {} joined {}: give all ranks the same "
                          "WORLD_SIZE",
                          terms.rank, own, rank, sentence_of(other)));
    }
    views.push_back(view_of(other));
  }
  return views;
}

Result<std::vector<std::string>> choose_listen_hosts(const std::vector<StoreView>& views,
                                                     Rank rank) {
  const std::string& own = views[static_cast<size_t>(rank.value)].local_host;
  if (own.starts_with("fe80:")) {
    return Error(ErrorCode::kInvalidArgument,
                 format("rank {} reaches the store from the link-local address {}, which means "
                        "nothing to other hosts; give MASTER_ADDR as a global address",
                        rank, own));
  }
  if (!is_loopback_host(own)) return std::vector<std::string>{own};
  std::vector<std::string> hosts;
  for (const StoreView& view : views) {
    if (is_loopback_host(view.local_host) || is_loopback_host(view.store_host)) continue;
    if (std::find(hosts.begin(), hosts.end(), view.store_host) == hosts.end()) {
      hosts.push_back(view.store_host);
    }
  }
  if (hosts.empty()) hosts.push_back(own.empty() ? "127.0.0.1" : own);
  return hosts;
}

}  // namespace cadre
