#include "cadre/core/store/tcp/tcp_store.h"

#include <algorithm>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/base/quiet_log.h"
#include "cadre/core/os/host/fork_mark.h"
#include "cadre/core/store/checks.h"
#include "cadre/core/store/tcp/server_connection.h"

namespace cadre {

namespace {

using wire::StoreRequest;
using wire::StoreResponse;
using wire::StoreVerb;

// The number of idle connections that are kept for later calls; a call closes its connection if
// there are already so many.
constexpr size_t kMaxIdleConnections = 4;
constexpr Duration kRetryPause = std::chrono::milliseconds(20);
constexpr Duration kMaxRetryPause = std::chrono::milliseconds(500);

// Adds the request and the server's address to an error of the connection.
Error explain(const Error& error, const TcpStoreOptions& options, const StoreRequest& request) {
  const os::Address& address = options.address;
  const auto& [verb, amount, keys, values] = request;
  const std::string what = keys.empty() ? std::string() : format(" \"{}\"", keys.front());
  switch (error.code()) {
    case ErrorCode::kTimeout:
      // A c10d server sends no byte until the keys or the item are there, so its silence is no sign
      // that it is stopped.
      if (options.protocol == StoreProtocol::kC10d) return store_timeout(request, keys);
      return Error(ErrorCode::kTimeout,
                   format("store {}{}: the store server at {} did not answer before the deadline; "
                          "the process that hosts it, the launcher or rank 0, is stopped or cannot "
                          "be reached",
                          wire::to_string(verb), what, address.to_string()));
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

// Returns whether a later attempt to connect may succeed.
bool may_pass(ErrorCode code) {
  return code == ErrorCode::kUnavailable || code == ErrorCode::kPeerLost ||
         code == ErrorCode::kTimeout;
}

void warn_of_wait(const TcpStoreOptions& options, const Error& reason) {
  QuietLog(options.log)
      .write(LogLevel::kWarning, "store",
             format("waiting to connect to={} for_s={:g} reason=\"{}\"; check that rank 0 or the "
                    "launcher "
                    "is running and that MASTER_ADDR and MASTER_PORT name it",
                    options.address.to_string(),
                    std::chrono::duration<double>(options.warn_after).count(), reason.message()));
}

class ConnectionWill final : public StoreWill {
 public:
  ConnectionWill(os::System& system, std::shared_ptr<const os::ForkMark> mark,
                 std::unique_ptr<store::ServerConnection> connection)
      : system_(system), mark_(std::move(mark)), connection_(std::move(connection)) {}
  ~ConnectionWill() override {
    if (mark_->is_in_child()) return;  // the will belongs to the parent
    try {
      // An error is ignored: if the server is dead, it cannot execute the will.
      (void)connection_->call({.verb = StoreVerb::kRetractWill}, system_.deadline_in(kRetractTime));
    } catch (...) {
      // The process is out of memory, or the simulator has just killed this rank. In both cases the
      // server executes the will.
    }
  }
  ConnectionWill(const ConnectionWill&) = delete;
  ConnectionWill& operator=(const ConnectionWill&) = delete;

 private:
  static constexpr Duration kRetractTime = std::chrono::milliseconds(500);

  os::System& system_;
  const std::shared_ptr<const os::ForkMark> mark_;
  std::unique_ptr<store::ServerConnection> connection_;
};

}  // namespace

Result<std::unique_ptr<TcpStore>> TcpStore::connect_until(os::System& system,
                                                          const TcpStoreOptions& options,
                                                          Deadline deadline) {
  const std::unique_ptr<os::Waiter> nap = system.make_waiter();
  const std::string where = format("connecting to the store at {}", options.address.to_string());
  const Deadline warning = system.deadline_in(options.warn_after);
  bool has_warned = false;
  Duration pause = kRetryPause;
  while (true) {
    StoreRoute route;
    // An attempt may last until its deadline, so the deadline of the first attempts is the time of
    // the warning.
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
    : Store(system), mark_(std::make_shared<os::ForkMark>()), options_(options), route_(route) {
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
  // Even a call with a timeout of 0 may need a new connection, because a call of another thread
  // uses the only one. So connecting gets at least kCancelTime.
  return store::dial(system(), options_, deadline.later(system().deadline_in(store::kCancelTime)));
}

Result<StoreResponse> TcpStore::answer(StoreRequest request, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_not_forked(*mark_, request.verb));
  const StoreRequest asked{.verb = request.verb, .amount = request.amount, .keys = request.keys};
  auto connection = take_connection(deadline);
  if (!connection.ok()) return explain(connection.error(), options_, asked);
  Result<StoreResponse> response = (*connection)->call(std::move(request), deadline);
  if ((*connection)->is_usable()) {
    const std::lock_guard lock(mutex_);
    if (idle_.size() < kMaxIdleConnections) idle_.push_back(std::move(connection).value());
  }
  if (!response.ok()) return explain(response.error(), options_, asked);
  return response;
}

Result<std::unique_ptr<StoreWill>> TcpStore::leave_will(std::string_view key,
                                                        std::string_view value, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(key, value));
  CADRE_RETURN_IF_ERROR(check_not_forked(*mark_, StoreVerb::kLeaveWill));
  if (options_.protocol == StoreProtocol::kC10d) return std::unique_ptr<StoreWill>();
  const StoreRequest will{
      .verb = StoreVerb::kLeaveWill, .keys = {std::string(key)}, .values = {std::string(value)}};
  const auto explained = [&](const Error& error) { return explain(error, options_, will); };
  // The will has a connection of its own, because the server executes the will when this connection
  // ends.
  auto connection = store::dial(system(), options_, deadline);
  if (!connection.ok()) return explained(connection.error());
  const Result<StoreResponse> response = (*connection)->call(will, deadline);
  if (!response.ok()) return explained(response.error());
  if (response->error) return *response->error;
  return std::unique_ptr<StoreWill>(
      std::make_unique<ConnectionWill>(system(), mark_, std::move(connection).value()));
}

Result<std::shared_ptr<Store>> TcpStore::clone(Deadline deadline) {
  Result<std::unique_ptr<TcpStore>> other = connect(system(), options_, deadline);
  if (!other.ok()) return other.error();
  return std::shared_ptr<Store>(std::move(other).value());
}

}  // namespace cadre
