// One client of the store server: turns its requests into answers.
//
// A client of c10d's protocol validates and is then served as torch's server does it. A rank of the
// job says hello and proves the token; then each of its answers begins with a byte that tells
// whether it is an error, get and multi_get wait, and the verbs of Cadre's own are served.
// Threads: the server's. Blocking: never. Lifetime: the KeyTable and the token outlive it; the
// destructor cancels its wait, and carries out the will of a rank that has not retracted it.
// Errors: from step(): the client is to be dropped, for that reason.
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

// Makes the tickets of one session: the high half is the connection's number, so that the server
// knows whose wait became ready.
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
  // Serves a rank of the job. `nonce` is fresh and unpredictable.
  Session(KeyTable& table, TicketSource tickets, const os::Secret& token, const wire::Nonce& nonce);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Takes one request off `in` and appends its answer, if it has one yet, to `out`. False when `in`
  // holds no whole request.
  Result<bool> step(wire::StreamBuffer& in, wire::StreamBuffer& out);
  // Answers the wait of this session that `ticket` stands for.
  void on_ready(KeyTable::Ticket ticket, wire::StreamBuffer& out);
  // Whether the client has shown that it belongs here.
  bool is_accepted() const { return next_ == Next::kRequest; }
  // Whether it has said what a client of this build says before that.
  bool has_greeted() const { return is_accepted() || next_ == Next::kProof; }

 private:
  // What the client has to send next.
  enum class Next : uint8_t { kValidate, kHello, kProof, kRequest };
  // The one request that a client may have waiting at a time.
  struct Waiting {
    KeyTable::Ticket ticket;
    wire::StoreRequest request;
  };

  bool is_c10d() const { return token_ == nullptr; }
  Status serve(wire::StoreRequest request, wire::StreamBuffer& out);
  Status on_hello(const wire::StoreRequest& hello, wire::StreamBuffer& out);
  Status on_proof(const wire::StoreRequest& proof, wire::StreamBuffer& out);
  Status on_request(wire::StoreRequest request, wire::StreamBuffer& out);
  // get and multi_get of a c10d client: the value of an absent key is empty.
  Status read_at_once(const wire::StoreRequest& request, wire::StreamBuffer& out);
  Status wait(wire::StoreRequest request, wire::StreamBuffer& out);
  // The response if what the request waits for is there; else nullopt, and the ticket waits.
  std::optional<wire::StoreResponse> begin_wait(KeyTable::Ticket ticket,
                                                const wire::StoreRequest& request);
  wire::StoreResponse answer(const wire::StoreRequest& request);
  // Ends the pending request of a rank with its timeout; one that does not wait has been answered.
  Status cancel(wire::StreamBuffer& out);
  // An error ends the connection of a c10d client.
  Status respond(wire::StoreVerb verb, const wire::StoreResponse& response,
                 wire::StreamBuffer& out) const;

  KeyTable& table_;
  TicketSource tickets_;
  const os::Secret* token_;  // null for c10d
  Next next_;
  wire::Nonce nonce_ = {};
  wire::Nonce client_nonce_ = {};
  wire::Progress progress_;
  std::optional<Waiting> waiting_;
  // What is appended to which key when the connection ends without a retraction.
  std::optional<std::pair<std::string, std::string>> will_;
};

}  // namespace cadre::store
