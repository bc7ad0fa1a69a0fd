// One control connection of a process. It sends events as frames, receives messages, and counts
// them.
//
// Threads: only the control plane's thread; a ControlMeter may be read from any thread. Blocking:
// never.
// Lifetime: owns its socket. Errors: receive() returns an error when the stream has ended, for
// whatever reason.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/os/socket.h"
#include "cadre/core/wire/control.h"
#include "cadre/core/wire/stream_buffer.h"

namespace cadre {

// The totals over all connections of a control plane. Frames and bytes of handshakes are not
// counted.
struct ControlCounters {
  uint64_t connections = 0;  // the number of connections opened so far
  uint64_t dials = 0;
  uint64_t frames_sent = 0;
  uint64_t bytes_sent = 0;
  uint64_t heartbeats_sent = 0;  // heartbeats are also counted in frames_sent
  uint64_t sends = 0;            // the number of calls of try_send()
  uint64_t frames_received = 0;
  uint64_t bytes_received = 0;
  uint64_t events = 0;  // the number of new events
};

// The counters of ControlCounters as atomics, which any thread may read.
struct ControlMeter {
  std::atomic<uint64_t> connections{0};
  std::atomic<uint64_t> dials{0};
  std::atomic<uint64_t> frames_sent{0};
  std::atomic<uint64_t> bytes_sent{0};
  std::atomic<uint64_t> heartbeats_sent{0};
  std::atomic<uint64_t> sends{0};
  std::atomic<uint64_t> frames_received{0};
  std::atomic<uint64_t> bytes_received{0};
  std::atomic<uint64_t> events{0};

  ControlCounters read() const {
    return {connections, dials,           frames_sent,    bytes_sent, heartbeats_sent,
            sends,       frames_received, bytes_received, events};
  }
};

class ControlLink {
 public:
  struct Setup {
    uint64_t id = 0;  // unique among this process's connections, and never reused
    int peer = -1;
    bool crosses_hosts = false;
    bool is_healed = false;  // true if the control plane opened the connection after the bootstrap
    std::unique_ptr<os::Socket> socket;
  };
  ControlLink(Setup setup, ControlMeter& meter);

  uint64_t id() const { return setup_.id; }
  int peer() const { return setup_.peer; }
  bool crosses_hosts() const { return setup_.crosses_hosts; }
  // Returns whether this connection was opened after the bootstrap and no byte was received over it
  // yet. Such a connection may have reached the listener's queue after the peer stopped accepting,
  // so its end is no evidence that the peer is lost.
  bool is_unheard() const { return setup_.is_healed && !has_heard_; }

  // Queues the event for the next flush(), which sends all queued events together. Drops status
  // questions and answers if the peer does not read, because they would arrive too late.
  void post(const wire::Event& event);
  // Queues an acknowledgement that the peer leaves ("receipt"). flush() sends it after all queued
  // events, so a peer that has the receipt has also received those events.
  void post_receipt() { owes_receipt_ = true; }
  // Sends a heartbeat, unless something was sent since the last call or is queued.
  void beat();
  void flush();
  bool is_flushed() const { return pending_.empty() && !owes_receipt_ && outbox_.empty(); }
  // Appends the messages that have arrived. Returns an error once the stream has ended, with
  // ErrorDetails::is_own_limit if the program has closed the descriptor of this connection.
  Status receive(std::vector<wire::ControlMessage>& messages);

  os::PollItem interest() const {
    return {.target = setup_.socket.get(), .want_read = true, .want_write = !outbox_.empty()};
  }

  bool has_receipt = false;  // true once the peer has acknowledged that this process leaves
  Duration silent_for{0};

 private:
  Setup setup_;
  ControlMeter& meter_;
  wire::ControlSplitter splitter_;
  std::vector<wire::Event> pending_;
  bool owes_receipt_ = false;
  wire::StreamBuffer outbox_;
  bool has_heard_ = false;
  bool has_sent_ = false;
};

}  // namespace cadre
