#include "cadre/core/store/tcp/c10d_connection.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre::store {
namespace {

using wire::C10dRequest;
using wire::C10dVerb;
using wire::StoreRequest;
using wire::StoreResponse;
using wire::StoreVerb;

// Waits until `decode` finds a whole answer, and takes it off the stream.
template <typename T, typename Decode>
Result<T> receive(BlockingStream& stream, Decode decode, Deadline deadline) {
  size_t num_needed = 1;
  while (true) {
    if (stream.buffer().size() >= num_needed) {
      Result<wire::Decoded<T>> answer = decode(stream.buffer().view());
      if (!answer.ok()) return answer.error();
      if (answer->message) {
        stream.buffer().consume(answer->num_bytes);
        return *std::move(answer->message);
      }
      num_needed = answer->num_bytes;
    }
    CADRE_RETURN_IF_ERROR(stream.receive_more(deadline));
  }
}

}  // namespace

Result<std::unique_ptr<ServerConnection>> C10dConnection::open(os::System& system,
                                                               BlockingStream stream,
                                                               Deadline deadline) {
  auto connection = std::make_unique<C10dConnection>(std::move(stream));
  CADRE_RETURN_IF_ERROR(
      connection->send({.verb = C10dVerb::kValidate, .number = wire::kC10dMagic}, deadline));
  std::array<std::byte, sizeof(uint32_t)> random;
  system.random_bytes(random);
  std::memcpy(&connection->next_nonce_, random.data(), sizeof(uint32_t));
  CADRE_RETURN_IF_ERROR(connection->ping(connection->next_nonce_++, deadline));
  return std::unique_ptr<ServerConnection>(std::move(connection));
}

Status C10dConnection::send(const C10dRequest& request, Deadline deadline) {
  return stream_.send(wire::encode(request), deadline);
}

Status C10dConnection::ping(uint32_t nonce, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(send({.verb = C10dVerb::kPing, .number = nonce}, deadline));
  const Result<uint32_t> answer = receive<uint32_t>(stream_, wire::decode_c10d_nonce, deadline);
  if (!answer.ok()) return answer.error();
  if (*answer == nonce) return {};
  return Error(ErrorCode::kCorruption,
               format("the store server answered a ping of {} with {}: it is no c10d TCPStore of "
                      "torch 2.11 or later",
                      nonce, *answer));
}

Status C10dConnection::wait(const std::vector<std::string>& keys, Deadline deadline) {
  if (keys.empty()) return {};
  CADRE_RETURN_IF_ERROR(send({.verb = C10dVerb::kWait, .keys = keys}, deadline));
  const Result<uint8_t> answer = receive<uint8_t>(stream_, wire::decode_c10d_byte, deadline);
  if (!answer.ok()) return answer.error();
  if (*answer == wire::kC10dStopWaiting) return {};
  return Error(ErrorCode::kCorruption,
               format("the c10d store server answered wait with {}", *answer));
}

Result<StoreResponse> C10dConnection::receive_number(Deadline deadline) {
  const Result<int64_t> number = receive<int64_t>(stream_, wire::decode_c10d_number, deadline);
  if (!number.ok()) return number.error();
  return StoreResponse{.number = *number};
}

Result<StoreResponse> C10dConnection::receive_values(size_t count, Deadline deadline) {
  if (count == 0) return StoreResponse();  // not a byte comes
  const auto decode = [count](ConstBytes bytes) { return wire::decode_c10d_values(bytes, count); };
  Result<std::vector<std::string>> values =
      receive<std::vector<std::string>>(stream_, decode, deadline);
  if (!values.ok()) return values.error();
  return StoreResponse{.values = std::move(values).value()};
}

Result<StoreResponse> C10dConnection::pop(const std::string& queue, bool waits, Deadline deadline) {
  while (true) {
    if (waits) CADRE_RETURN_IF_ERROR(wait({queue}, deadline));
    CADRE_RETURN_IF_ERROR(send({.verb = C10dVerb::kQueuePop, .keys = {queue}}, deadline));
    // The server has taken the item out of its queue, so it is waited for beyond the deadline.
    const Deadline answered = stream_.deadline_in(kCancelTime).later(deadline);
    Result<StoreResponse> length = receive_number(answered);
    if (!length.ok()) return length.error();
    if (length->number > 0) {
      Result<StoreResponse> item = receive_values(1, answered);
      if (item.ok()) item->number = 1;
      return item;
    }
    if (!waits) return StoreResponse();
  }
}

Result<StoreResponse> C10dConnection::list_keys(Deadline deadline) {
  CADRE_RETURN_IF_ERROR(send({.verb = C10dVerb::kListKeys}, deadline));
  const Result<StoreResponse> count = receive_number(deadline);
  if (!count.ok()) return count.error();
  if (count->number < 0 || count->number > static_cast<int64_t>(wire::kMaxC10dKeysPerRequest)) {
    return Error(ErrorCode::kCorruption,
                 format("the c10d store server lists {} keys, over the limit of {}", count->number,
                        wire::kMaxC10dKeysPerRequest));
  }
  Result<StoreResponse> keys = receive_values(static_cast<size_t>(count->number), deadline);
  if (!keys.ok()) return keys.error();
  StoreResponse response;
  for (std::string& key : keys->values) {
    if (key.starts_with('/')) response.values.push_back(key.substr(1));
  }
  std::sort(response.values.begin(), response.values.end());
  return response;
}

Result<StoreResponse> C10dConnection::call(StoreRequest request, Deadline deadline) {
  for (std::string& key : request.keys) key = std::string("/").append(key);
  is_usable_ = false;
  Result<StoreResponse> response = translate(std::move(request), deadline);
  is_usable_ = response.ok();
  return response;
}

Result<StoreResponse> C10dConnection::translate(StoreRequest request, Deadline deadline) {
  C10dRequest message{.number = request.amount,
                      .keys = std::move(request.keys),
                      .values = std::move(request.values)};
  const size_t num_keys = message.keys.size();
  const auto ask = [&](C10dVerb verb) {
    message.verb = verb;
    return send(message, deadline);
  };
  switch (request.verb) {
    case StoreVerb::kSet:
    case StoreVerb::kAppend:
    case StoreVerb::kMultiSet:
    case StoreVerb::kQueuePush:
      CADRE_RETURN_IF_ERROR(ask(request.verb == StoreVerb::kSet        ? C10dVerb::kSet
                                : request.verb == StoreVerb::kAppend   ? C10dVerb::kAppend
                                : request.verb == StoreVerb::kMultiSet ? C10dVerb::kMultiSet
                                                                       : C10dVerb::kQueuePush));
      CADRE_RETURN_IF_ERROR(ping(next_nonce_++, deadline));
      return StoreResponse();
    case StoreVerb::kWait:
      CADRE_RETURN_IF_ERROR(wait(message.keys, deadline));
      return StoreResponse();
    case StoreVerb::kGet:
    case StoreVerb::kMultiGet:
      if (num_keys == 0) return StoreResponse();
      CADRE_RETURN_IF_ERROR(wait(message.keys, deadline));
      CADRE_RETURN_IF_ERROR(ask(C10dVerb::kMultiGet));
      return receive_values(num_keys, deadline);
    case StoreVerb::kCompareSet:
      CADRE_RETURN_IF_ERROR(ask(C10dVerb::kCompareSet));
      return receive_values(1, deadline);
    case StoreVerb::kAdd:
      CADRE_RETURN_IF_ERROR(ask(C10dVerb::kAdd));
      return receive_number(deadline);
    case StoreVerb::kErase:
      CADRE_RETURN_IF_ERROR(ask(C10dVerb::kDeleteKey));
      return receive_number(deadline);
    case StoreVerb::kNumKeys:
      CADRE_RETURN_IF_ERROR(ask(C10dVerb::kNumKeys));
      return receive_number(deadline);
    case StoreVerb::kCheck: {
      if (num_keys == 0) return StoreResponse{.number = 1};
      CADRE_RETURN_IF_ERROR(ask(C10dVerb::kCheck));
      const Result<uint8_t> answer = receive<uint8_t>(stream_, wire::decode_c10d_byte, deadline);
      if (!answer.ok()) return answer.error();
      return StoreResponse{.number = *answer == wire::kC10dReady ? 1 : 0};
    }
    default:
      return translate_rest(request.verb, message, deadline);
  }
}

Result<StoreResponse> C10dConnection::translate_rest(StoreVerb verb, C10dRequest& message,
                                                     Deadline deadline) {
  switch (verb) {
    case StoreVerb::kQueuePop:
    case StoreVerb::kTryQueuePop:
      return pop(message.keys[0], verb == StoreVerb::kQueuePop, deadline);
    case StoreVerb::kQueueLength:
      message.verb = C10dVerb::kQueueLength;
      CADRE_RETURN_IF_ERROR(send(message, deadline));
      return receive_number(deadline);
    case StoreVerb::kListKeys:
      return list_keys(deadline);
    case StoreVerb::kBarrier: {
      message.verb = C10dVerb::kBarrier;
      CADRE_RETURN_IF_ERROR(send(message, deadline));
      const Result<uint8_t> answer = receive<uint8_t>(stream_, wire::decode_c10d_byte, deadline);
      if (!answer.ok()) return answer.error();
      return StoreResponse();
    }
    default:
      break;
  }
  return Error(ErrorCode::kInternal,
               format("c10d's protocol has no request {}", wire::to_string(verb)));
}

}  // namespace cadre::store
