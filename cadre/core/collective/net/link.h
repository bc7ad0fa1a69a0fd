// Frames operations on the channel to one peer: a header precedes each message, so a refusal or an
// announcement between two messages cannot be confused with payload.
//
// Threads: one at a time. Blocking: never. Lifetime: the channel outlives it; a payload is borrowed
// until is_send_done().
// Errors: those of the channel; kCorruption for an invalid header. A header that differs from the
// expected one is not an error here; difference() returns it, so that the caller can name both
// operations.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "cadre/core/collective/net/message.h"
#include "cadre/core/transport/transport.h"

namespace cadre {

// The last operations of this rank, with which late messages of peers are compared.
class CallHistory {
 public:
  void add(const OperationHeader& operation) {
    calls_[operation.number % kNumRemembered] = {operation.number, operation.fingerprint};
  }
  // Returns the fingerprint of operation `number`; nullopt unless that operation came before
  // `operation` and is one of the last kNumRemembered.
  std::optional<Fingerprint> find(uint64_t number, const OperationHeader& operation) const;

 private:
  static constexpr size_t kNumRemembered = 16;
  struct Call {
    uint64_t number = 0;
    Fingerprint fingerprint = {};
  };
  // The call with number n is at index n modulo kNumRemembered.
  std::array<Call, kNumRemembered> calls_{};
};

class Link {
 public:
  // REQUIRES: the history outlives the link.
  Link(Channel& channel, const CallHistory& history) : channel_(channel), history_(history) {}

  // Begins to send `payload` as one message of the operation: the header is sent first, together
  // with the beginning of the payload.
  void start_send(const OperationHeader& operation, ConstBytes payload);
  // Returns the number of bytes sent, header included.
  Result<size_t> advance_send();
  bool is_send_done() const { return unsent_.size() == 0; }
  // Returns the number of payload bytes sent since start_send().
  size_t num_sent() const { return num_sent_; }

  // Receives payload of one message into `target` and returns the number of bytes. Returns 0 also
  // while the header is incomplete; the caller checks has_header() and difference().
  Result<size_t> receive(const OperationHeader& operation, Bytes target);
  // Returns whether the message's header has arrived and is the expected one.
  bool has_header() const { return is_open_; }
  // Called when all payload of the message has been received: the next byte belongs to another
  // header.
  void end_message() { is_open_ = false; }
  // Receives a header but no payload, although this operation may not expect a message from this
  // peer. So this rank detects a peer that runs another operation or refuses this one. An ended
  // channel is no error here, because this operation needs nothing more from it.
  Status peek(const OperationHeader& operation);
  bool wants_peek() const { return !is_open_ && !incoming_ && !has_ended_; }
  // Returns the header from the peer that does not match `operation`: an announcement that
  // contradicts a call of this rank, else the next header. Returns nullopt if all match.
  std::optional<OperationHeader> difference(const OperationHeader& operation) const;

  // Returns whether the peer runs or refuses a later operation, which means that it has completed
  // `operation`.
  bool is_ahead_of(const OperationHeader& operation) const {
    return incoming_ && incoming_->number > operation.number && !has_contradiction(operation);
  }

  // Called when a new operation begins: from then on the next header must be that of the new
  // operation.
  void begin_operation();
  // Announces to the peer, once, that this rank waits in `operation`, unless this rank has sent
  // data of the operation to the peer. So two ranks that wait for each other in different
  // operations detect the mismatch. Best effort.
  void announce(OperationHeader operation);
  // Sends the rest of an announcement. On an ended channel the announcement is dropped: the channel
  // would always be ready for sending, so a wait for it would return at once again and again.
  void advance_announcement();
  // Sends the peer a refusal of `operation`, unless a message to it is incomplete.
  void refuse(const OperationHeader& operation);
  // Sends a refusal on a channel without a Link, on which no message was sent yet.
  static void refuse(Channel& channel, OperationHeader operation);

 private:
  // This many payload bytes are received together with the header in one system call. Otherwise a
  // receiver would have to wait twice for a short message.
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
  // The memory for the unsent part of an announcement and for the header of the current message.
  std::array<std::byte, 2 * OperationHeader::kBytes> outbox_;
  Channel::Parts unsent_;  // the part of the outbox and of the payload that is not sent yet
  size_t num_sent_ = 0;

  bool is_open_ = false;    // the current message's header has matched
  bool has_ended_ = false;  // the channel ended while peek() ran
  std::array<std::byte, OperationHeader::kBytes + kInlineBytes> inbox_;
  size_t inbox_begin_ = 0;
  size_t inbox_end_ = 0;
  // The next header of a message or a refusal: it was parsed, but did not match the operation of
  // this rank yet.
  std::optional<OperationHeader> incoming_;
  // The first announcement that contradicts a call of this rank, or that is of a later operation
  // and was not compared yet. It is kept separately, so that it never hides a refusal that follows
  // it.
  std::optional<OperationHeader> announced_;
};

}  // namespace cadre
