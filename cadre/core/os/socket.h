// Byte streams and other objects to poll: the only way in which ranks communicate over a network.
//
// Threads: a Pollable belongs to one thread at a time, except Event::notify (any thread). Blocking:
// nothing here blocks; waiting is System::poll. Lifetime: closed by the destructor. Peers see the
// end of stream. Errors: Results; kPeerLost for an ended or reset stream, kUnavailable for a
// connection that the other host rejected.
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

// The address at which a listener is reached: "tcp:127.0.0.1:29500" or "unix:@name" (a name in
// Linux's abstract namespace, which vanishes when its last socket is closed).
struct CADRE_EXPORT Address {
  enum class Kind : uint8_t { kTcp, kUnix };

  Kind kind = Kind::kTcp;
  std::string host;   // is numeric or a name for TCP, and the abstract name for unix
  uint16_t port = 0;  // is used for TCP only; 0 makes listen() choose a free port

  std::string to_string() const;
  // Returns "127.0.0.1:29500" or "[::1]:29500". REQUIRES: kTcp.
  std::string host_and_port() const;
  static Result<Address> parse(std::string_view text);
  friend bool operator==(const Address&, const Address&) = default;
};

class Pollable {
 public:
  virtual ~Pollable() = default;
  Pollable() = default;
  Pollable(const Pollable&) = delete;
  Pollable& operator=(const Pollable&) = delete;

  // Returns the kernel's descriptor of the object; -1 if it has none, as in the simulator.
  virtual int poll_handle() const { return -1; }
};

class SharedMemory;

// A TCP connection whose peer has sent nothing for this long, not even an acknowledgement, is
// closed, because the peer's host or the route to it is gone. On idle connections the kernel sends
// keep-alive probes within this time.
inline constexpr Duration kMaxPeerSilence = std::chrono::seconds(30);

// One connected stream of ordered bytes in both directions.
class CADRE_EXPORT Socket : public Pollable {
 public:
  // Returns the number of bytes taken, at most data.size(); 0 while the stream is full.
  virtual Result<size_t> try_send(ConstBytes data) = 0;
  // Returns the number of bytes received; 0 while there are none. Returns kPeerLost if the stream
  // is broken, and also at its regular end.
  virtual Result<size_t> try_recv(Bytes buffer) = 0;
  // try_send() and try_recv() for up to kMaxParts buffers, which are sent or filled in order.
  // Streams of the kernel need one system call for all of them.
  static constexpr size_t kMaxParts = 64;
  virtual Result<size_t> try_send_parts(std::span<const ConstBytes> parts);
  virtual Result<size_t> try_recv_parts(std::span<const Bytes> parts);
  // Returns the number of bytes that try_send took and that have not left this host; 0 if that is
  // unknown. These bytes are lost if the socket is closed while the other end still sends.
  virtual size_t num_unsent() const { return 0; }

  // Passes a segment to a process of the same host, together with one byte of the stream. Only unix
  // sockets can do this. Returns false while the stream is full.
  virtual Result<bool> try_send_segment(const SharedMemory& segment) = 0;
  // Receives the next segment; returns null while none has arrived. Each received segment matches
  // one try_send_segment of the peer.
  virtual Result<std::unique_ptr<SharedMemory>> try_recv_segment() = 0;

  // Ends both directions at once and wakes a poll of this socket; the object stays valid.
  virtual void shutdown() = 0;
  // The addresses of this end and of the other end: for TCP the numeric address, for unix the name.
  virtual Address local_address() const = 0;
  virtual Address peer_address() const = 0;

  // Sets a second limit for a TCP stream: it also counts as lost if sent bytes are not
  // acknowledged, or not taken by the peer, for `limit` (at least 3 s). Use it only if the peer
  // always reads: a peer that computes for a long time with a full buffer would be lost, too.
  virtual void limit_silence(Duration /*limit*/) {}
  // Checks a connection within this host. Returns an error unless the process at the other end
  // belongs to this process's user or to root, and also if the kernel does not know the user.
  virtual Status check_peer_user() const = 0;
};

class Listener : public Pollable {
 public:
  // Returns the next connection; null if none is pending.
  virtual Result<std::unique_ptr<Socket>> try_accept() = 0;
  // Returns the address with the port that was chosen.
  virtual Address address() const = 0;
};

// Wakes a poll from another thread. It is readable from notify() until clear().
class Event : public Pollable {
 public:
  virtual void notify() = 0;
  virtual void clear() = 0;
};

// An item that wants neither reading nor writing is not polled.
struct PollItem {
  Pollable* target = nullptr;
  bool want_read = false;
  bool want_write = false;
  // poll() sets can_read and can_write. Both are true for an ended or broken stream, so that the
  // caller's next call on the stream reports the error.
  bool can_read = false;
  bool can_write = false;
};

}  // namespace cadre::os
