// Byte streams and what can be polled: the only way in which ranks talk over a network.
//
// Threads: a Pollable belongs to one thread at a time, except Event::notify (any thread).
// Blocking: nothing here blocks; waiting is System::poll.
// Lifetime: closed by the destructor. Peers see the end of stream.
// Errors: Results; kPeerLost for an ended or reset stream, kUnavailable for a refused connection.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::os {

// Where a listener is reached: "tcp:127.0.0.1:29500" or "unix:@name" (an abstract name, gone with
// its last socket).
struct CADRE_EXPORT Address {
  enum class Kind : uint8_t { kTcp, kUnix };

  Kind kind = Kind::kTcp;
  std::string host;   // numeric or a name for TCP; the abstract name for unix
  uint16_t port = 0;  // TCP only; 0 asks listen() for a free one

  std::string to_string() const;
  static Result<Address> parse(std::string_view text);
  friend bool operator==(const Address&, const Address&) = default;
};

class Pollable {
 public:
  virtual ~Pollable() = default;
  Pollable() = default;
  Pollable(const Pollable&) = delete;
  Pollable& operator=(const Pollable&) = delete;

  // The kernel's number for it, for the native System only; -1 where there is no kernel.
  virtual int poll_handle() const { return -1; }
};

class SharedMemory;

// A TCP connection whose peer has sent nothing for this long, not even an acknowledgement, is
// closed, because the peer's host or the route to it is gone. On idle connections the kernel sends
// keep-alive probes within this time.
inline constexpr Duration kMaxPeerSilence = std::chrono::seconds(30);

// One connected stream. Ordered bytes, full duplex.
class CADRE_EXPORT Socket : public Pollable {
 public:
  // Bytes taken, at most data.size(); 0 when the stream is full just now.
  virtual Result<size_t> try_send(ConstBytes data) = 0;
  // Bytes received; 0 when none is there just now. The peer's orderly end is kPeerLost too.
  virtual Result<size_t> try_recv(Bytes buffer) = 0;
  // The same from, and into, several pieces of memory one after the other, at most kMaxParts of
  // them: in one system call where the stream is the kernel's.
  static constexpr size_t kMaxParts = 64;
  virtual Result<size_t> try_send_parts(std::span<const ConstBytes> parts);
  virtual Result<size_t> try_recv_parts(std::span<const Bytes> parts);
  // Bytes taken by try_send that have not left this host. They are lost when the socket is closed
  // while the other end still sends. 0 where it cannot be told.
  virtual size_t num_unsent() const { return 0; }

  // Passes a segment to a process of the same host, with one byte of the stream. Unix sockets only;
  // false when the stream is full just now.
  virtual Result<bool> try_send_segment(const SharedMemory& segment) = 0;
  // The next segment; null when none is there just now. Must match the peer's try_send_segment.
  virtual Result<std::unique_ptr<SharedMemory>> try_recv_segment() = 0;

  // Ends both directions at once and wakes a poll on it; the object stays valid.
  virtual void shutdown() = 0;
  // TCP: the numeric address of this or the other end; unix: its name.
  virtual Address local_address() const = 0;
  virtual Address peer_address() const = 0;

  // TCP: the stream is lost also when sent bytes are not acknowledged, or not taken by the peer,
  // for `limit` (at least 3 s). For streams whose peers always read: one that computes for long
  // with a full buffer would be lost, too.
  virtual void limit_silence(Duration /*limit*/) {}
  // For a connection within this host: an error unless the process at the other end belongs to this
  // process's user or to root, also where the kernel cannot tell.
  virtual Status check_peer_user() const = 0;
};

class Listener : public Pollable {
 public:
  // The next connection; null when none waits.
  virtual Result<std::unique_ptr<Socket>> try_accept() = 0;
  // With the port that was chosen.
  virtual Address address() const = 0;
};

// Wakes a poll from another thread. Readable from notify() until clear().
class Event : public Pollable {
 public:
  virtual void notify() = 0;
  virtual void clear() = 0;
};

// An item that wants nothing is passed over.
struct PollItem {
  Pollable* target = nullptr;
  bool want_read = false;
  bool want_write = false;
  // Set by poll(); an ended or broken stream is both, so that the next call reports the error.
  bool can_read = false;
  bool can_write = false;
};

}  // namespace cadre::os
