#include "cadre/core/fabric/bootstrap/background_connect.h"

#include <utility>

namespace cadre {
namespace {

// The time limit of one connect(). A connect() in progress cannot be cancelled, so a dial consists
// of a series of short attempts.
constexpr Duration kDialSlice = std::chrono::seconds(1);

Result<std::unique_ptr<os::Socket>> connect_in_slices(os::System& system,
                                                      const os::Address& address,
                                                      const std::atomic<bool>& is_dropped,
                                                      Deadline deadline) {
  while (true) {
    auto socket = system.connect(address, deadline.earlier(system.deadline_in(kDialSlice)));
    if (socket.ok() || socket.error().code() != ErrorCode::kTimeout) return socket;
    if (is_dropped || deadline.has_passed(system.now())) return socket;
  }
}

}  // namespace

BackgroundConnect::BackgroundConnect(os::System& system, Result<os::Address> address,
                                     Deadline give_up, os::Event& wake_up)
    : attempt_(std::make_shared<Attempt>()) {
  if (!address.ok()) {
    attempt_->result = address.error();
    wake_up.notify();
    return;
  }
  const auto open = [&system, &wake_up, attempt = attempt_, address = *std::move(address),
                     give_up] {
    auto socket = connect_in_slices(system, address, attempt->is_dropped, give_up);
    {
      std::lock_guard lock(attempt->mutex);
      attempt->result = std::move(socket);
    }
    wake_up.notify();
  };
  thread_ = system.spawn("cadre-dial", open);
}

BackgroundConnect::~BackgroundConnect() {
  drop();
  if (thread_ != nullptr) thread_->join();
}

std::optional<Result<std::unique_ptr<os::Socket>>> BackgroundConnect::take() {
  std::optional<Result<std::unique_ptr<os::Socket>>> result;
  {
    std::lock_guard lock(attempt_->mutex);
    result.swap(attempt_->result);
  }
  if (result && thread_ != nullptr) {
    thread_->join();
    thread_.reset();
  }
  return result;
}

}  // namespace cadre
