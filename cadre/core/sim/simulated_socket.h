// The objects that a simulated rank polls: sockets, listeners and events.
//
// Threads, blocking, lifetime and errors: see os/socket.h. Sends, receives and accepts count as
// scheduling points, at which the calling thread continues to run.
#pragma once

#include <memory>
#include <vector>

#include "cadre/core/os/shared_memory.h"
#include "cadre/core/os/shared_pages.h"
#include "cadre/core/os/socket.h"
#include "cadre/core/sim/connection.h"
#include "cadre/core/sim/network.h"

namespace cadre::sim {

// The state of a simulated Pollable. System::poll queries it again after each Scheduler::touch() of
// the polling rank.
class Readiness {
 public:
  virtual ~Readiness() = default;
  virtual bool can_read() const = 0;
  virtual bool can_write() const = 0;
};

// The pages of a segment stay shared and need no reservation: all ranks are threads of one process.
class SimulatedSegment : public os::SharedMemory, public os::SharedPages {
 public:
  explicit SimulatedSegment(std::shared_ptr<os::SharedMemory> memory)
      : memory_(std::move(memory)) {}

  Bytes bytes() const override { return memory_->bytes(); }
  Status reserve(size_t, size_t) override { return {}; }
  Status make_private(size_t, size_t) override { return {}; }
  Status release(size_t begin, size_t num_bytes) override {
    return os::release_pages(*memory_, begin, num_bytes);
  }
  Result<std::unique_ptr<os::SharedMemory>> map_ranges(std::span<const size_t> begins,
                                                       size_t num_bytes) override {
    return dynamic_cast<os::SharedPages&>(*memory_).map_ranges(begins, num_bytes);
  }
  const std::shared_ptr<os::SharedMemory>& memory() const { return memory_; }

 private:
  std::shared_ptr<os::SharedMemory> memory_;  // all ranks that hold the segment share it
};

class SimulatedSocket final : public os::Socket, public Readiness {
 public:
  SimulatedSocket(Network& network, std::shared_ptr<Connection> connection, int side);
  ~SimulatedSocket() override;

  Result<size_t> try_send(ConstBytes data) override;
  Result<size_t> try_recv(Bytes buffer) override;
  Result<bool> try_send_segment(const os::SharedMemory& segment) override;
  Result<std::unique_ptr<os::SharedMemory>> try_recv_segment() override;
  Status check_peer_user() const override { return {}; }  // all ranks belong to one user
  void shutdown() override;
  os::Address local_address() const override { return connection_->end(side_).address; }
  os::Address peer_address() const override { return connection_->end(1 - side_).address; }
  bool can_read() const override { return connection_->can_recv(side_); }
  bool can_write() const override { return connection_->can_send(side_); }

 private:
  // Counts a scheduling point. Returns an error if the caller's rank is dead but its destructors
  // still use the socket.
  Status point(std::string_view what);
  Status require_unix() const;

  Network& network_;
  std::shared_ptr<Connection> connection_;  // the other end shares it
  const int side_;
};

class SimulatedListener final : public os::Listener, public Readiness {
 public:
  SimulatedListener(Network& network, std::shared_ptr<ListenPoint> point);
  ~SimulatedListener() override;

  Result<std::unique_ptr<os::Socket>> try_accept() override;
  os::Address address() const override { return point_->address; }
  bool can_read() const override { return !point_->backlog.empty(); }
  bool can_write() const override { return false; }

 private:
  Network& network_;
  std::shared_ptr<ListenPoint> point_;  // the network's table shares it
};

class SimulatedEvent final : public os::Event, public Readiness {
 public:
  explicit SimulatedEvent(Scheduler& scheduler) : scheduler_(scheduler) {}

  // Adds a rank that polls the event: notify() calls Scheduler::touch() for it. There may be
  // several, because tests share events between ranks.
  void add_poller(int rank);

  void notify() override;
  void clear() override { set(false); }
  bool can_read() const override { return is_set_; }
  bool can_write() const override { return false; }

 private:
  void set(bool is_set);

  Scheduler& scheduler_;
  std::vector<int> pollers_;  // the ranks that poll the event
  bool is_set_ = false;
};

}  // namespace cadre::sim
