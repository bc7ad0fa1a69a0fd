// Sockets of the kernel: non-blocking TCP and abstract unix streams.
//
// Threads, blocking, lifetime and errors: see os/socket.h. shutdown() may come from another thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/io/handle_owner.h"
#include "cadre/core/os/native/segment.h"
#include "cadre/core/os/socket.h"

namespace cadre::os {

class NativeSocket final : public Socket, public HandleOwner {
 public:
  // `fd` is connected and non-blocking; `segments` outlives the socket.
  NativeSocket(Fd fd, SegmentTable& segments);

  Result<size_t> try_send(ConstBytes data) override;
  Result<size_t> try_recv(Bytes buffer) override;
  Result<size_t> try_send_parts(std::span<const ConstBytes> parts) override;
  Result<size_t> try_recv_parts(std::span<const Bytes> parts) override;
  size_t num_unsent() const override;
  Result<bool> try_send_segment(const SharedMemory& segment) override;
  Result<std::unique_ptr<SharedMemory>> try_recv_segment() override;
  void limit_silence(Duration limit) override;
  Status check_peer_user() const override;
  void shutdown() override;
  Address local_address() const override { return local_; }
  Address peer_address() const override { return peer_; }
  int poll_handle() const override { return fd_.get(); }
  bool owns_handle() const override { return fd_.is_own(); }

 private:
  Status check_own() const;
  Error closed_here() const;
  Result<size_t> sent_or_lost(ssize_t sent) const;
  Result<size_t> received_or_lost(ssize_t received) const;
  Error lost(int error_number) const;
  Error ended() const;
  Status require_unix() const;

  Fd fd_;
  SegmentTable& segments_;
  Address local_;
  Address peer_;
  std::atomic<bool> was_shut_down_{false};
  // The clock tick in which check_own() last found that the descriptor belongs to this object.
  mutable std::atomic<int64_t> checked_at_{-1};
};

class NativeListener final : public Listener, public HandleOwner {
 public:
  // `fds` is not empty: it has one socket for each address of the host name.
  NativeListener(std::vector<Fd> fds, SegmentTable& segments);

  Result<std::unique_ptr<Socket>> try_accept() override;
  // Returns the address of the first socket.
  Address address() const override { return address_; }
  int poll_handle() const override { return fds_.size() == 1 ? fds_[0].get() : any_.get(); }
  bool owns_handle() const override { return fds_.size() == 1 ? fds_[0].is_own() : any_.is_own(); }

 private:
  Result<std::unique_ptr<Socket>> try_accept_at(const Fd& fd);

  std::vector<Fd> fds_;
  Fd any_;  // used with several sockets: an epoll that is readable if one of them is
  SegmentTable& segments_;
  Address address_;
};

}  // namespace cadre::os
