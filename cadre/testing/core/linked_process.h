// The TcpLinks of one process, for tests. Listens, accepts connections in its own thread, and opens
// connections on first use. In place of the authenticated handshake of the library, the side that
// opens a connection sends its rank first.
//
// Threads: all methods from any thread. Blocking: the destructor joins the thread. Lifetime: the
// System must outlive it. Errors: the constructor throws if it cannot listen.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "cadre/core/os/system.h"
#include "cadre/core/transport/tcp/tcp_links.h"

namespace cadre::testing {

// Sends or receives one byte. Two such transfers replace the handshake of a connection.
inline Status move_greeting(os::System& system, os::Socket& socket, std::byte& value,
                            bool is_sender, Deadline deadline) {
  while (true) {
    const auto moved =
        is_sender ? socket.try_send(ConstBytes(&value, 1)) : socket.try_recv(Bytes(&value, 1));
    if (!moved.ok()) return moved.error();
    if (*moved == 1) return {};
    os::PollItem item{.target = &socket, .want_read = !is_sender, .want_write = is_sender};
    if (!system.poll(std::span(&item, 1), deadline)) {
      return Error(ErrorCode::kTimeout, "the greeting did not come in time");
    }
  }
}

class LinkedProcess {
 public:
  // Returns the address at which a rank listens. Called when a connection to that rank is opened.
  using AddressOf = std::function<os::Address(int rank)>;

  LinkedProcess(os::System& system, const TcpLinksOptions& options, const os::Address& listen_at,
                AddressOf address_of);
  ~LinkedProcess();

  TcpLinks& links() { return *links_; }
  os::Address address() const { return listener_->address(); }
  // Returns how many connections this process has opened itself.
  int num_dialed() const { return num_dialed_.load(); }

 private:
  Result<std::unique_ptr<os::Socket>> dial(int peer, Deadline deadline);
  void accept_until_stopped();
  void accept_one();

  os::System& system_;
  const int rank_;
  const AddressOf address_of_;
  const std::unique_ptr<os::Listener> listener_;
  const std::unique_ptr<os::Event> stop_;
  std::atomic<int> num_dialed_{0};
  // Shared with the transports that use the links.
  const std::shared_ptr<TcpLinks> links_;
  const std::unique_ptr<os::Thread> acceptor_;
};

inline LinkedProcess::LinkedProcess(os::System& system, const TcpLinksOptions& options,
                                    const os::Address& listen_at, AddressOf address_of)
    : system_(system),
      rank_(options.rank),
      address_of_(std::move(address_of)),
      listener_(system.listen(listen_at).value_or_throw()),
      stop_(system.make_event()),
      links_(std::make_shared<TcpLinks>(
          system, options, [this](int peer, Deadline deadline) { return dial(peer, deadline); })),
      acceptor_(system.spawn("acceptor", [this] { accept_until_stopped(); })) {}

inline LinkedProcess::~LinkedProcess() {
  stop_->notify();
  acceptor_->join();
}

inline Result<std::unique_ptr<os::Socket>> LinkedProcess::dial(int peer, Deadline deadline) {
  auto socket = system_.connect(address_of_(peer), deadline);
  // Returns kTimeout, which the caller retries: if a peer does not listen yet, it will do so soon.
  if (!socket.ok()) return Error(ErrorCode::kTimeout, socket.error().message());
  auto greeting = static_cast<std::byte>(rank_);
  CADRE_RETURN_IF_ERROR(move_greeting(system_, **socket, greeting, true, deadline));
  CADRE_RETURN_IF_ERROR(move_greeting(system_, **socket, greeting, false, deadline));
  num_dialed_.fetch_add(1);
  return socket;
}

inline void LinkedProcess::accept_until_stopped() {
  while (true) {
    std::array<os::PollItem, 2> items = {os::PollItem{.target = listener_.get(), .want_read = true},
                                         os::PollItem{.target = stop_.get(), .want_read = true}};
    system_.poll(items, system_.deadline_in(std::chrono::seconds(60)));
    if (items[1].can_read) return;
    if (items[0].can_read) accept_one();
  }
}

inline void LinkedProcess::accept_one() {
  auto socket = listener_->try_accept();
  if (!socket.ok() || *socket == nullptr) return;
  const Deadline deadline = system_.deadline_in(std::chrono::seconds(10));
  std::byte greeting{};
  if (!move_greeting(system_, **socket, greeting, false, deadline).ok()) return;
  if (!move_greeting(system_, **socket, greeting, true, deadline).ok()) return;
  links_->add(std::to_integer<int>(greeting), std::move(socket).value());
}

}  // namespace cadre::testing
