#include "cadre/rendezvous/exchange_addresses.h"

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

// "rank 2, rank 5 and 3 more", for a message.
std::string name_ranks(const std::vector<int>& ranks) {
  constexpr size_t kMaxNamed = 8;
  std::string names;
  for (size_t i = 0; i < std::min(ranks.size(), kMaxNamed); ++i) {
    names += format("{}rank {}", names.empty() ? "" : ", ", ranks[i]);
  }
  if (ranks.empty()) return "one rank or more";
  return ranks.size() <= kMaxNamed ? names
                                   : names + format(" and {} more", ranks.size() - kMaxNamed);
}

// One rank's part in the meeting.
class AddressExchange {
 public:
  AddressExchange(os::System& system, Store& store, const ExchangeOptions& terms, Deadline deadline)
      : system_(system), store_(store), terms_(terms), deadline_(deadline) {
    const os::HostInfo host = system.host();
    own_ = format("{}, on {} (pid {})", world_, host.name, host.pid);
    for (int rank = 0; rank < terms.world_size; ++rank) {
      keys_.push_back(format("cadre/{}/rendezvous/{}", terms.round, rank));
    }
  }

  Result<std::vector<StoreView>> run();

 private:
  Status leave_card();
  // The cards of all ranks, once they are there.
  Result<std::vector<std::string>> collect_cards(Deadline until);
  // The same, with a warning if it takes long.
  Result<std::vector<std::string>> collect_cards_and_warn(Deadline patience);
  Status check_card(size_t rank, const std::string& card) const;
  Status warn_of_wait(Deadline until);
  bool is_lowest(Deadline until);
  std::vector<int> missing_ranks(Deadline until);

  std::span<const std::string> key_of(size_t rank) const { return {&keys_[rank], 1}; }

  os::System& system_;
  Store& store_;
  const ExchangeOptions& terms_;
  const Deadline deadline_;
  const std::string world_ = format("a world of {}", terms_.world_size);
  std::string own_;  // the sentence on this rank's card
  std::vector<std::string> keys_;
};

Result<std::vector<StoreView>> AddressExchange::run() {
  CADRE_RETURN_IF_ERROR(leave_card());
  // What is left after the patience is for finding out who is missing.
  const TimePoint now = system_.now();
  const Duration budget = deadline_.remaining(now);
  const Deadline patience(now + (budget - std::min<Duration>(budget / 8, std::chrono::seconds(1))));
  const auto cards = collect_cards_and_warn(patience);
  if (!cards.ok()) {
    if (cards.error().code() != ErrorCode::kTimeout) return cards.error();
    return Error(
        ErrorCode::kTimeout,
        format("rank {} waited for {} at the store, but {} did not come before the "
               "deadline; check that every rank was started with WORLD_SIZE={}",
               terms_.rank, world_, name_ranks(missing_ranks(deadline_)), terms_.world_size));
  }
  std::vector<StoreView> views;
  for (size_t rank = 0; rank < cards->size(); ++rank) {
    CADRE_RETURN_IF_ERROR(check_card(rank, (*cards)[rank]));
    views.push_back(view_of((*cards)[rank]));
  }
  return views;
}

Status AddressExchange::leave_card() {
  const auto holder = store_.compare_set(keys_[static_cast<size_t>(terms_.rank.value)], "",
                                         write_card(own_, terms_.view), deadline_);
  if (!holder.ok()) return holder.error();
  // The same card again is this process joining a second time.
  if (sentence_of(*holder) == own_) return {};
  return Error(ErrorCode::kInvalidArgument,
               format("RANK={} was given to two processes; the first is in {}, this one is in {}: "
                      "give every process its own RANK",
                      terms_.rank, sentence_of(*holder), own_));
}

Status AddressExchange::check_card(size_t rank, const std::string& card) const {
  if (card.starts_with(world_ + ",")) return {};
  return Error(ErrorCode::kInvalidArgument,
               format("rank {} joined {}, but rank {} joined {}: give all ranks the same "
                      "WORLD_SIZE",
                      terms_.rank, own_, rank, sentence_of(card)));
}

Result<std::vector<std::string>> AddressExchange::collect_cards(Deadline until) {
  // Rank 0 is in every world: who has another world in mind sees it here, instead of waiting for
  // ranks that do not exist.
  const auto first = store_.get(keys_[0], until);
  if (!first.ok()) return first.error();
  CADRE_RETURN_IF_ERROR(check_card(0, *first));
  return store_.multi_get(keys_, until);
}

Result<std::vector<std::string>> AddressExchange::collect_cards_and_warn(Deadline patience) {
  const Deadline warning = system_.deadline_in(terms_.warn_after);
  auto cards = collect_cards(patience.earlier(warning));
  if (cards.ok() || cards.error().code() != ErrorCode::kTimeout ||
      patience.has_passed(system_.now())) {
    return cards;
  }
  CADRE_RETURN_IF_ERROR(warn_of_wait(patience));
  return collect_cards(patience);
}

// Says who is missing, unless those who have come have another world in mind.
Status AddressExchange::warn_of_wait(Deadline until) {
  if (!is_lowest(until)) return {};
  const std::vector<int> missing = missing_ranks(until);
  for (size_t rank = 0; rank < keys_.size(); ++rank) {
    if (std::ranges::binary_search(missing, static_cast<int>(rank))) continue;
    const auto card = store_.get(keys_[rank], until);
    if (!card.ok()) return card.error();
    CADRE_RETURN_IF_ERROR(check_card(rank, *card));
  }
  if (terms_.log == nullptr) return {};
  terms_.log->write(
      LogLevel::kWarning, "rendezvous",
      format("waiting for missing=\"{}\" world_size={} for_s={:g}; check that every rank was "
             "started with WORLD_SIZE={}",
             name_ranks(missing), terms_.world_size,
             std::chrono::duration<double>(terms_.warn_after).count(), terms_.world_size));
  return {};
}

// Whether this rank speaks for all that have come: none of a lower number has. So a world that
// waits is told of once, and costs the store a few requests a rank.
bool AddressExchange::is_lowest(Deadline until) {
  for (size_t rank = 0; rank < static_cast<size_t>(terms_.rank.value); ++rank) {
    const Result<bool> is_there = store_.check(key_of(rank), until);
    if (!is_there.ok() || *is_there) return false;
  }
  return true;
}

std::vector<int> AddressExchange::missing_ranks(Deadline until) {
  std::vector<int> missing;
  for (size_t rank = 0; rank < keys_.size(); ++rank) {
    const Result<bool> is_there = store_.check(key_of(rank), until);
    if (is_there.ok() && !*is_there) missing.push_back(static_cast<int>(rank));
  }
  return missing;
}

}  // namespace

bool is_loopback_host(std::string_view host) {
  return host.empty() || host == "localhost" || host == "::1" || host.starts_with("127.") ||
         host.starts_with("::ffff:127.");
}

Result<std::vector<StoreView>> exchange_addresses(os::System& system, Store& store,
                                                  const ExchangeOptions& terms, Deadline deadline) {
  return AddressExchange(system, store, terms, deadline).run();
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
