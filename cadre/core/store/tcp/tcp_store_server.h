// The store server of a job: one thread that serves the ranks of the job and clients of c10d.
//
// The first byte of a client shows whether it is a rank or a c10d client. Ranks must prove that
// they have the job's token, and run the same build. Clients of c10d cannot authenticate: those of
// this host are served if their process belongs to this user or to root, those of other hosts if
// the options name their host. Their keys are separate from those of ranks. This service can be
// switched off. If there is no token, ranks, too, must be processes of this user. A "stranger" is a
// client whose handshake is not complete; it is dropped, with a log line, after a second. The
// oldest stranger is also dropped if there are more than max_strangers, or if no descriptor is left
// for the next client. start() raises the process's limit of open descriptors, because each client
// has one.
//
// Threads: start() and close() from one thread; address() from any. Blocking: start() and close(),
// for a few system calls. Lifetime: the System and the log must outlive the server. Errors of
// start(): kInvalidArgument if the address is not on loopback and there is no token; the error of
// System::listen; kUnavailable if no descriptor or thread is left. Errors of clients never reach
// the owner: clients are answered or dropped. Source: the verbs of c10d::TCPStore; formats in
// docs/formats/store-tcp.md.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

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
  bool serve_c10d = true;  // whether c10d clients on loopback are served
  // Numeric addresses of other hosts whose c10d clients are served, too. Such clients prove
  // nothing, so every user of these hosts can read and write their keys.
  std::vector<std::string> c10d_hosts = {};
  // The limits on the size of all keys and values of ranks, and of those of c10d clients.
  size_t max_bytes = size_t{1} << 30;
  size_t max_c10d_bytes = size_t{128} << 20;
  size_t max_connections = 65536;  // the process's limit on descriptors may be lower
  // The number of connections whose handshake may be incomplete at one time; at least 1.
  size_t max_strangers = 1024;
  Duration greeting_timeout = std::chrono::seconds(1);
  // A client on another host that does not acknowledge bytes for this time counts as dead; at least
  // 3 s.
  Duration silence_limit = os::kMaxPeerSilence;
  LogSink* log = nullptr;  // if null, nothing is logged
};

class CADRE_EXPORT TcpStoreServer {
 public:
  static Result<std::unique_ptr<TcpStoreServer>> start(os::System& system,
                                                       const TcpStoreServerOptions& options);
  class Impl;  // used only by files of this folder
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
