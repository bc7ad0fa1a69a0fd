#include "cadre/core/store/tcp/session.h"

#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/store/table_answers.h"
#include "cadre/core/store/tcp/greeting.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::store {
namespace {

using wire::StoreRequest;
using wire::StoreResponse;
using wire::StoreVerb;

// The limit of the values in an answer: the limit of a message without the other fields of the
// answer.
constexpr size_t kMaxAnswerBytes = wire::kMaxMessageBytes - 1024;
constexpr size_t kMaxC10dAnswerBytes = 128 << 20;

std::string_view name_of(bool is_c10d) {
  return is_c10d ? "c10d client" : "client";
}

}  // namespace

Session::Session(KeyTable& table, TicketSource tickets)
    : table_(table), tickets_(tickets), token_(nullptr), next_(Next::kValidate) {}

Session::Session(KeyTable& table, TicketSource tickets, const os::Secret& token,
                 const wire::Nonce& nonce)
    : table_(table), tickets_(tickets), token_(&token), next_(Next::kHello), nonce_(nonce) {}

Session::~Session() {
  if (waiting_) table_.cancel(waiting_->ticket);
  // If the store is full, the will is lost, and the other ranks detect the death only by their
  // timeouts.
  if (will_) (void)table_.append(will_->first, will_->second);
}

Result<bool> Session::step(wire::StreamBuffer& in, wire::StreamBuffer& out) {
  if (in.empty()) return false;
  // The verb is checked as soon as its byte has arrived, until the handshake is complete. Otherwise
  // a client without the token could make the server buffer a long request.
  const auto verb = static_cast<StoreVerb>(in.view()[0]);
  const StoreVerb due = next_ == Next::kValidate ? StoreVerb::kValidate
                        : next_ == Next::kHello  ? StoreVerb::kHello
                                                 : StoreVerb::kProve;
  if (!is_accepted() && verb != due) {
    return Error(ErrorCode::kCorruption,
                 format("{} sent {}, but {} must come first", name_of(is_c10d()),
                        wire::to_string(verb), wire::to_string(due)));
  }
  Result<wire::Decoded<StoreRequest>> decoded = wire::decode_store_request(in.view(), progress_);
  if (!decoded.ok()) return decoded.error();
  if (!decoded->message) return false;
  in.consume(decoded->num_bytes);
  CADRE_RETURN_IF_ERROR(serve(*std::move(decoded->message), out));
  return true;
}

Status Session::serve(StoreRequest request, wire::StreamBuffer& out) {
  switch (next_) {
    case Next::kValidate:
      if (request.amount != wire::kC10dMagic) {
        return Error(ErrorCode::kCorruption,
                     format("c10d client sent the magic {:#x}, expected {:#x}", request.amount,
                            wire::kC10dMagic));
      }
      next_ = Next::kRequest;
      return {};
    case Next::kHello:
      return on_hello(request, out);
    case Next::kProof:
      return on_proof(request, out);
    case Next::kRequest:
      return on_request(std::move(request), out);
  }
  return {};
}

Status Session::on_hello(const StoreRequest& hello, wire::StreamBuffer& out) {
  const Result<wire::Nonce> nonce = read_nonce(hello.values[0]);
  if (!nonce.ok()) return nonce.error();
  client_nonce_ = *nonce;
  // The server's hello is sent even if the builds differ, so that the client's error can name both
  // builds.
  const StoreRequest own = hello_of_client(nonce_);
  CADRE_RETURN_IF_ERROR(respond(
      StoreVerb::kHello, {.number = own.amount, .values = {own.keys[0], own.values[0]}}, out));
  CADRE_RETURN_IF_ERROR(
      check_same_build({.name = this_build()}, {.name = hello.keys[0], .protocol = hello.amount}));
  next_ = Next::kProof;
  return {};
}

Status Session::on_proof(const StoreRequest& proof, wire::StreamBuffer& out) {
  const Result<wire::Digest> expected =
      wire::prove_token(token_->view(), kClientProver, nonce_, client_nonce_);
  if (!expected.ok()) return expected.error();
  if (!wire::equals_in_constant_time(wire::as_bytes(proof.values[0]), *expected)) {
    const Error refusal(ErrorCode::kInvalidArgument,
                        "the job token differs from the store server's; give every rank of the "
                        "job the same CADRE_JOB_TOKEN");
    CADRE_RETURN_IF_ERROR(respond(StoreVerb::kProve, {.error = refusal}, out));
    return refusal;
  }
  const Result<wire::Digest> own =
      wire::prove_token(token_->view(), kServerProver, client_nonce_, nonce_);
  if (!own.ok()) return own.error();
  next_ = Next::kRequest;
  return respond(StoreVerb::kProve, {.values = {std::string(wire::as_text(*own))}}, out);
}

Status Session::on_request(StoreRequest request, wire::StreamBuffer& out) {
  const StoreVerb verb = request.verb;
  if (verb == StoreVerb::kValidate || verb == StoreVerb::kHello || verb == StoreVerb::kProve) {
    return Error(ErrorCode::kCorruption, format("{} sent {} after it was accepted",
                                                name_of(is_c10d()), wire::to_string(verb)));
  }
  if (is_c10d() && verb > StoreVerb::kBarrier) {
    return Error(ErrorCode::kCorruption,
                 format("c10d client sent {}, a verb of Cadre's own", wire::to_string(verb)));
  }
  switch (verb) {
    case StoreVerb::kGet:
    case StoreVerb::kMultiGet:
      return is_c10d() ? read_at_once(request, out) : wait(std::move(request), out);
    case StoreVerb::kWait:
    case StoreVerb::kBarrier:
    case StoreVerb::kQueuePop:
      return wait(std::move(request), out);
    case StoreVerb::kCancel:
      return cancel(out);
    case StoreVerb::kPing:
      return respond(verb, {.number = request.amount}, out);
    case StoreVerb::kLeaveWill:
      will_.emplace(std::move(request.keys[0]), std::move(request.values[0]));
      return respond(verb, {}, out);
    case StoreVerb::kRetractWill:
      will_.reset();
      return respond(verb, {}, out);
    default:
      return respond(verb, answer(request), out);
  }
}

Status Session::read_at_once(const StoreRequest& request, wire::StreamBuffer& out) {
  for (const std::string& key : request.keys) {
    const std::string* value = table_.find(key);
    CADRE_RETURN_IF_ERROR(
        respond(StoreVerb::kGet, {.values = {value ? *value : std::string()}}, out));
    if (out.size() > kMaxC10dAnswerBytes) {
      return Error(ErrorCode::kCorruption,
                   format("c10d client asked for more than {} bytes at once", kMaxC10dAnswerBytes));
    }
  }
  return {};
}

Status Session::wait(StoreRequest request, wire::StreamBuffer& out) {
  if (waiting_) {
    return Error(ErrorCode::kCorruption, format("{} sent a second request that waits while the "
                                                "first one still waits on the same connection",
                                                name_of(is_c10d())));
  }
  const KeyTable::Ticket ticket = tickets_.next();
  if (const auto response = begin_wait(ticket, request)) {
    return respond(request.verb, *response, out);
  }
  waiting_ = Waiting{ticket, std::move(request)};
  return {};
}

std::optional<StoreResponse> Session::begin_wait(KeyTable::Ticket ticket,
                                                 const StoreRequest& request) {
  if (request.verb == StoreVerb::kBarrier) {
    const Result<bool> arrived = table_.arrive(ticket, request.keys[0], request.amount);
    if (!arrived.ok()) return StoreResponse{.error = arrived.error()};
    return *arrived ? std::optional(StoreResponse()) : std::nullopt;
  }
  if (request.verb == StoreVerb::kQueuePop) {
    auto item = table_.pop_or_wait(ticket, request.keys[0]);
    if (!item) return std::nullopt;
    return StoreResponse{.values = {*std::move(item)}};
  }
  // A c10d client that waits for a queue will pop an item, so each push wakes only one such client.
  const auto wake = is_c10d() ? KeyTable::Wake::kOnePerPush : KeyTable::Wake::kAlways;
  if (!table_.wait(ticket, request.keys, wake)) return std::nullopt;
  return answer(request);
}

void Session::on_ready(KeyTable::Ticket ticket, wire::StreamBuffer& out) {
  if (!waiting_ || waiting_->ticket != ticket) return;
  const StoreRequest request = std::move(waiting_->request);
  waiting_.reset();
  StoreResponse response;
  if (request.verb == StoreVerb::kQueuePop) {
    response.values = {table_.take_item(ticket).value_or(std::string())};
  } else if (request.verb != StoreVerb::kBarrier) {
    response = answer(request);
  }
  // The result is ignored: respond() fails only if it has to send an error to a c10d client, and a
  // request for which such a client waits ends without an error.
  (void)respond(request.verb, response, out);
}

bool Session::awaits_item(KeyTable::Ticket ticket) const {
  return waiting_ && waiting_->ticket == ticket && waiting_->request.verb == StoreVerb::kQueuePop;
}

StoreResponse Session::answer(const StoreRequest& request) {
  if (is_c10d()) return answer_from(table_, request);
  return answer_from(table_, request, kMaxAnswerBytes);
}

Status Session::cancel(wire::StreamBuffer& out) {
  const std::optional<Waiting> waiting = std::exchange(waiting_, std::nullopt);
  if (waiting) table_.cancel(waiting->ticket);
  if (is_c10d()) return respond(StoreVerb::kCancel, {.number = wire::kC10dWaitCanceled}, out);
  if (!waiting) return {};
  return respond(waiting->request.verb, {.error = timeout_from(table_, waiting->request)}, out);
}

Status Session::respond(StoreVerb verb, const StoreResponse& response,
                        wire::StreamBuffer& out) const {
  if (!is_c10d()) {
    out.append(wire::encode_answer(verb, response));
    return {};
  }
  if (response.error) return *response.error;
  out.append(wire::encode_c10d_answer(verb, response));
  return {};
}

}  // namespace cadre::store
