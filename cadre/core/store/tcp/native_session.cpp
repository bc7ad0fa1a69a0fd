#include "cadre/core/store/tcp/native_session.h"

#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/store/table_answers.h"
#include "cadre/core/store/tcp/protocol.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::store {
namespace {

using wire::StoreRequest;
using wire::StoreResponse;
using wire::StoreVerb;

// A client that waits for more at once is broken: ours has a connection for each call.
constexpr size_t kMaxPending = 1024;
constexpr size_t kMaxAnswerBytes = wire::kMaxStoreFrameBytes - 1024;  // less its fixed fields

void write(wire::StreamBuffer& out, const StoreResponse& response) {
  wire::append_frame(out, wire::encode(response));
}

}  // namespace

NativeSession::NativeSession(KeyTable& table, TicketSource tickets, const os::Secret& token,
                             wire::Nonce nonce)
    : table_(table),
      tickets_(tickets),
      token_(token),
      hello_{.build = std::string(this_build()), .nonce = nonce} {}

NativeSession::~NativeSession() {
  for (const auto& [ticket, request] : pending_) table_.cancel(ticket);
  // A store that is full cannot take it; then the others learn it at their deadline.
  if (will_) (void)table_.append(will_->first, will_->second);
}

Result<bool> NativeSession::step(wire::StreamBuffer& in, wire::StreamBuffer& out) {
  const size_t limit = is_accepted() ? wire::kMaxStoreFrameBytes : wire::kMaxHandshakeFrameBytes;
  const Result<std::optional<ConstBytes>> frame = wire::peek_frame(in, limit);
  if (!frame.ok()) return frame.error();
  if (!frame->has_value()) return false;
  const ConstBytes payload = **frame;
  const size_t num_bytes = wire::kFrameHeaderBytes + payload.size();
  switch (phase_) {
    case Phase::kHello:
      CADRE_RETURN_IF_ERROR(on_hello(payload, out));
      break;
    case Phase::kProof:
      CADRE_RETURN_IF_ERROR(on_proof(payload, out));
      break;
    case Phase::kServing:
      CADRE_RETURN_IF_ERROR(on_request(payload, out));
      break;
  }
  in.consume(num_bytes);
  return true;
}

Status NativeSession::on_hello(ConstBytes payload, wire::StreamBuffer& out) {
  Result<wire::StoreHello> hello = wire::decode_store_hello(payload);
  if (!hello.ok()) return hello.error();
  client_hello_ = std::move(hello).value();
  // Sent in any case: a client of another build names both builds to its user.
  wire::append_frame(out, wire::encode(hello_));
  CADRE_RETURN_IF_ERROR(check_same_build(hello_, client_hello_));
  phase_ = Phase::kProof;
  return {};
}

Status NativeSession::on_proof(ConstBytes payload, wire::StreamBuffer& out) {
  const Result<wire::StoreProof> proof = wire::decode_store_proof(payload);
  if (!proof.ok()) return proof.error();
  const Result<wire::Digest> expected =
      wire::prove_token(token_.view(), kClientProver, hello_.nonce, client_hello_.nonce);
  if (!expected.ok()) return expected.error();
  if (!wire::equals_in_constant_time(proof->digest, *expected)) {
    const Error refusal(ErrorCode::kInvalidArgument,
                        "the job token differs from the store server's; give every rank of the "
                        "job the same CADRE_JOB_TOKEN");
    write(out, StoreResponse{.error = refusal});
    return refusal;
  }
  const Result<wire::Digest> own =
      wire::prove_token(token_.view(), kServerProver, client_hello_.nonce, hello_.nonce);
  if (!own.ok()) return own.error();
  write(out, StoreResponse{.values = {std::string(wire::as_text(*own))}});
  phase_ = Phase::kServing;
  return {};
}

Status NativeSession::on_request(ConstBytes payload, wire::StreamBuffer& out) {
  Result<StoreRequest> decoded = wire::decode_store_request(payload);
  if (!decoded.ok()) return decoded.error();
  StoreRequest request = std::move(decoded).value();
  switch (request.verb) {
    case StoreVerb::kGet:
    case StoreVerb::kWait:
    case StoreVerb::kMultiGet:
    case StoreVerb::kQueuePop:
    case StoreVerb::kBarrier: {
      if (pending_.size() >= kMaxPending) {
        return Error(ErrorCode::kCorruption,
                     format("native client has {} requests waiting at once", pending_.size()));
      }
      const KeyTable::Ticket ticket = tickets_.next();
      StoreResponse response{.id = request.id};
      const Result<bool> is_ready = begin_wait(ticket, request, response);
      if (!is_ready.ok()) response.error = is_ready.error();
      if (!is_ready.ok() || *is_ready) {
        write(out, response);
      } else {
        pending_.emplace(ticket, std::move(request));
      }
      return {};
    }
    case StoreVerb::kCancel:
      cancel(request.id, out);
      return {};
    default:
      write(out, answer(request));
      return {};
  }
}

Result<bool> NativeSession::begin_wait(KeyTable::Ticket ticket, const StoreRequest& request,
                                       StoreResponse& response) {
  if (request.verb == StoreVerb::kBarrier) {
    return table_.arrive(ticket, request.keys[0], request.amount);
  }
  if (request.verb == StoreVerb::kQueuePop) {
    auto item = table_.pop_or_wait(ticket, request.keys[0]);
    if (!item) return false;
    response.values.push_back(*std::move(item));
    return true;
  }
  if (!table_.wait(ticket, request.keys)) return false;
  response = answer(request);
  return true;
}

void NativeSession::on_ready(KeyTable::Ticket ticket, wire::StreamBuffer& out) {
  const auto found = pending_.find(ticket);
  if (found == pending_.end()) return;
  const StoreRequest& request = found->second;
  if (request.verb == StoreVerb::kBarrier) {
    write(out, StoreResponse{.id = request.id});
  } else if (request.verb == StoreVerb::kQueuePop) {
    write(out, StoreResponse{.id = request.id,
                             .values = {table_.take_item(ticket).value_or(std::string())}});
  } else {
    write(out, answer(request));
  }
  pending_.erase(found);
}

StoreResponse NativeSession::answer(const StoreRequest& request) {
  StoreResponse response;
  if (request.verb == StoreVerb::kLeaveWill) {
    will_.emplace(request.keys[0], request.values[0]);
  } else if (request.verb == StoreVerb::kRetractWill) {
    will_.reset();
  } else {
    response = answer_from(table_, request, kMaxAnswerBytes);
  }
  response.id = request.id;
  return response;
}

void NativeSession::cancel(uint64_t request_id, wire::StreamBuffer& out) {
  for (auto it = pending_.begin(); it != pending_.end(); ++it) {
    if (it->second.id != request_id) continue;
    table_.cancel(it->first);
    write(out, StoreResponse{.id = request_id, .error = timeout_from(table_, it->second)});
    pending_.erase(it);
    return;
  }
}

}  // namespace cadre::store
