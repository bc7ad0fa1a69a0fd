// One control connection of a process: frames out, messages in, and what they count up to.
//
// Threads: the control plane's; ControlMeter is read from any. Blocking: never.
// Lifetime: owns its socket. Errors: receive() says that the stream has ended; why does not matter.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/base/deadline.h"
#include "cadre/os/socket.h"
#include "cadre/wire/control.h"
#include "cadre/wire/framing.h"

namespace cadre {

// What a control plane has done so far. Of frames and bytes, the handshakes are not counted.
struct ControlCounters {
  uint64_t connections = 0;  // that were open at some time
  uint64_t dials = 0;
  uint64_t frames_sent = 0;
  uint64_t bytes_sent = 0;
  uint64_t heartbeats_sent = 0;  // among the frames
  uint64_t sends = 0;            // calls of try_send
  uint64_t frames_received = 0;
  uint64_t bytes_received = 0;
  uint64_t events = 0;  // that were news here
};

// The same, while they change.
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
    uint64_t id = 0;  // of this process's connections, never used again
    int peer = -1;
    bool crosses_hosts = false;
    bool is_healed = false;  // opened by the plane, not by the bootstrap
    std::unique_ptr<os::Socket> socket;
  };
  ControlLink(Setup setup, ControlMeter& meter);

  uint64_t id() const { return setup_.id; }
  int peer() const { return setup_.peer; }
  bool crosses_hosts() const { return setup_.crosses_hosts; }
  // The peer may have closed its listeners already when it was opened: its end says nothing yet.
  bool is_unheard() const { return setup_.is_healed && !has_heard_; }

  // With the next flush(), all in one batch. A peer that does not take its bytes gets no questions
  // and answers, which are worth nothing later.
  void post(const wire::Event& event);
  // The same, after all events: who has this process's receipt has heard what it had to say.
  void post_receipt() { owes_receipt_ = true; }
  // Sends a heartbeat, unless something has been sent since the last call, or waits to be sent.
  void beat();
  void flush();
  bool is_flushed() const { return pending_.empty() && !owes_receipt_ && outbox_.empty(); }
  // Appends the messages that have arrived; false once the stream has ended.
  bool receive(std::vector<wire::ControlMessage>& messages);

  os::PollItem interest() const {
    return {.target = setup_.socket.get(), .want_read = true, .want_write = !outbox_.empty()};
  }

  bool has_receipt = false;  // of this process's leave
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
