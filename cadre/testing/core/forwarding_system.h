// A System that forwards every call to another System. Tests override the calls that they change.
//
// Threads, blocking and errors: those of the inner System. Lifetime: the inner System must outlive
// it.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "cadre/core/os/system.h"

namespace cadre::testing {

class ForwardingSystem : public os::System {
 public:
  explicit ForwardingSystem(os::System& inner) : inner_(inner) {}

  TimePoint now() override { return inner_.now(); }
  os::HostInfo host() override { return inner_.host(); }
  std::unique_ptr<os::Thread> spawn(std::string name, std::function<void()> body) override {
    return inner_.spawn(std::move(name), std::move(body));
  }
  std::unique_ptr<os::Waiter> make_waiter() override { return inner_.make_waiter(); }
  int spin_limit() override { return inner_.spin_limit(); }
  void yield() override { inner_.yield(); }
  bool wait_while(os::WaitWord& word, uint32_t old, Deadline deadline) override {
    return inner_.wait_while(word, old, deadline);
  }
  void publish(os::WaitWord& word, uint32_t value) override { inner_.publish(word, value); }
  void wake(os::WaitWord& word) override { inner_.wake(word); }
  bool poll(std::span<os::PollItem> items, Deadline deadline) override {
    return inner_.poll(items, deadline);
  }
  Result<std::unique_ptr<os::Listener>> listen(const os::Address& address) override {
    return inner_.listen(address);
  }
  Result<std::unique_ptr<os::Socket>> connect(const os::Address& address,
                                              Deadline deadline) override {
    return inner_.connect(address, deadline);
  }
  std::unique_ptr<os::Event> make_event() override { return inner_.make_event(); }
  Result<std::unique_ptr<os::SharedMemory>> create_segment(size_t num_bytes) override {
    return inner_.create_segment(num_bytes);
  }
  void random_bytes(Bytes out) override { inner_.random_bytes(out); }

 protected:
  os::System& inner_;
};

}  // namespace cadre::testing
