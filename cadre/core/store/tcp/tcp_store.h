// A client of a store server: of a TcpStoreServer, to which it proves that it has the job's token,
// or of c10d's TCPStore.
//
// Threads: any. While a call runs, no other call uses its connection, so a blocking wait of one
// thread delays no other thread. Idle connections are kept for later calls.
// Blocking: every call, until its deadline. Lifetime: no call may be in progress when the store is
// destroyed.
// A child made by fork() shares the connections and would read its parent's answers. So in the
// child all calls but clone() fail, and destroying a StoreWill does not retract the will.
// Errors: those of store.h; kInvalidArgument from connect() if the server runs another build, has
// another token, or is no store. With c10d's protocol each key gets the prefix "/", as in c10d, so
// that Python and C++ ranks use the same keys. torch's own server accepts values of at most 8 MiB.
// Source: c10d::TCPStore.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cadre/core/base/log.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/store.h"

namespace cadre {

namespace os {
class ForkMark;
}  // namespace os

namespace store {
class ServerConnection;
}  // namespace store

// kNative is c10d's protocol with additional verbs; the client must prove that it has the token.
// kC10d has only the verbs of c10d.
enum class StoreProtocol { kNative, kC10d };

struct TcpStoreOptions {
  os::Address address;
  os::Secret token;  // the job's secret; only kNative uses it
  StoreProtocol protocol = StoreProtocol::kNative;
  // Only connect() uses these members. If the server does not send its greeting within
  // `greeting_timeout`, connect() tries again. If connect() takes longer than `warn_after`, it logs
  // a warning once. `log` must outlive the store; if it is null, no warning is logged.
  Duration greeting_timeout = std::chrono::seconds(5);
  Duration warn_after = kStoreWarnTime;
  LogSink* log = nullptr;
};

// The numeric addresses of the two ends of a client's first connection, also if the server was
// given by name.
struct StoreRoute {
  os::Address local;
  os::Address server;
};

class CADRE_EXPORT TcpStore final : public Store {
 public:
  // Tries again until the deadline while no process listens or the name does not resolve, because
  // the server may start later. `Time` is a Duration or a Deadline, as for the verbs (store.h).
  template <StoreTime Time>
  static StoreResult<Time, std::unique_ptr<TcpStore>> connect(os::System& system,
                                                              const TcpStoreOptions& options,
                                                              Time time) {
    return finish(connect_until(system, options, deadline_of(system, time)), time);
  }
  // Called by connect() only.
  TcpStore(os::System& system, const TcpStoreOptions& options,
           std::unique_ptr<store::ServerConnection> first, const StoreRoute& route);
  ~TcpStore() override;

  Result<std::unique_ptr<StoreWill>> leave_will(std::string_view key, std::string_view value,
                                                Deadline deadline) override;
  Result<std::shared_ptr<Store>> clone(Deadline deadline) override;

  const StoreRoute& route() const { return route_; }

 private:
  static Result<std::unique_ptr<TcpStore>> connect_until(os::System& system,
                                                         const TcpStoreOptions& options,
                                                         Deadline deadline);
  // Executes a request over a connection that no other call uses at the same time.
  Result<wire::StoreResponse> answer(wire::StoreRequest request, Deadline deadline) override;
  Result<std::unique_ptr<store::ServerConnection>> take_connection(Deadline deadline);

  const std::shared_ptr<const os::ForkMark> mark_;
  const TcpStoreOptions options_;
  const StoreRoute route_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<store::ServerConnection>> idle_;
};

}  // namespace cadre
