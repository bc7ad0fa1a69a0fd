#include "cadre/core/rendezvous/exchange_addresses.h"

#include <algorithm>
#include <chrono>
#include <span>

#include "cadre/core/base/format.h"
#include "cadre/core/base/quiet_log.h"
#include "cadre/core/rendezvous/missing_ranks.h"

namespace cadre {
namespace {

constexpr std::string_view kNoHost = "-";

// Returns what a rank writes into the store: a sentence for error messages, and a line "LOCAL_HOST
// STORE_HOST".
std::string write_entry(const std::string& sentence, const StoreView& view) {
  const auto host = [](const std::string& name) {
    return name.empty() ? kNoHost : std::string_view(name);
  };
  return format("{}\n{} {}", sentence, host(view.local_host), host(view.store_host));
}

std::string sentence_of(const std::string& entry) {
  return entry.substr(0, entry.find('\n'));
}

StoreView view_of(const std::string& entry) {
  const size_t line = entry.find('\n');
  const size_t blank = entry.find(' ', line == std::string::npos ? entry.size() : line);
  if (blank == std::string::npos) return {};
  StoreView view{entry.substr(line + 1, blank - line - 1), entry.substr(blank + 1)};
  if (view.local_host == kNoHost) view.local_host.clear();
  if (view.store_host == kNoHost) view.store_host.clear();
  return view;
}

// Runs the exchange of addresses on one rank.
class AddressExchange {
 public:
  AddressExchange(os::System& system, Store& store, const ExchangeOptions& options,
                  Deadline deadline)
      : system_(system), store_(store), options_(options), deadline_(deadline) {
    const os::HostInfo host = system.host();
    own_ = format("{}, on {} (pid {})", world_, host.name, host.pid);
    for (int rank = 0; rank < options.world_size; ++rank) {
      keys_.push_back(format("cadre/{}/rendezvous/{}", options.round, rank));
    }
  }

  Result<std::vector<StoreView>> run();

 private:
  Status publish_entry();
  // Waits until all ranks have written their entries, and returns them.
  Result<std::vector<std::string>> read_entries(Deadline until);
  // Returns the result of read_entries(), and logs a warning if some ranks are still missing after
  // ExchangeOptions::warn_after.
  Result<std::vector<std::string>> read_entries_and_warn(Deadline patience);
  Status check_entry(size_t rank, const std::string& entry) const;
  Status warn_of_wait(Deadline until);
  bool is_lowest(Deadline until);
  std::vector<int> missing_ranks(Deadline until);

  std::span<const std::string> key_of(size_t rank) const { return {&keys_[rank], 1}; }

  os::System& system_;
  Store& store_;
  const ExchangeOptions& options_;
  const Deadline deadline_;
  const std::string world_ = format("a world of {}", options_.world_size);
  std::string own_;  // the sentence in the entry of this rank
  std::vector<std::string> keys_;
};

Result<std::vector<StoreView>> AddressExchange::run() {
  CADRE_RETURN_IF_ERROR(publish_entry());
  // The rest of the time, after `patience`, is reserved for the search for the missing ranks.
  const TimePoint now = system_.now();
  const Duration budget = deadline_.remaining(now);
  const Deadline patience(now + (budget - std::min<Duration>(budget / 8, std::chrono::seconds(1))));
  const auto entries = read_entries_and_warn(patience);
  if (!entries.ok()) {
    if (entries.error().code() != ErrorCode::kTimeout) return entries.error();
    const std::vector<int> missing = missing_ranks(deadline_);
    const Error error(ErrorCode::kTimeout,
                      format("rank {} waited for {} at the store, but {} did not come before the "
                             "deadline; check that every rank was started with WORLD_SIZE={}",
                             options_.rank, world_, name_ranks(missing), options_.world_size));
    return missing.empty() ? error : error.with_culprit(missing.front());
  }
  std::vector<StoreView> views;
  for (size_t rank = 0; rank < entries->size(); ++rank) {
    CADRE_RETURN_IF_ERROR(check_entry(rank, (*entries)[rank]));
    views.push_back(view_of((*entries)[rank]));
  }
  return views;
}

Status AddressExchange::publish_entry() {
  const auto holder = store_.compare_set(keys_[static_cast<size_t>(options_.rank.value)], "",
                                         write_entry(own_, options_.view), deadline_);
  if (!holder.ok()) return holder.error();
  // An equal entry means that this process joins a second time.
  if (sentence_of(*holder) == own_) return {};
  return Error(ErrorCode::kInvalidArgument,
               format("RANK={} was given to two processes; the first is in {}, this one is in {}: "
                      "give every process its own RANK",
                      options_.rank, sentence_of(*holder), own_));
}

Status AddressExchange::check_entry(size_t rank, const std::string& entry) const {
  if (entry.starts_with(world_ + ",")) return {};
  return Error(ErrorCode::kInvalidArgument,
               format("rank {} joined {}, but rank {} joined {}: give all ranks the same "
                      "WORLD_SIZE",
                      options_.rank, own_, rank, sentence_of(entry)));
}

Result<std::vector<std::string>> AddressExchange::read_entries(Deadline until) {
  // Rank 0 is in every world, so a rank with another world size fails here instead of waiting for
  // ranks that do not exist.
  const auto first = store_.get(keys_[0], until);
  if (!first.ok()) return first.error();
  CADRE_RETURN_IF_ERROR(check_entry(0, *first));
  return store_.multi_get(keys_, until);
}

Result<std::vector<std::string>> AddressExchange::read_entries_and_warn(Deadline patience) {
  const Deadline warning = system_.deadline_in(options_.warn_after);
  auto entries = read_entries(patience.earlier(warning));
  if (entries.ok() || entries.error().code() != ErrorCode::kTimeout ||
      patience.has_passed(system_.now())) {
    return entries;
  }
  CADRE_RETURN_IF_ERROR(warn_of_wait(patience));
  return read_entries(patience);
}

// Logs which ranks are missing. Fails if a rank that has joined has another world size.
Status AddressExchange::warn_of_wait(Deadline until) {
  if (!is_lowest(until)) return {};
  const std::vector<int> missing = missing_ranks(until);
  for (size_t rank = 0; rank < keys_.size(); ++rank) {
    if (std::ranges::binary_search(missing, static_cast<int>(rank))) continue;
    const auto entry = store_.get(keys_[rank], until);
    if (!entry.ok()) return entry.error();
    CADRE_RETURN_IF_ERROR(check_entry(rank, *entry));
  }
  QuietLog(options_.log)
      .write(
          LogLevel::kWarning, "rendezvous",
          format("waiting for missing=\"{}\" world_size={} for_s={:g}; check that every rank was "
                 "started with WORLD_SIZE={}",
                 name_ranks(missing), options_.world_size,
                 std::chrono::duration<double>(options_.warn_after).count(), options_.world_size));
  return {};
}

// Returns whether no lower rank has joined. Only the lowest rank logs that it waits, so that the
// job logs it once and each rank makes few requests for it.
bool AddressExchange::is_lowest(Deadline until) {
  for (size_t rank = 0; rank < static_cast<size_t>(options_.rank.value); ++rank) {
    const Result<bool> is_there = store_.check(key_of(rank), until);
    if (!is_there.ok() || *is_there) return false;
  }
  return true;
}

std::vector<int> AddressExchange::missing_ranks(Deadline until) {
  const auto missing = find_missing_ranks(store_, keys_, until);
  return missing.ok() ? *missing : std::vector<int>();
}

}  // namespace

bool is_loopback_host(std::string_view host) {
  return host.empty() || host == "localhost" || host == "::1" || host.starts_with("127.") ||
         host.starts_with("::ffff:127.");
}

Result<std::vector<StoreView>> exchange_addresses(os::System& system, Store& store,
                                                  const ExchangeOptions& options,
                                                  Deadline deadline) {
  return AddressExchange(system, store, options, deadline).run();
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
