// One peer's channel with operations framed on it: a header before each message, so that a refusal
// or an announcement between two messages is never taken for payload.
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

#include "cadre/collective/net/message.h"
#include "cadre/transport/transport.h"

namespace cadre {

class Link {
 public:
  explicit Link(Channel& channel) : channel_(channel) {}

  // Begins to send `payload` as one message of the operation: its header goes ahead, in one piece
  // with the payload's beginning.
  void start_send(const OperationHeader& operation, ConstBytes payload);
  // Bytes moved, header included.
  Result<size_t> advance_send();
  bool is_send_done() const { return head_.empty() && payload_.empty(); }
  // Payload bytes that have left, since start_send.
  size_t num_sent() const { return num_sent_; }

  // Payload bytes of one message received into `target`. 0 also while its header is incomplete; the
  // caller looks at has_header() and difference().
  Result<size_t> receive(const OperationHeader& operation, Bytes target);
  // Whether the message's header has arrived and is the expected one.
  bool has_header() const { return is_open_; }
  // All payload of the message has been received: the next byte belongs to another header.
  void end_message() { is_open_ = false; }
  // Receives a header, and nothing behind it, although this operation may not expect any from this
  // peer: so a peer that runs another operation, or refuses this one, is noticed. An ended channel
  // is no error here, for nothing more is needed from it.
  Status peek(const OperationHeader& operation);
  bool wants_peek() const { return !is_open_ && !incoming_ && !has_ended_; }
  // What the peer announced, where it cannot belong to `operation`.
  std::optional<OperationHeader> difference(const OperationHeader& operation) const;

  // The fingerprint of one of the last operations before `operation`, by its number.
  std::optional<Fingerprint> remembered(uint64_t number, const OperationHeader& operation) const;
  // Whether the peer is in a later operation, or refuses one: this one it has left in good order.
  bool is_ahead_of(const OperationHeader& operation) const {
    return incoming_ && incoming_->number > operation.number;
  }

  // A new operation begins: its header is expected from now on.
  void begin_operation(const OperationHeader& operation);
  // Tells the peer, once, that this rank waits in `operation`, unless it has been sent something of
  // it: so that two ranks which wait for each other in different operations find out. Best effort.
  void announce(OperationHeader operation);
  // Tells the peer that this rank gives up `operation`, if it can be told in between messages.
  void refuse(OperationHeader operation);

 private:
  // So much payload is sent, and so much received, together with the header in one system call. A
  // receiver that finds the beginning of a message alone would have to wait twice.
  static constexpr size_t kInlineSendBytes = 32 << 10;
  static constexpr size_t kInlineBytes = 4096;
  // A late message is compared with what this rank called, so many operations back.
  static constexpr size_t kNumRemembered = 16;

  struct Call {
    uint64_t number = 0;
    Fingerprint fingerprint = {};
  };

  Status parse_incoming(const OperationHeader& operation);
  void drop_announcement(const OperationHeader& operation);
  size_t take_staged(Bytes target);

  Channel& channel_;

  bool has_sent_header_ = false;
  bool has_announced_ = false;
  std::array<Call, kNumRemembered> remembered_{};  // by number, modulo the size
  // An announcement that is still on its way out, a header, a payload.
  std::array<std::byte, 2 * OperationHeader::kBytes + kInlineSendBytes> outbox_;
  ConstBytes head_;          // what of the outbox is still to be sent
  size_t head_payload_ = 0;  // payload bytes at the end of head_
  ConstBytes payload_;       // what follows it
  size_t num_sent_ = 0;

  bool is_open_ = false;    // the current message's header has been taken
  bool has_ended_ = false;  // the channel ended while it was only looked at
  std::array<std::byte, OperationHeader::kBytes + kInlineBytes> inbox_;
  size_t inbox_begin_ = 0;
  size_t inbox_end_ = 0;
  std::optional<OperationHeader> incoming_;  // parsed, not yet taken
};

}  // namespace cadre
