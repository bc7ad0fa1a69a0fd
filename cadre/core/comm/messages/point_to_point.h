// Tagged messages between pairs of ranks over a Transport: the protocol, without waiting callers.
//
// Threads: one at a time, the holder of the progress role. Blocking: only wait().
// Lifetime: the transport outlives it; a Message's bytes are borrowed until it has ended.
// Errors: a message ends with kInvalidArgument when sizes or types differ or when too much arrives
// that nobody awaits, kTimeout, kPeerLost, kCorruption, or what abandon() was given.
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
#include "cadre/core/transport/transport.h"

namespace cadre {

// A message that is posted. `peer` of a receive from kAnySource is the sender's rank as soon as the
// receive has met a message.
struct Message : MessageCall {
  std::optional<Deadline> deadline;
  MessageSpace space;
  uint64_t order = 0;  // set by PointToPoint::post()
};

class PointToPoint {
 public:
  // Shared by whoever waits for the message and by what moves it.
  using Handle = std::shared_ptr<Message>;
  struct Ended {
    Handle message;
    Status status;
  };

  // What a peer may send that nobody awaits, headers included.
  static constexpr size_t kMaxUnexpectedBytes = 4 << 20;

  // `describe` names a rank of the group in messages.
  using Describe = std::function<std::string(int rank)>;
  PointToPoint(Transport& transport, Describe describe);

  // Receives of one space and tag take messages in the order of their posts. REQUIRES: a deadline;
  // the peer is another rank of the group, or kAnySource of a receive.
  void post(const Handle& message);
  // Moves what can be moved now, and ends what is late.
  void advance(TimePoint now);
  // The oldest of the messages that ended and were not dropped yet; null if there is none.
  const Ended* first_ended() const { return ended_.empty() ? nullptr : &ended_.front(); }
  void drop_first_ended() { ended_.pop_front(); }
  // The oldest message that has not ended; null if there is none.
  Handle oldest() const { return pending_.empty() ? nullptr : pending_.front(); }
  struct Unexpected {
    Rank source;
    int tag = 0;
  };
  // The oldest message of that space from the peer that has arrived and is not awaited; for
  // kAnySource, that of the lowest rank that has one.
  std::optional<Unexpected> first_unexpected(Rank source, const MessageSpace& space) const;
  // Until something can be moved, the transport is woken, a message's deadline or `latest`;
  // kAborted when interrupted.
  Status wait(Deadline latest);
  // Ends all that is pending. REQUIRES: afterwards no advance(): the memory of messages is gone.
  void abandon(const Error& error);

 private:
  struct Outgoing {
    std::array<std::byte, MessageHeader::kBytes> header;
    size_t num_header_sent = 0;
    ConstBytes payload;
    Handle completes;  // null for a header that is only a part of its message
  };
  struct Arrival {  // not awaited yet
    MessageHeader header;
    std::vector<std::byte> data;
  };
  struct Peer {
    Rank rank = 0;
    Channel* channel = nullptr;  // null at this rank
    std::optional<Error> ended;

    std::deque<Outgoing> outgoing;
    uint64_t num_sent = 0;
    std::map<uint64_t, Handle> requested;  // sends that wait for kClear, by sequence

    std::deque<Handle> receives;         // without a message yet
    std::map<uint64_t, Handle> cleared;  // receives whose data was asked for, by sequence
    std::deque<Arrival> unexpected;
    size_t num_unexpected_bytes = 0;

    std::array<std::byte, MessageHeader::kBytes> header;  // the incoming one
    size_t num_header_received = 0;
    Bytes target;                     // what is still to be received of the payload
    Handle receiving;                 // its receive, or
    std::optional<Arrival> stashing;  // nobody awaits it
    bool is_in_payload = false;

    bool is_full() const { return num_unexpected_bytes >= kMaxUnexpectedBytes; }
  };

  void queue(Peer& peer, MessageHeader::Kind kind, const Handle& message, uint64_t sequence);
  void post_receive(Peer& peer, const Handle& message);
  void post_receive_from_any(const Handle& message);
  // Whether a message of the peer that nobody awaited fits the receive, which has it then.
  bool take_unexpected(Peer& peer, const Handle& message);
  void advance_sends(Peer& peer);
  void advance_receives(Peer& peer);
  // False when nothing more can be received just now.
  Result<bool> receive_header(Peer& peer);
  Result<bool> receive_payload(Peer& peer);
  Status handle_header(Peer& peer, const MessageHeader& header);
  void finish_payload(Peer& peer);
  // The oldest receive with that space and tag, from this peer or from any, taken from its list;
  // null if there is none.
  Handle take_receive(Peer& peer, const MessageHeader& header);
  // A receive has met its message: false, and the message has ended, if they differ.
  bool agree(const Peer& peer, const Handle& message, const MessageHeader& header);
  void deliver(Peer& peer, const Handle& message, const Arrival& arrival);
  void lose(Peer& peer, const Error& error);
  // Why a receive of any rank would wait for ever; nullopt while a peer can still send.
  std::optional<Error> end_of_all() const;
  void refuse_overflow(Peer& peer);
  void refuse_overflow_of_all();
  Error overflow_of(const Peer& peer) const;
  void end_where(const std::function<bool(const Message&)>& matches, const Error& error);
  void end(const Handle& message, Status status);

  Transport& transport_;
  const Describe describe_;
  std::vector<Peer> peers_;               // by rank
  std::deque<Handle> receives_from_any_;  // without a message yet
  std::vector<Handle> pending_;
  uint64_t num_posted_ = 0;
  std::deque<Ended> ended_;
  std::vector<ChannelInterest> interests_;  // kept for its memory
};

}  // namespace cadre
