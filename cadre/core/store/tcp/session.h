// The server's side of one client of the store: answers its requests.
//
// A client of c10d's protocol sends validate and is then served as torch's server does it. A rank
// of the job sends hello and proves that it has the token. Three things differ for a rank: each
// answer begins with a byte that says whether it is an error, get and multi_get wait, and Cadre's
// own verbs are served. Threads: the server's. Blocking: never. Lifetime: the KeyTable and the
// token must outlive the session; the destructor cancels the request that waits. If the rank has
// left a will and has not retracted it, the destructor executes the will.
// Errors: an error of step() is the reason why the server must drop the client.
// Format: docs/formats/store-tcp.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/store/key_table.h"
#include "cadre/core/wire/store/store_message.h"
#include "cadre/core/wire/stream_buffer.h"

namespace cadre::store {

// Makes the tickets (numbers of pending waits) of one session. The high 32 bits are the number of
// the connection, so that the server knows which client's wait became ready.
class TicketSource {
 public:
  explicit TicketSource(uint32_t connection) : connection_(connection) {}
  KeyTable::Ticket next() { return (uint64_t{connection_} << 32) | next_++; }
  static uint32_t connection_of(KeyTable::Ticket ticket) {
    return static_cast<uint32_t>(ticket >> 32);
  }

 private:
  uint32_t connection_;
  uint32_t next_ = 0;
};

class Session {
 public:
  // Serves a client of c10d's protocol.
  Session(KeyTable& table, TicketSource tickets);
  // Serves a rank of the job. `nonce` must be random and never used before.
  Session(KeyTable& table, TicketSource tickets, const os::Secret& token, const wire::Nonce& nonce);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Removes one request from `in`. Appends the answer to `out`, unless the request must wait.
  // Returns false if `in` has no complete request.
  Result<bool> step(wire::StreamBuffer& in, wire::StreamBuffer& out);
  // Answers the request of this session that waits with `ticket`.
  void on_ready(KeyTable::Ticket ticket, wire::StreamBuffer& out);
  // Returns whether the client's waiting request is a queue_pop with this ticket.
  bool awaits_item(KeyTable::Ticket ticket) const;
  // Returns whether the handshake is complete: the client has proved that it may be served.
  bool is_accepted() const { return next_ == Next::kRequest; }
  // Returns whether the client has sent the hello, which comes before the proof.
  bool has_greeted() const { return is_accepted() || next_ == Next::kProof; }

 private:
  // Says what the client has to send next.
  enum class Next : uint8_t { kValidate, kHello, kProof, kRequest };
  // The request that waits. A client may have only one at a time.
  struct Waiting {
    KeyTable::Ticket ticket;
    wire::StoreRequest request;
  };

  bool is_c10d() const { return token_ == nullptr; }
  Status serve(wire::StoreRequest request, wire::StreamBuffer& out);
  Status on_hello(const wire::StoreRequest& hello, wire::StreamBuffer& out);
  Status on_proof(const wire::StoreRequest& proof, wire::StreamBuffer& out);
  Status on_request(wire::StoreRequest request, wire::StreamBuffer& out);
  // Answers get and multi_get of a c10d client without waiting. An absent key gets an empty value.
  Status read_at_once(const wire::StoreRequest& request, wire::StreamBuffer& out);
  Status wait(wire::StoreRequest request, wire::StreamBuffer& out);
  // Returns the response if the request need not wait; else nullopt, and the ticket waits.
  std::optional<wire::StoreResponse> begin_wait(KeyTable::Ticket ticket,
                                                const wire::StoreRequest& request);
  wire::StoreResponse answer(const wire::StoreRequest& request);
  // Cancels the request that waits. A rank gets a kTimeout error as the answer to that request, and
  // no answer if no request waits; a c10d client always gets an answer.
  Status cancel(wire::StreamBuffer& out);
  // Appends the answer to `out`. An error cannot be sent to a c10d client: then this method returns
  // it, which ends the connection.
  Status respond(wire::StoreVerb verb, const wire::StoreResponse& response,
                 wire::StreamBuffer& out) const;

  KeyTable& table_;
  TicketSource tickets_;
  const os::Secret* token_;  // null for a c10d client, which proves no token
  Next next_;
  wire::Nonce nonce_ = {};
  wire::Nonce client_nonce_ = {};
  wire::Progress progress_;
  std::optional<Waiting> waiting_;
  // The will: a key, and the value that is appended to it if the connection ends before the rank
  // has retracted the will.
  std::optional<std::pair<std::string, std::string>> will_;
};

}  // namespace cadre::store
