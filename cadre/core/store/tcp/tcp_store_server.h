// The store server of a job: one thread that serves the ranks of the job and clients of c10d.
//
// A client's first byte tells which it is. Ranks prove the job's token and run the same build.
// Clients of c10d cannot authenticate: they are served on loopback only, to processes of this user
// and of root, with keys of their own that ranks do not see, and can be switched off. Without a
// token ranks, too, must be of this user. Whoever has not proved
// itself within a second is dropped with a log line; so is the oldest of those that have not when
// there are more than max_strangers of them, or when no descriptor is left for the next client.
// start() raises the process's limit of open descriptors: each client has one.
//
// Threads: start() and close() from one thread; address() from any. Blocking: start() and close()
// for the time of a few system calls. Lifetime: the System and the log outlive the server.
// Errors: start(): kInvalidArgument for an address beyond loopback without a token, that of
// System::listen, or kUnavailable without a descriptor or thread. What clients do wrong never
// reaches the owner: they are answered or dropped. Source: the verbs of c10d::TCPStore; formats in
// docs/formats/store-tcp.md.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/log.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/os/socket.h"
#include "cadre/core/os/system.h"

namespace cadre {

struct TcpStoreServerOptions {
  os::Address address{os::Address::Kind::kTcp, "127.0.0.1", 0};
  os::Secret token;        // the job's secret; required when `address` is not on loopback
  bool serve_c10d = true;  // to peers on loopback
  // Limits on all keys and values of ranks, and on those of c10d clients, separately.
  size_t max_bytes = size_t{1} << 30;
  size_t max_c10d_bytes = size_t{128} << 20;
  size_t max_connections = 65536;  // the descriptor limit of the process may be lower
  // Connections that have not proved themselves yet, at a time; at least 1.
  size_t max_strangers = 1024;
  Duration greeting_timeout = std::chrono::seconds(1);
  // A client on another host of which nothing is heard for so long is gone; at least 3 s.
  Duration silence_limit = os::kMaxPeerSilence;
  LogSink* log = nullptr;  // null: dropped
};

class CADRE_EXPORT TcpStoreServer {
 public:
  static Result<std::unique_ptr<TcpStoreServer>> start(os::System& system,
                                                       const TcpStoreServerOptions& options);
  class Impl;  // private to store
  explicit TcpStoreServer(std::unique_ptr<Impl> impl);
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

  // Where clients connect, with the port that was chosen.
  os::Address address() const;
  // Drops all clients and joins the thread. Idempotent.
  void close();

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace cadre
