#include "cadre/core/store/tcp/c10d_session.h"

#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::store {

using wire::C10dRequest;
using wire::C10dVerb;

namespace {

constexpr size_t kMaxC10dAnswerBytes = 128 << 20;

}  // namespace

C10dSession::~C10dSession() {
  cancel_wait();
}

void C10dSession::cancel_wait() {
  if (waiting_) table_.cancel(*waiting_);
  waiting_.reset();
}

Result<bool> C10dSession::step(wire::StreamBuffer& in, wire::StreamBuffer& out) {
  if (in.empty() || in.size() < num_needed_) return false;
  Result<wire::Decoded<C10dRequest>> decoded = wire::decode_c10d_request(in.view());
  if (!decoded.ok()) return decoded.error();
  if (!decoded->message) {
    num_needed_ = decoded->num_bytes;
    return false;
  }
  num_needed_ = 0;
  in.consume(decoded->num_bytes);
  CADRE_RETURN_IF_ERROR(serve(*decoded->message, out));
  return true;
}

Status C10dSession::serve(const C10dRequest& request, wire::StreamBuffer& out) {
  if ((request.verb == C10dVerb::kValidate) == is_validated_) {
    return Error(ErrorCode::kCorruption,
                 format("c10d client sent {}, but validate comes first and once",
                        wire::to_string(request.verb)));
  }
  const auto value_of = [this](const std::string& key) -> std::string_view {
    const std::string* value = table_.find(key);
    return value ? std::string_view(*value) : std::string_view();
  };
  switch (request.verb) {
    case C10dVerb::kValidate:
      if (request.number != wire::kC10dMagic) {
        return Error(ErrorCode::kCorruption,
                     format("c10d client sent the magic {:#x}, expected {:#x}", request.number,
                            wire::kC10dMagic));
      }
      is_validated_ = true;
      return {};
    case C10dVerb::kPing:
      out.append(wire::encode_c10d_nonce(static_cast<uint32_t>(request.number)));
      return {};
    case C10dVerb::kGet:
      out.append(wire::encode_c10d_value(value_of(request.keys[0])));
      return {};
    case C10dVerb::kMultiGet:
      for (const std::string& key : request.keys) {
        out.append(wire::encode_c10d_value(value_of(key)));
        if (out.size() > kMaxC10dAnswerBytes) {
          return Error(
              ErrorCode::kCorruption,
              format("c10d client asked for more than {} bytes at once", kMaxC10dAnswerBytes));
        }
      }
      return {};
    case C10dVerb::kCheck:
      out.append(wire::encode_c10d_byte(table_.has_all(request.keys) ? wire::kC10dReady
                                                                     : wire::kC10dNotReady));
      return {};
    case C10dVerb::kNumKeys:
      out.append(wire::encode_c10d_number(table_.num_keys()));
      return {};
    case C10dVerb::kQueueLength:
      out.append(wire::encode_c10d_number(table_.queue_length(request.keys[0])));
      return {};
    case C10dVerb::kListKeys: {
      const std::vector<std::string> keys = table_.list_keys();
      out.append(wire::encode_c10d_number(static_cast<int64_t>(keys.size())));
      for (const std::string& key : keys) out.append(wire::encode_c10d_value(key));
      return {};
    }
    case C10dVerb::kWait:
    case C10dVerb::kBarrier:
      return wait(request, out);
    case C10dVerb::kCancelWait:
      cancel_wait();
      out.append(wire::encode_c10d_byte(wire::kC10dWaitCanceled));
      return {};
    default:
      return write(request, out);
  }
}

Status C10dSession::write(const C10dRequest& request, wire::StreamBuffer& out) {
  const std::string& key = request.keys.empty() ? std::string() : request.keys[0];
  switch (request.verb) {
    case C10dVerb::kSet:
      return table_.set(key, request.values[0]);
    case C10dVerb::kAppend:
      return table_.append(key, request.values[0]);
    case C10dVerb::kMultiSet:
      for (size_t i = 0; i < request.keys.size(); ++i) {
        CADRE_RETURN_IF_ERROR(table_.set(request.keys[i], request.values[i]));
      }
      return {};
    case C10dVerb::kAdd: {
      const Result<int64_t> sum = table_.add(key, request.number);
      if (!sum.ok()) return sum.error();
      out.append(wire::encode_c10d_number(*sum));
      return {};
    }
    case C10dVerb::kCompareSet: {
      const Result<std::string> value =
          table_.compare_set(key, request.values[0], request.values[1]);
      if (!value.ok()) return value.error();
      out.append(wire::encode_c10d_value(*value));
      return {};
    }
    case C10dVerb::kDeleteKey:
      out.append(wire::encode_c10d_number(table_.erase(key) ? 1 : 0));
      return {};
    case C10dVerb::kQueuePush:
      return table_.push(key, request.values[0]);
    default:  // kQueuePop; the verbs that only read never come here
      pop(key, out);
      return {};
  }
}

void C10dSession::pop(const std::string& queue, wire::StreamBuffer& out) {
  out.append(wire::encode_c10d_number(table_.queue_length(queue)));
  if (const auto value = table_.pop(queue)) out.append(wire::encode_c10d_value(*value));
}

Status C10dSession::wait(const C10dRequest& request, wire::StreamBuffer& out) {
  if (waiting_) {
    return Error(ErrorCode::kCorruption, "c10d client waits twice at once on one connection");
  }
  const KeyTable::Ticket ticket = tickets_.next();
  bool is_ready = false;
  if (request.verb == C10dVerb::kBarrier) {
    const Result<bool> arrived = table_.arrive(ticket, request.keys[0], request.number);
    if (!arrived.ok()) return arrived.error();
    is_ready = *arrived;
  } else {
    is_ready = table_.wait(ticket, request.keys, KeyTable::Wake::kOnePerPush);
  }
  if (is_ready) {
    out.append(wire::encode_c10d_byte(wire::kC10dStopWaiting));
  } else {
    waiting_ = ticket;
  }
  return {};
}

void C10dSession::on_ready(KeyTable::Ticket ticket, wire::StreamBuffer& out) {
  if (waiting_ != ticket) return;
  waiting_.reset();
  out.append(wire::encode_c10d_byte(wire::kC10dStopWaiting));
}

}  // namespace cadre::store
