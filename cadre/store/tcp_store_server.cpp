#include "cadre/store/tcp_store_server.h"

#include <atomic>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cadre/base/format.h"
#include "cadre/os/host/descriptor_limit.h"
#include "cadre/os/io/poll_set.h"
#include "cadre/store/key_table.h"
#include "cadre/store/tcp/client_connection.h"

namespace cadre {

using store::ClientConnection;

class TcpStoreServer::Impl {
 public:
  Impl(os::System& system, const TcpStoreServerOptions& options,
       std::unique_ptr<os::Listener> listener)
      : system_(system),
        options_(options),
        log_(options.log ? *options.log : null_log_sink()),
        listener_(std::move(listener)),
        address_(listener_->address()),
        stop_event_(system.make_event()),
        table_(options.max_bytes),
        c10d_table_(options.max_c10d_bytes),
        context_{table_, c10d_table_, options_.token, options_.serve_c10d, options_.silence_limit,
                 system_},
        poll_set_(system) {}

  void start() {
    thread_ = system_.spawn("cadre_store", [this] { run(); });
  }

  void close() {
    if (!thread_) return;
    stopping_.store(true, std::memory_order_release);
    stop_event_->notify();
    thread_->join();
    thread_.reset();
  }

  const os::Address& address() const { return address_; }

 private:
  // With nothing to do the loop wakes up so seldom only because no wait may be endless.
  static constexpr uint64_t kStopKey = 0;
  static constexpr uint64_t kListenerKey = 1;
  static constexpr uint64_t kFirstClientKey = 2;
  static constexpr Duration kIdleWait = std::chrono::seconds(60);
  static constexpr Duration kAcceptPause = std::chrono::milliseconds(100);
  static constexpr size_t kMaxAcceptsPerTurn = 64;

  void run() {
    poll_set_.watch(kStopKey, {.target = stop_event_.get(), .want_read = true});
    while (!stopping_.load(std::memory_order_acquire)) {
      poll_set_.watch(kListenerKey, {.target = listener_.get(), .want_read = may_accept()});
      // What is done for one client may end another's wait, and its connection with it.
      const auto ready = poll_set_.wait(next_deadline());
      const std::vector<os::PollSet::Ready> items(ready.begin(), ready.end());
      for (const os::PollSet::Ready& item : items) {
        if (item.key == kListenerKey) {
          accept();
        } else if (item.key >= kFirstClientKey) {
          serve(static_cast<uint32_t>(item.key - kFirstClientKey), item);
        }
      }
      drop_strangers();
    }
    connections_.clear();
    listener_.reset();
  }

  Deadline next_deadline() {
    Deadline deadline = system_.deadline_in(kIdleWait);
    if (!may_accept()) deadline = deadline.earlier(Deadline(accept_after_));
    forget_accepted();
    if (strangers_.empty()) return deadline;
    return deadline.earlier(connections_.at(strangers_.front())->greeting_deadline());
  }

  // Connections at the front of the queue that have proved themselves or are gone.
  void forget_accepted() {
    while (!strangers_.empty()) {
      const auto found = connections_.find(strangers_.front());
      if (found != connections_.end() && !found->second->is_accepted()) return;
      strangers_.pop_front();
    }
  }

  bool may_accept() { return system_.now() >= accept_after_; }

  void accept() {
    for (size_t i = 0; i < kMaxAcceptsPerTurn; ++i) {
      Result<std::unique_ptr<os::Socket>> socket = listener_->try_accept();
      if (!socket.ok()) {
        log_.write(LogLevel::kWarning, "store",
                   format("accept failed clients={} reason=\"{}\"; raise ulimit -n if descriptors "
                          "ran out",
                          connections_.size(), socket.error().message()));
        // Out of descriptors, most likely: the connection stays in the queue and would be reported
        // again at once.
        accept_after_ = system_.now() + kAcceptPause;
        return;
      }
      if (!*socket) return;
      if (connections_.size() >= options_.max_connections) {
        log_.write(LogLevel::kWarning, "store",
                   format("refused peer={} reason=\"{} connections are open\"",
                          (*socket)->peer_address().to_string(), connections_.size()));
        continue;
      }
      const uint32_t number = next_number_++;
      const auto [place, is_fresh] = connections_.emplace(
          number,
          std::make_unique<ClientConnection>(context_, number, std::move(*socket),
                                             system_.deadline_in(options_.greeting_timeout)));
      strangers_.push_back(number);
      watch(number, *place->second);
    }
  }

  static uint64_t key_of(uint32_t number) { return kFirstClientKey + number; }

  void watch(uint32_t number, const ClientConnection& connection) {
    poll_set_.watch(key_of(number), connection.interest());
  }

  void serve(uint32_t number, const os::PollSet::Ready& ready) {
    const auto found = connections_.find(number);
    if (found == connections_.end()) return;
    os::PollItem item = found->second->interest();
    item.can_read = ready.can_read;
    item.can_write = ready.can_write;
    const Status status = found->second->on_ready(item);
    if (status.ok()) {
      watch(number, *found->second);
    } else {
      drop(number, status.error());
    }
    wake_ready();
  }

  std::vector<store::KeyTable::Ticket> take_ready() {
    std::vector<store::KeyTable::Ticket> ready = table_.take_ready();
    const std::vector<store::KeyTable::Ticket> of_c10d = c10d_table_.take_ready();
    ready.insert(ready.end(), of_c10d.begin(), of_c10d.end());
    return ready;
  }

  // What one client wrote may end the waits of others.
  void wake_ready() {
    // A client that is dropped here may leave a will or give back an item, which wakes others.
    for (auto ready = take_ready(); !ready.empty(); ready = take_ready()) {
      for (const store::KeyTable::Ticket ticket : ready) {
        const uint32_t number = store::TicketSource::connection_of(ticket);
        const auto found = connections_.find(number);
        if (found == connections_.end()) continue;
        found->second->on_ticket(ticket);
        const Status status = found->second->flush();
        if (status.ok()) {
          watch(number, *found->second);
        } else {
          drop(number, status.error());
        }
      }
    }
  }

  // All have the same time to prove themselves, so the oldest is the first to be late.
  void drop_strangers() {
    const TimePoint now = system_.now();
    for (forget_accepted(); !strangers_.empty(); forget_accepted()) {
      const uint32_t number = strangers_.front();
      if (!connections_.at(number)->greeting_deadline().has_passed(now)) return;
      drop(number, Error(ErrorCode::kTimeout, "it did not prove itself in time"));
    }
  }

  void drop(uint32_t number, const Error& reason) {
    const auto found = connections_.find(number);
    if (found == connections_.end()) return;
    // An accepted client that closes its connection is the normal end of a rank.
    const bool is_normal = found->second->is_accepted() && reason.code() == ErrorCode::kPeerLost;
    log_.write(is_normal ? LogLevel::kDebug : LogLevel::kWarning, "store",
               format("dropped peer={} reason=\"{}\"", found->second->peer(), reason.message()));
    poll_set_.forget(key_of(number));
    connections_.erase(found);
  }

  os::System& system_;
  const TcpStoreServerOptions options_;
  LogSink& log_;
  std::unique_ptr<os::Listener> listener_;
  const os::Address address_;
  std::unique_ptr<os::Event> stop_event_;
  std::atomic<bool> stopping_{false};
  // From here on: the server thread's alone.
  store::KeyTable table_;
  store::KeyTable c10d_table_;
  const store::ServerContext context_;
  os::PollSet poll_set_;
  std::unordered_map<uint32_t, std::unique_ptr<ClientConnection>> connections_;
  std::deque<uint32_t> strangers_;  // in the order of their coming; some may be accepted or gone
  uint32_t next_number_ = 0;
  TimePoint accept_after_;
  std::unique_ptr<os::Thread> thread_;  // the owner's
};

Result<std::unique_ptr<TcpStoreServer>> TcpStoreServer::start(
    os::System& system, const TcpStoreServerOptions& options) {
  if (options.token.empty() && !store::is_loopback(options.address)) {
    return Error(ErrorCode::kInvalidArgument,
                 format("a store server on {} can be reached from other hosts and needs a job "
                        "token; set CADRE_JOB_TOKEN to one secret on all ranks, or listen on "
                        "127.0.0.1",
                        options.address.to_string()));
  }
  os::raise_descriptor_limit();
  Result<std::unique_ptr<os::Listener>> listener = system.listen(options.address);
  if (!listener.ok()) return listener.error().with_context("store server");
  auto impl = std::make_unique<Impl>(system, options, std::move(listener).value());
  impl->start();
  return std::make_unique<TcpStoreServer>(std::move(impl));
}

TcpStoreServer::TcpStoreServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

TcpStoreServer::~TcpStoreServer() {
  impl_->close();
}

os::Address TcpStoreServer::address() const {
  return impl_->address();
}

void TcpStoreServer::close() {
  impl_->close();
}

}  // namespace cadre
