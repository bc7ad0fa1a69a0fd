// A client of a store in a server process: of a TcpStoreServer, to which it proves the job's token,
// or of c10d's TCPStore.
//
// Threads: any. While a call runs, no other call uses its connection, so a blocking wait of one
// thread delays no other thread. Idle connections are kept for later calls.
// Blocking: every call, until its time is over. Lifetime: no call may be in progress when the store
// is destroyed.
// A child made by fork() shares the connections, on which it would read its parent's answers. So
// its copy refuses all calls but clone(), and its copies of wills retract nothing.
// Errors: those of store.h; kInvalidArgument from connect() if the server runs another build, has
// another token, or is no store. Over c10d's protocol keys get c10d's prefix "/", so that they are
// the keys of Python's TCPStore. torch's own server takes values of at most 8 MiB.
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

// kNative is c10d's protocol with Cadre's own verbs; it requires the proof of the token. kC10d has
// only what every c10d server knows.
enum class StoreProtocol { kNative, kC10d };

struct TcpStoreOptions {
  os::Address address;
  os::Secret token;  // the job's secret; only kNative uses it
  StoreProtocol protocol = StoreProtocol::kNative;
  // Only connect() uses these members. The process that listens must send its greeting within
  // `greeting_timeout`; else connect() tries again. After `warn_after` a wait is logged, once.
  // `log` must outlive the store; if it is null, nothing is logged.
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
  // Tries again until the deadline while no process listens, because the server may start later, or
  // while the name does not resolve. `Time` is that of the verbs (store.h).
  template <StoreTime Time>
  static StoreResult<Time, std::unique_ptr<TcpStore>> connect(os::System& system,
                                                              const TcpStoreOptions& options,
                                                              Time time) {
    return finish(connect_until(system, options, deadline_of(system, time)), time);
  }
  // Programs call connect() instead.
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
  // Uses a connection that no other call uses meanwhile.
  Result<wire::StoreResponse> answer(wire::StoreRequest request, Deadline deadline) override;
  Result<std::unique_ptr<store::ServerConnection>> take_connection(Deadline deadline);

  const std::shared_ptr<const os::ForkMark> mark_;
  const TcpStoreOptions options_;
  const StoreRoute route_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<store::ServerConnection>> idle_;
};

}  // namespace cadre
