#include "cadre/core/store/tcp/tcp_store_server.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/core/base/quiet_log.h"
#include "cadre/core/os/host/descriptor_limit.h"
#include "cadre/core/os/host/fork_mark.h"
#include "cadre/core/os/io/poll_set.h"
#include "cadre/core/store/key_table.h"
#include "cadre/core/store/tcp/client_connection.h"

namespace cadre {

using store::ClientConnection;

class TcpStoreServer::Impl {
 public:
  Impl(os::System& system, const TcpStoreServerOptions& options,
       std::unique_ptr<os::Listener> listener)
      : system_(system),
        options_(options),
        log_(options.log),
        listener_(std::move(listener)),
        address_(listener_->address()),
        stop_event_(system.make_event()),
        table_(options.max_bytes),
        c10d_table_(options.max_c10d_bytes),
        context_{table_,
                 c10d_table_,
                 options_.token,
                 options_.serve_c10d,
                 options_.c10d_hosts,
                 options_.silence_limit,
                 system_},
        poll_set_(system),
        spare_(system.make_event()) {}

  // Registers the descriptors with the poll set here and not in the thread, so that an error
  // reaches the caller.
  void start() {
    poll_set_.watch(kStopKey, {.target = stop_event_.get(), .want_read = true});
    poll_set_.watch(kListenerKey, {.target = listener_.get(), .want_read = true});
    thread_ = system_.spawn("cadre_store", [this] { run(); });
  }

  bool is_in_child() const { return mark_.is_in_child(); }

  void close() {
    if (!thread_ || is_in_child()) return;
    stopping_.store(true, std::memory_order_release);
    stop_event_->notify();
    thread_->join();
    thread_.reset();
  }

  const os::Address& address() const { return address_; }

 private:
  // kIdleWait (below) is the longest wait of the server's loop. It is needed only because every
  // wait must have a finite deadline.
  static constexpr uint64_t kStopKey = 0;
  static constexpr uint64_t kListenerKey = 1;
  static constexpr uint64_t kFirstClientKey = 2;
  static constexpr Duration kIdleWait = std::chrono::seconds(60);
  static constexpr Duration kAcceptPause = std::chrono::milliseconds(100);
  static constexpr size_t kMaxAcceptsPerTurn = 64;
  static constexpr size_t kMaxReplacementsPerTurn = 8;

  void run() {
    while (!stopping_.load(std::memory_order_acquire)) {
      poll_set_.watch(kListenerKey, {.target = listener_.get(), .want_read = may_accept()});
      // The items are copied, because serving one client may close the connection of another one.
      const auto ready = poll_set_.wait(next_deadline());
      const std::vector<os::PollSet::Ready> items(ready.begin(), ready.end());
      bool has_callers = false;
      for (const os::PollSet::Ready& item : items) {
        has_callers = has_callers || item.key == kListenerKey;
        if (item.key < kFirstClientKey) continue;
        serve(static_cast<uint32_t>(item.key - kFirstClientKey), item);
      }
      // New connections are accepted last, so that a client that has sent bytes is served before it
      // could be dropped to make room for a new one.
      if (has_callers) accept();
      drop_strangers();
      regain_spare();
    }
    connections_.clear();
    spare_.reset();
    listener_.reset();
  }

  Deadline next_deadline() {
    Deadline deadline = system_.deadline_in(kIdleWait);
    if (!may_accept()) deadline = deadline.earlier(Deadline(accept_after_));
    forget_accepted();
    if (strangers_.empty()) return deadline;
    return deadline.earlier(connections_.at(strangers_.front())->greeting_deadline());
  }

  // Removes connections from the front of strangers_ that have completed the handshake or were
  // closed.
  void forget_accepted() {
    while (!strangers_.empty()) {
      const auto found = connections_.find(strangers_.front());
      if (found != connections_.end() && !found->second->is_accepted()) return;
      strangers_.pop_front();
    }
  }

  bool may_accept() { return system_.now() >= accept_after_; }

  // Accepts new connections. If they replace older ones, only a few are accepted in one turn, so
  // that the older ones have time to complete their handshakes.
  void accept() {
    size_t num_left = kMaxAcceptsPerTurn;
    bool has_made_room = false;
    while (num_left-- > 0) {
      Result<std::unique_ptr<os::Socket>> socket = listener_->try_accept();
      if (!socket.ok()) {
        if (!has_made_room && make_room(socket.error())) {
          has_made_room = true;
          num_left = std::min(num_left, kMaxReplacementsPerTurn);
          continue;
        }
        log_.write(LogLevel::kWarning, "store",
                   format("accept failed clients={} reason=\"{}\"; raise ulimit -n if descriptors "
                          "ran out",
                          connections_.size(), socket.error().message()));
        // The connection stays in the kernel's queue, so without a pause poll() would report it
        // again at once.
        accept_after_ = system_.now() + kAcceptPause;
        return;
      }
      if (!*socket) return;
      has_made_room = false;
      add(std::move(*socket));
      if (!has_too_many_strangers()) continue;
      num_left = std::min(num_left, kMaxReplacementsPerTurn);
      drop_oldest_stranger("too many connections have not proved themselves");
    }
  }

  // Called if accept() has failed, most likely because the process is out of descriptors. Closes
  // the oldest stranger (client whose handshake is not complete), which may be connected only to
  // use up descriptors. If there is no stranger, closes the spare descriptor, so that the new
  // client need not wait in the queue. That client is then the stranger that is closed for the next
  // one.
  bool make_room(const Error& error) {
    if (drop_oldest_stranger(
            format("no descriptor was left for another client: {}", error.message()))) {
      return true;
    }
    return std::exchange(spare_, nullptr) != nullptr;
  }

  void add(std::unique_ptr<os::Socket> socket) {
    if (connections_.size() >= options_.max_connections) {
      log_.write(LogLevel::kWarning, "store",
                 format("refused peer={} reason=\"{} connections are open\"",
                        socket->peer_address().to_string(), connections_.size()));
      return;
    }
    const uint32_t number = next_number_++;
    const auto [place, is_fresh] = connections_.emplace(
        number, std::make_unique<ClientConnection>(context_, number, std::move(socket),
                                                   system_.deadline_in(options_.greeting_timeout)));
    strangers_.push_back(number);
    try {
      watch(number, *place->second);
    } catch (const Error& error) {  // the kernel has no memory left to watch the socket
      drop(number, error);
    }
  }

  bool is_stranger(uint32_t number) const {
    const auto found = connections_.find(number);
    return found != connections_.end() && !found->second->is_accepted();
  }

  void forget_all_accepted() {
    std::erase_if(strangers_, [this](uint32_t number) { return !is_stranger(number); });
  }

  bool has_too_many_strangers() {
    const size_t most = std::max<size_t>(options_.max_strangers, 1);
    if (strangers_.size() <= most) return false;
    forget_all_accepted();
    return strangers_.size() > most;
  }

  // Drops the oldest stranger (client whose handshake is not complete) that has sent no greeting,
  // because a rank of the job sends it at once. But a greeting needs no token: if most strangers
  // have sent one, drops the oldest stranger of all, which has had the most time for its proof.
  // Otherwise strangers that send only a greeting would keep out all new clients.
  bool drop_oldest_stranger(std::string_view reason) {
    forget_all_accepted();
    if (strangers_.empty()) return false;
    const auto is_silent = [this](uint32_t number) {
      return !connections_.at(number)->has_greeted();
    };
    const auto num_silent = static_cast<size_t>(std::ranges::count_if(strangers_, is_silent));
    const auto oldest = 2 * num_silent > strangers_.size()
                            ? std::ranges::find_if(strangers_, is_silent)
                            : strangers_.begin();
    drop(*oldest, Error(ErrorCode::kUnavailable, std::string(reason)));
    return true;
  }

  void regain_spare() {
    try {
      if (spare_ == nullptr) spare_ = system_.make_event();
    } catch (const Error&) {
      // No descriptor is free yet, so the next call tries again.
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

  // Answers the waiting requests that became ready because another client has changed the table.
  void wake_ready() {
    // A client that is dropped here may leave a will or give back an item, which wakes others.
    for (auto ready = take_ready(); !ready.empty(); ready = take_ready()) {
      for (const store::KeyTable::Ticket ticket : ready) {
        const uint32_t number = store::TicketSource::connection_of(ticket);
        const auto found = connections_.find(number);
        if (found == connections_.end()) continue;
        const Status status = found->second->on_ticket(ticket);
        if (status.ok()) {
          watch(number, *found->second);
        } else {
          drop(number, status.error());
        }
      }
    }
  }

  // Drops the strangers whose time for the handshake is over. All strangers have the same time, so
  // the oldest one exceeds it first.
  void drop_strangers() {
    const TimePoint now = system_.now();
    for (forget_accepted(); !strangers_.empty(); forget_accepted()) {
      const uint32_t number = strangers_.front();
      if (!connections_.at(number)->greeting_deadline().has_passed(now)) return;
      drop(number, Error(ErrorCode::kTimeout, "the client did not finish the handshake in time"));
    }
  }

  void drop(uint32_t number, const Error& reason) {
    const auto found = connections_.find(number);
    if (found == connections_.end()) return;
    // It is normal that an accepted client closes its connection: a rank does so when it ends.
    const bool is_normal = found->second->is_accepted() && reason.code() == ErrorCode::kPeerLost;
    log_.write(is_normal ? LogLevel::kDebug : LogLevel::kWarning, "store",
               format("dropped peer={} reason=\"{}\"", found->second->peer(),
                      printable(reason.message())));
    poll_set_.forget(key_of(number));
    connections_.erase(found);
  }

  os::System& system_;
  const os::ForkMark mark_;
  const TcpStoreServerOptions options_;
  QuietLog log_;
  std::unique_ptr<os::Listener> listener_;
  const os::Address address_;
  std::unique_ptr<os::Event> stop_event_;
  std::atomic<bool> stopping_{false};
  // Only the server's thread uses the members from here on.
  store::KeyTable table_;
  store::KeyTable c10d_table_;
  const store::ServerContext context_;
  os::PollSet poll_set_;
  std::unordered_map<uint32_t, std::unique_ptr<ClientConnection>> connections_;
  // The numbers of the strangers (clients whose handshake is not complete) in the order in which
  // they connected. Some may have completed the handshake or been closed since.
  std::deque<uint32_t> strangers_;
  uint32_t next_number_ = 0;
  // A spare descriptor, which is closed if the process has none left for a new client.
  std::unique_ptr<os::Event> spare_;
  TimePoint accept_after_;
  std::unique_ptr<os::Thread> thread_;  // used by the owner's thread only
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
  try {
    auto impl = std::make_unique<Impl>(system, options, std::move(listener).value());
    impl->start();
    return std::make_unique<TcpStoreServer>(std::move(impl));
  } catch (const Error& error) {  // no descriptor or thread was left
    return error.with_context("store server");
  }
}

TcpStoreServer::TcpStoreServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

// A forked child has no thread to join, and it shares the stop event: if the child set it, the
// parent's thread would find it set at every poll. So the child does not destroy its copy of the
// server.
TcpStoreServer::~TcpStoreServer() {
  if (impl_->is_in_child()) {
    static_cast<void>(impl_.release());
    return;
  }
  impl_->close();
}

os::Address TcpStoreServer::address() const {
  return impl_->address();
}

void TcpStoreServer::close() {
  impl_->close();
}

}  // namespace cadre
