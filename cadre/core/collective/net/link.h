// The channel to one peer with framed operations: a header precedes each message, so a refusal or
// an announcement between two messages cannot be mistaken for payload.
//
// Threads: one at a time. Blocking: never. Lifetime: the channel outlives it; a payload is borrowed
// until is_send_done().
// Errors: of the channel; kCorruption for a header that is none. A header that differs from the
// expected one is not an error here but found by difference(), so that the caller can name both
// operations.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "cadre/core/collective/net/message.h"
#include "cadre/core/transport/transport.h"

namespace cadre {

// The last operations of this rank: a late message of a peer is compared with what was called here.
class CallHistory {
 public:
  void add(const OperationHeader& operation) {
    calls_[operation.number % kNumRemembered] = {operation.number, operation.fingerprint};
  }
  // The fingerprint of one of the last operations before `operation`, by its number.
  std::optional<Fingerprint> find(uint64_t number, const OperationHeader& operation) const;

 private:
  static constexpr size_t kNumRemembered = 16;
  struct Call {
    uint64_t number = 0;
    Fingerprint fingerprint = {};
  };
  std::array<Call, kNumRemembered> calls_{};  // by number, modulo the size
};

class Link {
 public:
  // The history outlives the link.
  Link(Channel& channel, const CallHistory& history) : channel_(channel), history_(history) {}

  // Begins to send `payload` as one message of the operation: its header goes ahead, in one piece
  // with the payload's beginning.
  void start_send(const OperationHeader& operation, ConstBytes payload);
  // Bytes moved, header included.
  Result<size_t> advance_send();
  bool is_send_done() const { return unsent_.size() == 0; }
  // Payload bytes that have left, since start_send.
  size_t num_sent() const { return num_sent_; }

  // Payload bytes of one message received into `target`. 0 also while its header is incomplete; the
  // caller looks at has_header() and difference().
  Result<size_t> receive(const OperationHeader& operation, Bytes target);
  // Whether the message's header has arrived and is the expected one.
  bool has_header() const { return is_open_; }
  // All payload of the message has been received: the next byte belongs to another header.
  void end_message() { is_open_ = false; }
  // Receives a header and nothing behind it, although this operation may not expect any from this
  // peer. So this rank detects a peer that runs another operation or refuses this one. An ended
  // channel is no error here, since nothing more is needed from it.
  Status peek(const OperationHeader& operation);
  bool wants_peek() const { return !is_open_ && !incoming_ && !has_ended_; }
  // The header from the peer that does not match `operation`: an announcement that contradicts a
  // call of this rank, else the next header.
  std::optional<OperationHeader> difference(const OperationHeader& operation) const;

  // Whether the peer runs or refuses a later operation, so that it has completed this one.
  bool is_ahead_of(const OperationHeader& operation) const {
    return incoming_ && incoming_->number > operation.number && !has_contradiction(operation);
  }

  // A new operation begins: its header is expected from now on.
  void begin_operation();
  // Announces to the peer, once, that this rank waits in `operation`, unless data of it was sent to
  // the peer already. So two ranks that wait for each other in different operations detect the
  // mismatch. Best effort.
  void announce(OperationHeader operation);
  // Sends the rest of an announcement. On an ended channel the announcement is dropped: the channel
  // would stay ready for sending, so a wait for it would return at once again and again.
  void advance_announcement();
  // Sends the peer a refusal of `operation`, unless a message to it is incomplete.
  void refuse(const OperationHeader& operation);
  // The same for a channel without a link, on which no message was sent yet.
  static void refuse(Channel& channel, OperationHeader operation);

 private:
  // So much payload is received together with the header in one system call: a receiver that finds
  // the beginning of a message alone would have to wait twice.
  static constexpr size_t kInlineBytes = 4096;

  Status parse_incoming(const OperationHeader& operation);
  bool contradicts(const OperationHeader& announced, const OperationHeader& operation) const;
  bool has_contradiction(const OperationHeader& operation) const {
    return announced_ && contradicts(*announced_, operation);
  }
  size_t take_staged(Bytes target);

  Channel& channel_;
  const CallHistory& history_;

  bool has_sent_header_ = false;
  bool has_announced_ = false;
  // An announcement that is still on its way out, and a header.
  std::array<std::byte, 2 * OperationHeader::kBytes> outbox_;
  Channel::Parts unsent_;  // what of the outbox is still to be sent, and of the payload
  size_t num_sent_ = 0;

  bool is_open_ = false;    // the current message's header has been taken
  bool has_ended_ = false;  // the channel ended while it was only looked at
  std::array<std::byte, OperationHeader::kBytes + kInlineBytes> inbox_;
  size_t inbox_begin_ = 0;
  size_t inbox_end_ = 0;
  std::optional<OperationHeader> incoming_;  // a message's or a refusal's, parsed, not yet taken
  // The first announcement that was not compared yet, since it is of a later operation, or that
  // contradicts. It is kept apart, so that it never hides the refusal that may follow it.
  std::optional<OperationHeader> announced_;
};

}  // namespace cadre
