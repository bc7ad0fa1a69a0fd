#include "cadre/core/store/tcp/native_connection.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/store/tcp/protocol.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::store {
namespace {

using wire::StoreRequest;
using wire::StoreResponse;

std::vector<std::byte> frame(ConstBytes payload) {
  wire::StreamBuffer out;
  wire::append_frame(out, payload);
  return {out.view().begin(), out.view().end()};
}

// Waits for one frame, decodes it, and takes it off the stream unless it makes no sense.
template <typename Decode>
auto receive(BlockingStream& stream, Decode decode, Deadline deadline,
             size_t max_bytes = wire::kMaxStoreFrameBytes) -> decltype(decode(ConstBytes())) {
  while (true) {
    const auto payload = wire::peek_frame(stream.buffer(), max_bytes);
    if (!payload.ok()) return payload.error();
    if (payload->has_value()) {
      auto message = decode(**payload);
      if (message.ok()) {
        stream.buffer().consume(wire::kFrameHeaderBytes + (*payload)->size());
      }
      return message;
    }
    CADRE_RETURN_IF_ERROR(stream.receive_more(deadline));
  }
}

// How something else than a store begins, for people: "HTTP/1.1 400 Bad Re...".
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

Status shake_hands(BlockingStream& stream, const wire::StoreHello& hello, const os::Secret& token,
                   Deadline deadline) {
  CADRE_RETURN_IF_ERROR(stream.send(wire::as_bytes(wire::kStoreMagic), deadline));
  CADRE_RETURN_IF_ERROR(stream.send(frame(wire::encode(hello)), deadline));
  const auto server =
      receive(stream, wire::decode_store_hello, deadline, wire::kMaxHandshakeFrameBytes);
  if (!server.ok() && server.error().code() == ErrorCode::kCorruption) {
    return Error(ErrorCode::kCorruption,
                 format("it answered \"{}\"", beginning_of(stream.buffer().view())));
  }
  if (!server.ok()) return server.error();
  CADRE_RETURN_IF_ERROR(check_same_build(*server, hello));
  const auto proof = wire::prove_token(token.view(), kClientProver, server->nonce, hello.nonce);
  if (!proof.ok()) return proof.error();
  CADRE_RETURN_IF_ERROR(stream.send(frame(wire::encode(wire::StoreProof{*proof})), deadline));
  const auto welcome = receive(stream, wire::decode_store_response, deadline);
  if (!welcome.ok()) return welcome.error();
  if (welcome->error) return *welcome->error;
  const auto expected = wire::prove_token(token.view(), kServerProver, hello.nonce, server->nonce);
  if (!expected.ok()) return expected.error();
  if (welcome->values.size() == 1 &&
      wire::equals_in_constant_time(wire::as_bytes(welcome->values[0]), *expected)) {
    return {};
  }
  return Error(ErrorCode::kInvalidArgument,
               "the store server did not prove that it knows the job token: another job may be "
               "listening there");
}

}  // namespace

Result<std::unique_ptr<ServerConnection>> NativeConnection::open(os::System& system,
                                                                 BlockingStream stream,
                                                                 const os::Secret& token,
                                                                 Deadline deadline) {
  wire::StoreHello hello{.build = std::string(this_build())};
  system.random_bytes(hello.nonce);
  CADRE_RETURN_IF_ERROR(shake_hands(stream, hello, token, deadline));
  return std::unique_ptr<ServerConnection>(std::make_unique<NativeConnection>(std::move(stream)));
}

Result<StoreResponse> NativeConnection::call(StoreRequest request, Deadline deadline) {
  request.id = ++last_id_;
  const std::vector<std::byte> payload = wire::encode(request);
  if (payload.size() > wire::kMaxStoreFrameBytes) {
    return Error(ErrorCode::kInvalidArgument,
                 format("store {} of {} bytes is over the limit of {} bytes for one call; split it",
                        wire::to_string(request.verb), payload.size(), wire::kMaxStoreFrameBytes));
  }
  // A request that was sent in part leaves a stream on which nothing else can be said.
  is_usable_ = false;
  CADRE_RETURN_IF_ERROR(stream_.send(frame(payload), deadline));
  Result<StoreResponse> response = receive_answer(request.id, deadline);
  is_usable_ = response.ok();
  if (response.ok() || response.error().code() != ErrorCode::kTimeout) return response;
  // A server that ends now does not change that the deadline has passed.
  Result<StoreResponse> cancelled = cancel(request.id);
  is_usable_ = cancelled.ok();
  return is_usable_ ? std::move(cancelled) : std::move(response);
}

// The server may have answered meanwhile, for example with an item that is no longer in its queue:
// that answer is the result. Else it answers the cancellation, with a timeout.
Result<StoreResponse> NativeConnection::cancel(uint64_t id) {
  const StoreRequest cancel{.id = id, .verb = wire::StoreVerb::kCancel};
  const Deadline deadline = stream_.deadline_in(kCancelTime);
  CADRE_RETURN_IF_ERROR(stream_.send(frame(wire::encode(cancel)), deadline));
  return receive_answer(id, deadline);
}

Result<StoreResponse> NativeConnection::receive_answer(uint64_t id, Deadline deadline) {
  Result<StoreResponse> response = receive(stream_, wire::decode_store_response, deadline);
  if (!response.ok() || response->id == id) return response;
  return Error(
      ErrorCode::kCorruption,
      format("the store server answered request {}, expected the answer to {}", response->id, id));
}

}  // namespace cadre::store
