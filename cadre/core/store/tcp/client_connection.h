// One accepted connection of the store server: its socket, its buffers and its session. The session
// is made when the first byte has shown whether the client is a rank or a c10d client.
//
// Threads: the server's. Blocking: never. Lifetime: the destructor cancels the request that waits.
// Errors: an error is the reason why the server must drop the client.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/os/socket.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/tcp/session.h"
#include "cadre/core/wire/challenge.h"

namespace cadre::store {

// What a connection needs from its server. All of it must outlive the connection.
struct ServerContext {
  KeyTable& table;  // the keys of ranks, which have proved that they have the job's token
  // The keys of c10d clients, which cannot authenticate. They are separate from those of ranks.
  KeyTable& c10d_table;
  const os::Secret& token;
  bool serve_c10d;
  const std::vector<std::string>& c10d_hosts;
  Duration silence_limit;
  os::System& system;
};

class ClientConnection {
 public:
  ClientConnection(const ServerContext& context, uint32_t number,
                   std::unique_ptr<os::Socket> socket, Deadline greeting_deadline);

  // Returns the socket and the readiness for which the server polls.
  os::PollItem interest() const;
  // Reads requests, answers them and sends the answers, as far as possible without blocking.
  Status on_ready(const os::PollItem& item);
  // Answers the request that waits with the ticket. Fails if the client is gone.
  Status on_ticket(KeyTable::Ticket ticket);
  // Sends the buffered answers as far as the socket takes them; on_ready() sends the rest.
  Status flush();

  bool is_accepted() const { return session_ && session_->is_accepted(); }
  bool has_greeted() const { return session_ && session_->has_greeted(); }
  Deadline greeting_deadline() const { return greeting_deadline_; }
  std::string peer() const { return socket_->peer_address().to_string(); }

 private:
  Status receive();
  Status serve();
  // Makes the session for a rank or for a c10d client, according to the first byte.
  Status make_session();
  // Checks whether this client of c10d's protocol, which cannot authenticate, may be served.
  Status check_c10d_client() const;

  const ServerContext& context_;
  TicketSource tickets_;
  std::unique_ptr<os::Socket> socket_;
  Deadline greeting_deadline_;
  wire::StreamBuffer in_;
  wire::StreamBuffer out_;
  std::optional<Session> session_;
};

bool is_loopback(const os::Address& address);

}  // namespace cadre::store
