// One client of the store server, after its protocol is known: turns its bytes into answers.
//
// Threads: the server's. Blocking: never. Lifetime: the KeyTable outlives it; pending waits are
// cancelled by the destructor. Errors: from step(): the client is to be dropped, for that reason.
#pragma once

#include <cstdint>

#include "cadre/core/base/error.h"
#include "cadre/core/store/key_table.h"
#include "cadre/core/wire/framing.h"

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
  virtual ~Session() = default;

  // Takes one message off `in` and appends its answer, if it has one yet, to `out`. False when `in`
  // holds no whole message.
  virtual Result<bool> step(wire::StreamBuffer& in, wire::StreamBuffer& out) = 0;
  // Answers the wait of this session that `ticket` stands for.
  virtual void on_ready(KeyTable::Ticket ticket, wire::StreamBuffer& out) = 0;
  // Whether the client has shown that it belongs here.
  virtual bool is_accepted() const = 0;
  // Whether it has said what a client of this build says before that.
  virtual bool has_greeted() const { return is_accepted(); }
};

}  // namespace cadre::store
