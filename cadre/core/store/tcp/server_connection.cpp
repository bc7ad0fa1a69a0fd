#include "cadre/core/store/tcp/server_connection.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/store/tcp/greeting.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::store {
namespace {

using wire::StoreRequest;
using wire::StoreResponse;
using wire::StoreVerb;

// Returns the beginning of an answer for a message, for example "HTTP/1.1 400 Bad Re...".
std::string beginning_of(ConstBytes bytes) {
  constexpr size_t kShownBytes = 24;
  std::string text;
  for (const std::byte byte : bytes.first(std::min(bytes.size(), kShownBytes))) {
    const auto character = std::to_integer<unsigned char>(byte);
    const bool is_plain = character >= ' ' && character <= '~';
    if (character == '\r' || character == '\n') break;
    text.push_back(is_plain ? static_cast<char>(character) : '?');
  }
  return text;
}

// The pause between two attempts to connect to a server that closes the connection during the
// handshake. It doubles each time.
constexpr Duration kFirstPause = std::chrono::milliseconds(20);
constexpr Duration kLongestPause = std::chrono::milliseconds(500);

// c10d's TCPStore puts this prefix before each key, so this client does so, too.
constexpr char kC10dPrefix = '/';

}  // namespace

ServerConnection::ServerConnection(os::System& system, StoreProtocol protocol,
                                   std::unique_ptr<os::Socket> socket)
    : system_(system), protocol_(protocol), socket_(std::move(socket)) {}

Status ServerConnection::greet(const os::Secret& token, Deadline deadline) {
  return is_c10d() ? validate(deadline) : prove(token, deadline);
}

Status ServerConnection::validate(Deadline deadline) {
  CADRE_RETURN_IF_ERROR(send({.verb = StoreVerb::kValidate, .amount = wire::kC10dMagic}, deadline));
  std::array<std::byte, sizeof(next_nonce_)> random;
  system_.random_bytes(random);
  std::memcpy(&next_nonce_, random.data(), random.size());
  CADRE_RETURN_IF_ERROR(ping(deadline));
  return {};
}

Status ServerConnection::prove(const os::Secret& token, Deadline deadline) {
  wire::Nonce own_nonce;
  system_.random_bytes(own_nonce);
  const StoreRequest hello = hello_of_client(own_nonce);
  const Result<StoreResponse> server = exchange(hello, deadline);
  if (!server.ok() && server.error().code() == ErrorCode::kCorruption) {
    return Error(ErrorCode::kCorruption,
                 format("it answered \"{}\"", beginning_of(buffer_.view())));
  }
  if (!server.ok()) return server.error();
  if (server->error) return *server->error;
  CADRE_RETURN_IF_ERROR(check_same_build({.name = server->values[0], .protocol = server->number},
                                         {.name = this_build()}));
  const Result<wire::Nonce> nonce = read_nonce(server->values[1]);
  if (!nonce.ok()) return nonce.error();
  const auto proof = wire::prove_token(token.view(), kClientProver, *nonce, own_nonce);
  if (!proof.ok()) return proof.error();
  const Result<StoreResponse> welcome = exchange(
      {.verb = StoreVerb::kProve, .values = {std::string(wire::as_text(*proof))}}, deadline);
  if (!welcome.ok()) return welcome.error();
  if (welcome->error) return *welcome->error;
  const auto expected = wire::prove_token(token.view(), kServerProver, own_nonce, *nonce);
  if (!expected.ok()) return expected.error();
  if (wire::equals_in_constant_time(wire::as_bytes(welcome->values[0]), *expected)) return {};
  return Error(ErrorCode::kInvalidArgument,
               "the store server did not prove that it knows the job token: another job may be "
               "listening there");
}

Result<StoreResponse> ServerConnection::call(StoreRequest request, Deadline deadline) {
  // The connection is not usable if the call ends early, because a request may have been sent only
  // in part.
  is_usable_ = false;
  if (is_c10d()) {
    for (std::string& key : request.keys) key.insert(key.begin(), kC10dPrefix);
  }
  Result<StoreResponse> response =
      is_c10d() ? call_c10d(request, deadline) : call_cadre(request, deadline);
  is_usable_ = response.ok();
  return response;
}

// Cancels the request at its deadline and waits for the one answer that the server sends. If the
// server had answered the request before it received the cancellation, for example with an item
// that it has removed from the queue, the one answer is the result of the request; else it is a
// kTimeout error.
Result<StoreResponse> ServerConnection::call_cadre(const StoreRequest& request, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(send(request, deadline));
  Result<StoreResponse> response = receive(request, deadline);
  if (response.ok() || response.error().code() != ErrorCode::kTimeout) return response;
  const Deadline cancelled = system_.deadline_in(kCancelTime);
  // If the cancellation cannot be sent, the result is still the timeout: the deadline has passed.
  if (!send({.verb = StoreVerb::kCancel}, cancelled).ok()) return response;
  Result<StoreResponse> last = receive(request, cancelled);
  return last.ok() ? std::move(last) : std::move(response);
}

Result<StoreResponse> ServerConnection::call_c10d(const StoreRequest& request, Deadline deadline) {
  // A request that the server answers at once gets at least kCancelTime, even if the deadline of
  // the call has passed.
  const Deadline at_once = deadline.later(system_.deadline_in(kCancelTime));
  switch (request.verb) {
    case StoreVerb::kSet:
    case StoreVerb::kAppend:
    case StoreVerb::kMultiSet:
    case StoreVerb::kQueuePush:
      CADRE_RETURN_IF_ERROR(send(request, at_once));
      return ping(at_once);
    case StoreVerb::kWait:
    case StoreVerb::kGet:
    case StoreVerb::kMultiGet:
      if (request.keys.empty()) return StoreResponse();
      CADRE_RETURN_IF_ERROR(await_keys(request, deadline));
      if (request.verb == StoreVerb::kWait) return StoreResponse();
      return exchange(request, deadline.later(system_.deadline_in(kCancelTime)));
    case StoreVerb::kCheck:
      if (request.keys.empty()) return StoreResponse{.number = 1};
      return exchange(request, at_once);
    case StoreVerb::kQueuePop:
    case StoreVerb::kTryQueuePop:
      return pop(request, deadline);
    case StoreVerb::kListKeys:
      return list_keys(at_once);
    case StoreVerb::kBarrier:
      return exchange(request, deadline);
    default:
      return exchange(request, at_once);
  }
}

Status ServerConnection::await_keys(const StoreRequest& request, Deadline deadline) {
  if (deadline.has_passed(system_.now())) {
    const Result<StoreResponse> are_there = exchange(
        {.verb = StoreVerb::kCheck, .keys = request.keys}, system_.deadline_in(kCancelTime));
    if (!are_there.ok()) return are_there.error();
    if (are_there->number == 1) return {};
    return Error(ErrorCode::kTimeout, "the keys were not set before the deadline");
  }
  const Result<StoreResponse> answer =
      exchange({.verb = StoreVerb::kWait, .keys = request.keys}, deadline);
  if (!answer.ok()) return answer.error();
  if (answer->number == wire::kC10dStopWaiting) return {};
  return Error(ErrorCode::kCorruption,
               format("the c10d store server answered wait with {}", answer->number));
}

Result<StoreResponse> ServerConnection::pop(const StoreRequest& request, Deadline deadline) {
  const bool waits = request.verb == StoreVerb::kQueuePop;
  const StoreRequest attempt{.verb = StoreVerb::kTryQueuePop, .keys = request.keys};
  while (true) {
    if (waits) CADRE_RETURN_IF_ERROR(await_keys(request, deadline));
    CADRE_RETURN_IF_ERROR(send(attempt, deadline));
    // The server may have removed the item from its queue already, so the call waits for the answer
    // beyond the deadline.
    Result<StoreResponse> item = receive(attempt, system_.deadline_in(kCancelTime).later(deadline));
    if (!item.ok() || item->number > 0 || !waits) return item;
  }
}

Result<StoreResponse> ServerConnection::list_keys(Deadline deadline) {
  const Result<StoreResponse> keys = exchange({.verb = StoreVerb::kListKeys}, deadline);
  if (!keys.ok()) return keys.error();
  StoreResponse response;
  for (const std::string& key : keys->values) {
    if (key.starts_with(kC10dPrefix)) response.values.push_back(key.substr(1));
  }
  std::sort(response.values.begin(), response.values.end());
  return response;
}

Result<StoreResponse> ServerConnection::ping(Deadline deadline) {
  const uint32_t nonce = next_nonce_++;
  const Result<StoreResponse> answer =
      exchange({.verb = StoreVerb::kPing, .amount = nonce}, deadline);
  if (!answer.ok()) return answer.error();
  if (answer->number == nonce) return StoreResponse();
  return Error(ErrorCode::kCorruption,
               format("the store server answered a ping of {} with {}: it is no c10d TCPStore of "
                      "torch 2.11 or later",
                      nonce, answer->number));
}

Result<StoreResponse> ServerConnection::exchange(const StoreRequest& request, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(send(request, deadline));
  return receive(request, deadline);
}

Status ServerConnection::send(const StoreRequest& request, Deadline deadline) {
  const std::vector<std::byte> message = wire::encode(request);
  if (message.size() > wire::kMaxMessageBytes) {
    return Error(ErrorCode::kInvalidArgument,
                 format("store {} of {} bytes is over the limit of {} bytes for one call; split it",
                        wire::to_string(request.verb), message.size(), wire::kMaxMessageBytes));
  }
  for (ConstBytes rest = message; !rest.empty();) {
    const Result<size_t> sent = socket_->try_send(rest);
    if (!sent.ok()) return sent.error();
    rest = rest.subspan(*sent);
    if (*sent > 0) continue;
    os::PollItem item{.target = socket_.get(), .want_write = true};
    if (!system_.poll(std::span(&item, 1), deadline)) {
      return Error(ErrorCode::kTimeout, "the store server did not take a request in time");
    }
  }
  return {};
}

Result<StoreResponse> ServerConnection::receive(const StoreRequest& request, Deadline deadline) {
  const auto decode = is_c10d() ? wire::decode_c10d_answer : wire::decode_answer;
  while (true) {
    auto answer = decode(request, buffer_.view(), progress_);
    if (!answer.ok()) return answer.error();
    if (answer->message) {
      buffer_.consume(answer->num_bytes);
      return *std::move(answer->message);
    }
    CADRE_RETURN_IF_ERROR(receive_more(deadline));
  }
}

Status ServerConnection::receive_more(Deadline deadline) {
  constexpr size_t kChunkBytes = 64 << 10;
  std::array<std::byte, kChunkBytes> chunk;
  while (true) {
    const Result<size_t> received = socket_->try_recv(chunk);
    if (!received.ok()) return received.error();
    if (*received > 0) {
      buffer_.append(ConstBytes(chunk).first(*received));
      return {};
    }
    os::PollItem item{.target = socket_.get(), .want_read = true};
    if (!system_.poll(std::span(&item, 1), deadline)) {
      return Error(ErrorCode::kTimeout, "the store server did not answer in time");
    }
  }
}

Result<std::unique_ptr<ServerConnection>> dial(os::System& system, const TcpStoreOptions& options,
                                               Deadline deadline) {
  Duration pause = kFirstPause;
  while (true) {
    Result<std::unique_ptr<os::Socket>> socket = system.connect(options.address, deadline);
    if (!socket.ok()) return socket.error();
    auto connection =
        std::make_unique<ServerConnection>(system, options.protocol, std::move(socket).value());
    const Status greeted = connection->greet(options.token, deadline);
    if (greeted.ok()) return connection;
    // A server that is running has closed this connection to make room for others, or because this
    // process was slow. If the server has ended, the next attempt to connect fails.
    if (greeted.error().code() != ErrorCode::kPeerLost || deadline.has_passed(system.now())) {
      return greeted.error();
    }
    system.make_waiter()->park(deadline.earlier(system.deadline_in(pause)));
    pause = std::min(2 * pause, kLongestPause);
  }
}

Result<std::unique_ptr<ServerConnection>> dial_first(os::System& system,
                                                     const TcpStoreOptions& options,
                                                     Deadline deadline, StoreRoute& route) {
  Result<std::unique_ptr<os::Socket>> socket = system.connect(options.address, deadline);
  if (!socket.ok()) return socket.error();
  route = {(*socket)->local_address(), (*socket)->peer_address()};
  auto connection =
      std::make_unique<ServerConnection>(system, options.protocol, std::move(socket).value());
  const Status greeted = connection->greet(
      options.token, deadline.earlier(system.deadline_in(options.greeting_timeout)));
  if (greeted.ok()) return connection;
  const std::string_view store = options.protocol == StoreProtocol::kC10d ? "c10d" : "Cadre";
  constexpr std::string_view kRemedy = "choose another MASTER_PORT, the same on all ranks";
  const Error& error = greeted.error();
  if (error.code() == ErrorCode::kCorruption) {
    return Error(ErrorCode::kInvalidArgument,
                 format("the process that listens there is no {} store: {}; {}", store,
                        error.message(), kRemedy));
  }
  // The listener may still be a store, on an overloaded host, so the code is kTimeout.
  if (error.code() == ErrorCode::kTimeout) {
    return Error(ErrorCode::kTimeout,
                 format("the process that listens there accepted the connection and sent nothing: "
                        "if it is no {} store, {}",
                        store, kRemedy));
  }
  return error;
}

}  // namespace cadre::store
