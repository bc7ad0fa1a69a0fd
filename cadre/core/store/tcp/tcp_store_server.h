// The store server of a job: one thread that serves the ranks of the job and clients of c10d.
//
// A client's first byte shows of which kind it is. Ranks prove the job's token and run the same
// build. Clients of c10d cannot authenticate: they are served on loopback only, if their process
// belongs to this user or to root, with keys that are separate from those of ranks; serving them
// can be switched off. If there is no token, ranks, too, must be processes of this user. A client
// that has not proved itself within a second is dropped with a log line. The oldest of these
// clients is also dropped if there are more than max_strangers of them, or if no descriptor is left
// for the next client. start() raises the process's limit of open descriptors, because each client
// has one.
//
// Threads: start() and close() from one thread; address() from any. Blocking: start() and close()
// for the time of a few system calls. Lifetime: the System and the log must outlive the server.
// Errors: start(): kInvalidArgument for an address beyond loopback without a token, that of
// System::listen, or kUnavailable without a descriptor or thread. Errors of clients never reach the
// owner: clients are answered or dropped. Source: the verbs of c10d::TCPStore; formats in
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
  os::Secret token;        // the job's secret, which is required if `address` is not on loopback
  bool serve_c10d = true;  // the server also serves c10d clients on loopback
  // The limit on all keys and values of ranks, and separately on those of c10d clients.
  size_t max_bytes = size_t{1} << 30;
  size_t max_c10d_bytes = size_t{128} << 20;
  size_t max_connections = 65536;  // the process's limit on descriptors may be lower
  // The number of connections that may not have proved themselves yet; at least 1.
  size_t max_strangers = 1024;
  Duration greeting_timeout = std::chrono::seconds(1);
  // A client on another host counts as gone if it was silent for this time, which is at least 3 s.
  Duration silence_limit = os::kMaxPeerSilence;
  LogSink* log = nullptr;  // if null, nothing is logged
};

class CADRE_EXPORT TcpStoreServer {
 public:
  static Result<std::unique_ptr<TcpStoreServer>> start(os::System& system,
                                                       const TcpStoreServerOptions& options);
  class Impl;  // only store/ uses it
  explicit TcpStoreServer(std::unique_ptr<Impl> impl);
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

  // Returns the address at which clients connect, with the port that was chosen.
  os::Address address() const;
  // Drops all clients and joins the thread. A second call does nothing.
  void close();

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace cadre
