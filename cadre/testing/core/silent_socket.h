// A socket that accepts all bytes that are sent and never receives any. Tests override the calls
// that they need.
//
// Threads: one at a time. For tests only.
#pragma once

#include <memory>

#include "cadre/core/os/shared_memory.h"
#include "cadre/core/os/socket.h"

namespace cadre::testing {

class SilentSocket : public os::Socket {
 public:
  Result<size_t> try_send(ConstBytes data) override { return data.size(); }
  Result<size_t> try_recv(Bytes) override { return size_t{0}; }
  Result<bool> try_send_segment(const os::SharedMemory&) override { return false; }
  Result<std::unique_ptr<os::SharedMemory>> try_recv_segment() override {
    return std::unique_ptr<os::SharedMemory>();
  }
  void shutdown() override {}
  os::Address local_address() const override { return {}; }
  os::Address peer_address() const override { return {}; }
  Status check_peer_user() const override { return {}; }
};

}  // namespace cadre::testing
