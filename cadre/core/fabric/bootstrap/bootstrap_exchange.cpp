#include "cadre/core/fabric/bootstrap/bootstrap_exchange.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/fabric/bootstrap/dial.h"
#include "cadre/core/rendezvous/missing_ranks.h"

namespace cadre {
namespace {

// The time after which a rank in the second or a later attempt checks whether the rank that
// reported the failure of the previous attempt has joined this one.
constexpr Duration kRetryPatience = std::chrono::seconds(5);
// The largest number of keys in one wait request to the store. A wait that times out is repeated
// with all its keys.
constexpr size_t kKeysPerWait = 64;

Status check_versions(std::span<const wire::RankAddress> rank_addresses) {
  for (size_t i = 0; i < rank_addresses.size(); ++i) {
    if (rank_addresses[i].version != rank_addresses[0].version) {
      return Error(ErrorCode::kInvalidArgument,
                   format("{} runs Cadre {}, {} runs Cadre {}: use one build on all ranks",
                          describe_rank(rank_addresses[i], static_cast<int>(i)),
                          rank_addresses[i].version, describe_rank(rank_addresses[0], 0),
                          rank_addresses[0].version))
          .with_culprit(static_cast<int>(i));
    }
  }
  return {};
}

}  // namespace

BootstrapExchange::BootstrapExchange(Context context)
    : context_(std::move(context)), prefix_(prefix_of(context_.group_prefix, context_.attempt)) {}

std::string BootstrapExchange::prefix_of(const std::string& group_prefix, uint64_t attempt) {
  return format("{}{}/", group_prefix, attempt);
}

std::string BootstrapExchange::address_key(int rank) const {
  return format("{}address/{}", prefix_, rank);
}

std::string BootstrapExchange::ticket_key(int rank) const {
  return format("{}ticket/{}", prefix_, rank);
}

std::vector<std::string> BootstrapExchange::address_keys() const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < context_.membership.world_size; ++rank)
    keys.push_back(address_key(rank));
  return keys;
}

Status BootstrapExchange::publish(const wire::RankAddress& rank_address, Deadline deadline) {
  return context_.membership.store->set(address_key(context_.membership.rank),
                                        wire::encode_rank_address(rank_address), deadline);
}

Result<std::vector<wire::RankAddress>> BootstrapExchange::collect(Deadline deadline) {
  const auto values = wait_for(address_keys(), deadline);
  if (!values.ok())
    return is_own_timeout(values.error(), deadline) ? missing_addresses(values.error())
                                                    : values.error();
  std::vector<wire::RankAddress> rank_addresses;
  for (const std::string& value : *values) {
    auto rank_address = wire::decode_rank_address(value);
    if (!rank_address.ok())
      return rank_address.error().with_context(format("address of rank {}", rank_addresses.size()));
    rank_addresses.push_back(std::move(rank_address).value());
  }
  CADRE_RETURN_IF_ERROR(check_versions(rank_addresses));
  return rank_addresses;
}

Status BootstrapExchange::hand_out(std::span<const wire::Ticket> tickets, Deadline deadline) {
  std::vector<std::string> keys;
  std::vector<std::string> values;
  for (size_t i = 0; i < tickets.size(); ++i) {
    keys.push_back(ticket_key(static_cast<int>(i) + 1));
    values.push_back(wire::encode_ticket(tickets[i]));
  }
  return context_.membership.store->multi_set(keys, values, deadline);
}

Result<wire::Ticket> BootstrapExchange::await_ticket(Deadline deadline) {
  const std::string key = ticket_key(context_.membership.rank);
  const auto values = wait_for(std::span(&key, 1), deadline);
  if (!values.ok())
    return is_own_timeout(values.error(), deadline) ? missing_ticket(values.error())
                                                    : values.error();
  auto ticket = wire::decode_ticket(values->front());
  if (!ticket.ok()) return ticket.error();
  const bool is_possible = ticket->sponsor >= 0 && ticket->sponsor != context_.membership.rank &&
                           ticket->sponsor < context_.membership.world_size;
  if (is_possible) return ticket;
  return Error(ErrorCode::kCorruption,
               format("store key \"{}\" names the invalid rank {} as the sponsor of rank {}", key,
                      ticket->sponsor, context_.membership.rank));
}

// Returns the values of all keys. In the second or a later attempt, calls check_retry() once if the
// values have not come within kRetryPatience.
Result<std::vector<std::string>> BootstrapExchange::wait_for(std::span<const std::string> keys,
                                                             Deadline deadline) {
  std::vector<std::string> values;
  bool may_look = context_.attempt > 0;
  const Deadline patience = deadline.earlier(context_.system.deadline_in(kRetryPatience));
  while (values.size() < keys.size()) {
    const auto wanted =
        keys.subspan(values.size(), std::min(kKeysPerWait, keys.size() - values.size()));
    auto read = context_.watch.multi_get(wanted, may_look ? patience : deadline);
    if (read.ok()) {
      std::ranges::move(*read, std::back_inserter(values));
      continue;
    }
    const bool is_late = deadline.has_passed(context_.system.now());
    if (!may_look || is_late || read.error().code() != ErrorCode::kTimeout) return read.error();
    CADRE_RETURN_IF_ERROR(check_retry());
    may_look = false;
  }
  return values;
}

// Returns whether the error means that this rank's own deadline has passed. The error code is not
// enough, because another rank may have reported its own kTimeout.
bool BootstrapExchange::is_own_timeout(const Error& error, Deadline deadline) const {
  return error.code() == ErrorCode::kTimeout && !context_.watch.was_told() &&
         deadline.has_passed(context_.system.now());
}

// Returns the error of the previous attempt, unless the rank that reported it has joined this
// attempt.
Status BootstrapExchange::check_retry() const {
  const Deadline deadline = context_.system.deadline_in(BootstrapWatch::kStoreTime);
  BootstrapWatch earlier(context_.system, context_.membership,
                         prefix_of(context_.group_prefix, context_.attempt - 1));
  const Status trouble = earlier.look_for_report(deadline);
  if (trouble.ok()) return {};
  const int reporter = trouble.error().details().reporter.value_or(-1);
  if (reporter < 0 || reporter >= context_.membership.world_size) return {};
  const std::string key = address_key(reporter);
  const auto has_come = context_.membership.store->check(std::span(&key, 1), deadline);
  return has_come.ok() && *has_come ? Status() : trouble;
}

// Returns an error that names the ranks that have not published their addresses. It asks the store
// for the keys, which may take up to kStoreTime beyond the deadline.
Error BootstrapExchange::missing_addresses(const Error& error) const {
  const Deadline deadline = context_.system.deadline_in(BootstrapWatch::kStoreTime);
  const auto missing = find_missing_ranks(*context_.membership.store, address_keys(), deadline);
  if (!missing.ok() || (missing->empty() && context_.membership.rank == 0)) return error;
  if (missing->empty()) {
    return Error(ErrorCode::kTimeout,
                 format("all {} ranks came, but rank 0 did not tell rank {} before the deadline "
                        "where to connect. Look at its log, or give more time",
                        context_.membership.world_size, context_.membership.rank))
        .with_culprit(0);
  }
  return Error(ErrorCode::kTimeout,
               format("{} of {} ranks did not come before the deadline: {}. Look at their logs, or "
                      "give more time",
                      missing->size(), context_.membership.world_size, name_ranks(*missing)))
      .with_culprit(missing->front());
}

// Rank 0 knows which ranks are missing and reports them. This rank asks the store for them only if
// rank 0 is missing, too, or has reported nothing.
Error BootstrapExchange::missing_ticket(const Error& error) {
  const std::string key = address_key(0);
  const Deadline deadline = context_.system.deadline_in(BootstrapWatch::kStoreTime);
  const auto has_come = context_.membership.store->check(std::span(&key, 1), deadline);
  if (has_come.ok() && *has_come) {
    const Status trouble = context_.watch.await_report(BootstrapWatch::kStoreTime);
    if (!trouble.ok()) return trouble.error();
  }
  return missing_addresses(error);
}

Status BootstrapExchange::erase(Deadline deadline) {
  std::vector<std::string> keys = {address_key(context_.membership.rank)};
  if (context_.membership.rank != 0) keys.push_back(ticket_key(context_.membership.rank));
  for (const std::string& key : keys) {
    const auto erased = context_.membership.store->erase(key, deadline);
    if (!erased.ok()) return erased.error();
  }
  return {};
}

}  // namespace cadre
