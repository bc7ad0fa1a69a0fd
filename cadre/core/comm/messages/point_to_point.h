// The protocol of tagged messages between pairs of ranks over a Transport. MessageQueue implements
// the blocking calls on top of it.
//
// Threads: one at a time, the holder of the progress role. Blocking: only wait().
// Lifetime: the transport outlives it; a Message's bytes are borrowed until it has ended.
// Errors: a message ends with kInvalidArgument if sizes or types differ or if too many bytes arrive
// for which no receive was posted, with kTimeout, kPeerLost or kCorruption, or with the error of
// abandon().
// Short messages travel at once and wait at the receiver; longer ones wait at the sender until
// their receive is posted. Format: docs/formats/point-to-point.md.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/messages/message_call.h"
#include "cadre/core/comm/messages/message_header.h"
#include "cadre/core/comm/messages/message_space.h"
#include "cadre/core/comm/messages/send_gate.h"
#include "cadre/core/transport/transport.h"

namespace cadre {

// A message that was posted. The `peer` of a receive from kAnySource becomes the sender's rank as
// soon as a message matches the receive.
struct Message : MessageCall {
  std::optional<Deadline> deadline;
  MessageSpace space;
  SendGate is_written;  // whether the bytes of a send may be read
  uint64_t order = 0;   // the order in which messages were posted; post() sets it
};

class PointToPoint {
 public:
  // The caller that waits for the message and the objects that send or receive it share it.
  using Handle = std::shared_ptr<Message>;
  struct Ended {
    Handle message;
    Status status;
  };

  // The limit of the bytes that a peer may send and for which no receive was posted, headers
  // included.
  static constexpr size_t kMaxUnexpectedBytes = 4 << 20;

  // `describe` names a rank of the group in messages.
  using Describe = std::function<std::string(int rank)>;
  PointToPoint(Transport& transport, Describe describe);

  // Posts a message. Receives of one space and tag take messages in the order in which they were
  // posted. REQUIRES: the message has a deadline; its peer is another rank of the group, or
  // kAnySource for a receive.
  void post(const Handle& message);
  // Sends and receives the bytes that need no waiting, and ends messages whose deadline has passed.
  void advance(TimePoint now);
  // Returns the oldest of the messages that have ended and were not dropped yet; null if there is
  // none.
  const Ended* first_ended() const { return ended_.empty() ? nullptr : &ended_.front(); }
  void drop_first_ended() { ended_.pop_front(); }
  // Returns the oldest message that has not ended; null if there is none.
  Handle oldest() const { return pending_.empty() ? nullptr : pending_.front(); }
  struct Unexpected {
    Rank source;
    int tag = 0;
  };
  // Returns the oldest message of that space from the peer that has arrived and for which no
  // receive was posted; for kAnySource, that of the lowest rank that has sent one. nullopt if there
  // is none.
  std::optional<Unexpected> first_unexpected(Rank source, const MessageSpace& space) const;
  // Returns whether a send waits for its gate, so that advance() has to be called again although
  // nothing arrives.
  bool has_unwritten() const;
  // Returns whether the send had to wait for a gate and has not started, also if it has ended
  // since.
  bool is_unwritten(const Message& message) const;
  // Waits until bytes can be sent or received, the transport is woken, or a message's deadline or
  // `latest` has passed. Returns kAborted if interrupted.
  Status wait(Deadline latest);
  // Ends all pending messages. REQUIRES: advance() is not called afterwards, because callers may
  // have freed the memory of their messages.
  void abandon(const Error& error);

 private:
  struct Outgoing {
    std::array<std::byte, MessageHeader::kBytes> header;
    size_t num_header_sent = 0;
    ConstBytes payload;
    Handle completes;  // null for a header that is only a part of its message
  };
  struct Arrival {  // a message for which no receive was posted yet
    MessageHeader header;
    std::vector<std::byte> data;
  };
  struct Peer {
    Rank rank = 0;
    Channel* channel = nullptr;  // null for this rank itself
    std::optional<Error> ended;

    // The sends whose gate is closed, and those with the same space and tag that were posted after
    // them: such messages keep their order.
    std::deque<Handle> unwritten;
    std::deque<Outgoing> outgoing;
    uint64_t num_sent = 0;
    // The sends that wait for kClear; the key is the sequence.
    std::map<uint64_t, Handle> requested;

    std::deque<Handle> receives;  // the receives without a matching message
    // The receives whose data was requested from the sender (kClear); the key is the sequence.
    std::map<uint64_t, Handle> cleared;
    std::deque<Arrival> unexpected;
    size_t num_unexpected_bytes = 0;

    std::array<std::byte, MessageHeader::kBytes> header;  // the header that is being received
    size_t num_header_received = 0;
    Bytes target;                     // the part of the payload that is still to be received
    Handle receiving;                 // the receive that gets the payload; null if there is none
    std::optional<Arrival> stashing;  // the payload being received, if no receive was posted for it
    bool is_in_payload = false;

    bool is_full() const { return num_unexpected_bytes >= kMaxUnexpectedBytes; }
  };

  void queue(Peer& peer, MessageHeader::Kind kind, const Handle& message, uint64_t sequence);
  void start_send(Peer& peer, const Handle& message);
  // Returns whether the send waits for its gate or for that of an earlier send.
  static bool is_held(const Peer& peer, const Message& message);
  // Starts the sends whose bytes have been written since.
  void start_written(Peer& peer);
  void post_receive(Peer& peer, const Handle& message);
  void post_receive_from_any(const Handle& message);
  // Gives the receive a matching message of the peer that arrived before the receive was posted.
  // Returns false if there is none.
  bool take_unexpected(Peer& peer, const Handle& message);
  void advance_sends(Peer& peer);
  void advance_receives(Peer& peer);
  // Return false if no more bytes can be received now.
  Result<bool> receive_header(Peer& peer);
  Result<bool> receive_payload(Peer& peer);
  Status handle_header(Peer& peer, const MessageHeader& header);
  void finish_payload(Peer& peer);
  // Removes the oldest receive with that space and tag, from this peer or from any, from its list
  // and returns it; null if there is none.
  Handle take_receive(Peer& peer, const MessageHeader& header);
  // Called when a message has matched a receive. If their sizes or types differ, ends the receive
  // with an error and returns false.
  bool agree(const Peer& peer, const Handle& message, const MessageHeader& header);
  void deliver(Peer& peer, const Handle& message, const Arrival& arrival);
  void lose(Peer& peer, const Error& error);
  // Returns why a receive from any rank would wait indefinitely; nullopt while a peer can still
  // send.
  std::optional<Error> end_of_all() const;
  void refuse_overflow(Peer& peer);
  void refuse_overflow_of_all();
  Error overflow_of(const Peer& peer) const;
  void end_where(const std::function<bool(const Message&)>& matches, const Error& error);
  void end(const Handle& message, Status status);

  Transport& transport_;
  const Describe describe_;
  std::vector<Peer> peers_;               // peers_[r] is the peer with rank r
  std::deque<Handle> receives_from_any_;  // the receives from any rank without a matching message
  std::vector<Handle> pending_;
  uint64_t num_posted_ = 0;
  std::deque<Ended> ended_;
  std::vector<ChannelInterest> interests_;  // a member only to reuse its memory
};

}  // namespace cadre
