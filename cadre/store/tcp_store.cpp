#include "cadre/store/tcp_store.h"

#include <algorithm>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/store/checks.h"
#include "cadre/store/tcp/server_connection.h"

namespace cadre {

static_assert(kMaxStoreKeyBytes == wire::kMaxKeyBytes);
static_assert(kMaxStoreValueBytes == wire::kMaxValueBytes);

namespace {

using wire::StoreRequest;
using wire::StoreResponse;
using wire::StoreVerb;

// More calls at once than this close their connection afterwards.
constexpr size_t kMaxIdleConnections = 4;
constexpr Duration kRetryPause = std::chrono::milliseconds(20);
constexpr Duration kMaxRetryPause = std::chrono::milliseconds(500);

std::vector<std::string> to_strings(std::span<const std::string> texts) {
  return {texts.begin(), texts.end()};
}

// A lost stream is told with whose it was and what was asked.
Error explain(const Error& error, const os::Address& address, StoreVerb verb,
              const std::vector<std::string>& keys) {
  const std::string what = keys.empty() ? std::string() : format(" \"{}\"", keys.front());
  switch (error.code()) {
    case ErrorCode::kTimeout:
      return store_timeout(wire::to_string(verb), keys);
    case ErrorCode::kPeerLost:
    case ErrorCode::kUnavailable:
      return Error(ErrorCode::kPeerLost,
                   format("store {}{}: the store server at {} is gone ({}); the process that hosts "
                          "it, the launcher or rank 0, has ended",
                          wire::to_string(verb), what, address.to_string(), error.message()));
    default:
      return error.with_context(
          format("store {}{} at {}", wire::to_string(verb), what, address.to_string()));
  }
}

// Whether a later attempt to connect may go better.
bool may_pass(ErrorCode code) {
  return code == ErrorCode::kUnavailable || code == ErrorCode::kPeerLost ||
         code == ErrorCode::kTimeout;
}

void warn_of_wait(const TcpStoreOptions& options, const Error& reason) {
  if (options.log == nullptr) return;
  options.log->write(
      LogLevel::kWarning, "store",
      format("waiting to connect to={} for_s={:g} reason=\"{}\"; check that rank 0 or the launcher "
             "is running and that MASTER_ADDR and MASTER_PORT name it",
             options.address.to_string(), std::chrono::duration<double>(options.warn_after).count(),
             reason.message()));
}

class ConnectionWill final : public StoreWill {
 public:
  ConnectionWill(os::System& system, std::unique_ptr<store::ServerConnection> connection)
      : system_(system), connection_(std::move(connection)) {}
  ~ConnectionWill() override {
    try {
      // A server that is gone carries nothing out either.
      (void)connection_->call({.verb = StoreVerb::kRetractWill}, system_.deadline_in(kRetractTime));
    } catch (...) {
      // Out of memory, or in the simulator killed just now: then the will is carried out.
    }
  }
  ConnectionWill(const ConnectionWill&) = delete;
  ConnectionWill& operator=(const ConnectionWill&) = delete;

 private:
  static constexpr Duration kRetractTime = std::chrono::milliseconds(500);

  os::System& system_;
  std::unique_ptr<store::ServerConnection> connection_;
};

}  // namespace

Result<std::unique_ptr<TcpStore>> TcpStore::connect(os::System& system,
                                                    const TcpStoreOptions& options,
                                                    Deadline deadline) {
  const std::unique_ptr<os::Waiter> nap = system.make_waiter();
  const std::string where = format("connecting to the store at {}", options.address.to_string());
  const Deadline warning = system.deadline_in(options.warn_after);
  bool has_warned = false;
  Duration pause = kRetryPause;
  while (true) {
    StoreRoute route;
    // An attempt may last until its deadline, so the first ones end when it is time to warn.
    auto connection = store::dial_first(system, options,
                                        has_warned ? deadline : deadline.earlier(warning), route);
    if (connection.ok()) {
      return std::make_unique<TcpStore>(system, options, std::move(connection).value(), route);
    }
    if (!may_pass(connection.error().code())) return connection.error().with_context(where);
    const TimePoint now = system.now();
    if (deadline.has_passed(now)) {
      return Error(ErrorCode::kTimeout,
                   format("{}: no store answered before the deadline ({}); check that rank 0 or "
                          "the launcher is running and that MASTER_ADDR and MASTER_PORT name it",
                          where, connection.error().message()));
    }
    if (!has_warned && warning.has_passed(now)) {
      has_warned = true;
      warn_of_wait(options, connection.error());
    }
    nap->park(deadline.earlier(system.deadline_in(pause)));
    pause = std::min(2 * pause, kMaxRetryPause);
  }
}

TcpStore::TcpStore(os::System& system, const TcpStoreOptions& options,
                   std::unique_ptr<store::ServerConnection> first, const StoreRoute& route)
    : system_(system), options_(options), route_(route) {
  idle_.push_back(std::move(first));
}

TcpStore::~TcpStore() = default;

Result<std::unique_ptr<store::ServerConnection>> TcpStore::take_connection(Deadline deadline) {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      auto connection = std::move(idle_.back());
      idle_.pop_back();
      return connection;
    }
  }
  return store::dial(system_, options_, deadline);
}

Result<StoreResponse> TcpStore::call(StoreRequest request, Deadline deadline) {
  const StoreVerb verb = request.verb;
  const std::vector<std::string> keys = request.keys;
  auto connection = take_connection(deadline);
  if (!connection.ok()) return explain(connection.error(), options_.address, verb, keys);
  Result<StoreResponse> response = (*connection)->call(std::move(request), deadline);
  if ((*connection)->is_usable()) {
    const std::lock_guard lock(mutex_);
    if (idle_.size() < kMaxIdleConnections) idle_.push_back(std::move(connection).value());
  }
  if (!response.ok()) return explain(response.error(), options_.address, verb, keys);
  if (response->error) return *response->error;
  return response;
}

Status TcpStore::call_for_nothing(StoreRequest request, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(call(std::move(request), deadline));
  return {};
}

Result<int64_t> TcpStore::call_for_number(StoreRequest request, Deadline deadline) {
  const Result<StoreResponse> response = call(std::move(request), deadline);
  if (!response.ok()) return response.error();
  return response->number;
}

Result<std::vector<std::string>> TcpStore::call_for_values(StoreRequest request, size_t count,
                                                           Deadline deadline) {
  const StoreVerb verb = request.verb;
  Result<StoreResponse> response = call(std::move(request), deadline);
  if (!response.ok()) return response.error();
  if (response->values.size() == count) return std::move(response->values);
  return Error(
      ErrorCode::kCorruption,
      format("the store server at {} answered {} with {} values, expected {}",
             options_.address.to_string(), wire::to_string(verb), response->values.size(), count));
}

Status TcpStore::set(std::string_view key, std::string_view value, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(key, value));
  return call_for_nothing(
      {.verb = StoreVerb::kSet, .keys = {std::string(key)}, .values = {std::string(value)}},
      deadline);
}

Result<std::string> TcpStore::get(std::string_view key, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(key));
  auto values = call_for_values({.verb = StoreVerb::kGet, .keys = {std::string(key)}}, 1, deadline);
  if (!values.ok()) return values.error();
  return std::move(values->front());
}

Result<int64_t> TcpStore::add(std::string_view key, int64_t amount, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(key));
  return call_for_number({.verb = StoreVerb::kAdd, .amount = amount, .keys = {std::string(key)}},
                         deadline);
}

Status TcpStore::wait(std::span<const std::string> keys, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_keys(keys));
  return call_for_nothing({.verb = StoreVerb::kWait, .keys = to_strings(keys)}, deadline);
}

Result<bool> TcpStore::check(std::span<const std::string> keys, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_keys(keys));
  const auto number =
      call_for_number({.verb = StoreVerb::kCheck, .keys = to_strings(keys)}, deadline);
  if (!number.ok()) return number.error();
  return *number == 1;
}

Result<std::string> TcpStore::compare_set(std::string_view key, std::string_view expected,
                                          std::string_view desired, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(key, expected));
  CADRE_RETURN_IF_ERROR(check_store_entry(key, desired));
  auto values = call_for_values({.verb = StoreVerb::kCompareSet,
                                 .keys = {std::string(key)},
                                 .values = {std::string(expected), std::string(desired)}},
                                1, deadline);
  if (!values.ok()) return values.error();
  return std::move(values->front());
}

Result<bool> TcpStore::erase(std::string_view key, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(key));
  const auto number =
      call_for_number({.verb = StoreVerb::kErase, .keys = {std::string(key)}}, deadline);
  if (!number.ok()) return number.error();
  return *number == 1;
}

Result<int64_t> TcpStore::num_keys(Deadline deadline) {
  return call_for_number({.verb = StoreVerb::kNumKeys}, deadline);
}

Status TcpStore::append(std::string_view key, std::string_view value, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(key, value));
  return call_for_nothing(
      {.verb = StoreVerb::kAppend, .keys = {std::string(key)}, .values = {std::string(value)}},
      deadline);
}

Result<std::vector<std::string>> TcpStore::multi_get(std::span<const std::string> keys,
                                                     Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_keys(keys));
  return call_for_values({.verb = StoreVerb::kMultiGet, .keys = to_strings(keys)}, keys.size(),
                         deadline);
}

Status TcpStore::multi_set(std::span<const std::string> keys, std::span<const std::string> values,
                           Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entries(keys, values));
  return call_for_nothing(
      {.verb = StoreVerb::kMultiSet, .keys = to_strings(keys), .values = to_strings(values)},
      deadline);
}

Result<std::vector<std::string>> TcpStore::list_keys(Deadline deadline) {
  Result<StoreResponse> response = call({.verb = StoreVerb::kListKeys}, deadline);
  if (!response.ok()) return response.error();
  return std::move(response->values);
}

Status TcpStore::queue_push(std::string_view queue, std::string_view value, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(queue, value));
  return call_for_nothing(
      {.verb = StoreVerb::kQueuePush, .keys = {std::string(queue)}, .values = {std::string(value)}},
      deadline);
}

Result<std::string> TcpStore::queue_pop(std::string_view queue, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(queue));
  auto values =
      call_for_values({.verb = StoreVerb::kQueuePop, .keys = {std::string(queue)}}, 1, deadline);
  if (!values.ok()) return values.error();
  return std::move(values->front());
}

Result<std::optional<std::string>> TcpStore::try_queue_pop(std::string_view queue,
                                                           Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(queue));
  Result<StoreResponse> response =
      call({.verb = StoreVerb::kTryQueuePop, .keys = {std::string(queue)}}, deadline);
  if (!response.ok()) return response.error();
  if (response->number == 0 || response->values.empty()) return std::optional<std::string>();
  return std::optional(std::move(response->values.front()));
}

Result<int64_t> TcpStore::queue_length(std::string_view queue, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(queue));
  return call_for_number({.verb = StoreVerb::kQueueLength, .keys = {std::string(queue)}}, deadline);
}

Status TcpStore::barrier(std::string_view key, int64_t num_arrivals, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_barrier(key, num_arrivals));
  return call_for_nothing(
      {.verb = StoreVerb::kBarrier, .amount = num_arrivals, .keys = {std::string(key)}}, deadline);
}

Result<std::unique_ptr<StoreWill>> TcpStore::leave_will(std::string_view key,
                                                        std::string_view value, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(key, value));
  if (options_.protocol == StoreProtocol::kC10d) return std::unique_ptr<StoreWill>();
  const std::vector<std::string> keys = {std::string(key)};
  const auto explained = [&](const Error& error) {
    return explain(error, options_.address, StoreVerb::kLeaveWill, keys);
  };
  // A connection of its own: its end is the message.
  auto connection = store::dial(system_, options_, deadline);
  if (!connection.ok()) return explained(connection.error());
  const Result<StoreResponse> response =
      (*connection)
          ->call({.verb = StoreVerb::kLeaveWill, .keys = keys, .values = {std::string(value)}},
                 deadline);
  if (!response.ok()) return explained(response.error());
  if (response->error) return *response->error;
  return std::unique_ptr<StoreWill>(
      std::make_unique<ConnectionWill>(system_, std::move(connection).value()));
}

Result<std::shared_ptr<Store>> TcpStore::clone(Deadline deadline) {
  Result<std::unique_ptr<TcpStore>> other = connect(system_, options_, deadline);
  if (!other.ok()) return other.error();
  return std::shared_ptr<Store>(std::move(other).value());
}

}  // namespace cadre
