#include "cadre/core/store/tcp/client_connection.h"

#include <algorithm>
#include <array>

#include "cadre/core/base/format.h"

namespace cadre::store {
namespace {

constexpr size_t kReadBytes = 64 << 10;
// The number of bytes that one client may send before the server serves the other clients.
constexpr size_t kMaxReadBytesPerTurn = 1 << 20;
// Back-pressure: the server stops reading from a client that has not read this many bytes of
// answers.
constexpr size_t kMaxUnsentBytes = 64 << 20;

}  // namespace

bool is_loopback(const os::Address& address) {
  if (address.kind == os::Address::Kind::kUnix) return true;
  const std::string_view host = address.host;
  return host == "localhost" || host == "::1" || host.starts_with("127.") ||
         host.starts_with("::ffff:127.");
}

ClientConnection::ClientConnection(const ServerContext& context, uint32_t number,
                                   std::unique_ptr<os::Socket> socket, Deadline greeting_deadline)
    : context_(context),
      tickets_(number),
      socket_(std::move(socket)),
      greeting_deadline_(greeting_deadline) {
  // A client reads its answers at once unless it is stopped or its host has failed, so one that
  // does not acknowledge bytes within the limit is dropped.
  socket_->limit_silence(context.silence_limit);
}

os::PollItem ClientConnection::interest() const {
  return {.target = socket_.get(),
          .want_read = out_.size() < kMaxUnsentBytes,
          .want_write = !out_.empty()};
}

Status ClientConnection::on_ready(const os::PollItem& item) {
  if (item.can_write) {
    CADRE_RETURN_IF_ERROR(flush());
    CADRE_RETURN_IF_ERROR(serve());
  }
  if (item.can_read) CADRE_RETURN_IF_ERROR(receive());
  return flush();
}

Status ClientConnection::receive() {
  std::array<std::byte, kReadBytes> buffer;
  for (size_t total = 0; total < kMaxReadBytesPerTurn;) {
    const Result<size_t> received = socket_->try_recv(buffer);
    if (!received.ok()) return received.error();
    if (*received == 0) break;
    total += *received;
    in_.append(ConstBytes(buffer).first(*received));
    if (const Status served = serve(); !served.ok()) {
      // The last answer may tell the client the reason of the error, so it is sent if the socket
      // takes it without blocking.
      (void)flush();
      return served;
    }
  }
  return {};
}

Status ClientConnection::serve() {
  if (!session_) CADRE_RETURN_IF_ERROR(make_session());
  while (session_ && out_.size() < kMaxUnsentBytes) {
    const Result<bool> stepped = session_->step(in_, out_);
    if (!stepped.ok()) return stepped.error();
    if (!*stepped) break;
  }
  return {};
}

Status ClientConnection::make_session() {
  if (in_.empty()) return {};
  const auto first = static_cast<wire::StoreVerb>(in_.view()[0]);
  if (first == wire::StoreVerb::kValidate) {
    CADRE_RETURN_IF_ERROR(check_c10d_client());
    session_.emplace(context_.c10d_table, tickets_);
    return {};
  }
  if (first != wire::StoreVerb::kHello) {
    return Error(ErrorCode::kCorruption, "its first bytes belong to no known protocol");
  }
  // If the job has no token, only the user of the process distinguishes a rank from a stranger.
  if (const Status own = context_.token.empty() ? socket_->check_peer_user() : Status();
      !own.ok()) {
    return Error(
        own.error().code(),
        format(
            "{}; to admit processes of other users, give every rank of the job one CADRE_JOB_TOKEN",
            own.error().message()));
  }
  wire::Nonce nonce;
  context_.system.random_bytes(nonce);
  session_.emplace(context_.table, tickets_, context_.token, nonce);
  return {};
}

Status ClientConnection::check_c10d_client() const {
  if (!context_.serve_c10d) {
    return Error(ErrorCode::kInvalidArgument, "c10d's protocol is switched off");
  }
  const os::Address peer = socket_->peer_address();
  const bool is_local = is_loopback(peer) || peer.host == socket_->local_address().host;
  if (is_local) return socket_->check_peer_user();
  if (std::ranges::find(context_.c10d_hosts, peer.host) != context_.c10d_hosts.end()) return {};
  return Error(ErrorCode::kInvalidArgument,
               "c10d's protocol is served for this host and for the hosts of the job only");
}

Status ClientConnection::on_ticket(KeyTable::Ticket ticket) {
  if (!session_) return {};
  // The client may have ended, or cancelled its request, since the socket was read last. In that
  // case the item goes back to its queue.
  if (session_->awaits_item(ticket)) CADRE_RETURN_IF_ERROR(receive());
  session_->on_ready(ticket, out_);
  return flush();
}

Status ClientConnection::flush() {
  while (!out_.empty()) {
    const Result<size_t> sent = socket_->try_send(out_.view());
    if (!sent.ok()) return sent.error();
    if (*sent == 0) break;
    out_.consume(*sent);
  }
  return {};
}

}  // namespace cadre::store
