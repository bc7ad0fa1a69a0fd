#include "cadre/core/fabric/bootstrap/handshake.h"

#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/challenge.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre {
namespace {

constexpr size_t kPrefixBytes = sizeof(uint32_t);
// The first four bytes of a client of c10d's TCPStore, read as the length of a frame: the verb and
// three bytes of its magic number.
constexpr auto kC10dGreeting = static_cast<uint32_t>(wire::StoreVerb::kValidate) |
                               static_cast<uint32_t>(wire::kC10dMagic << 8);

}  // namespace

Handshake::Handshake(os::System& system, std::unique_ptr<os::Socket> socket,
                     const LinkIdentity& identity, State state)
    : system_(&system), socket_(std::move(socket)), identity_(identity), state_(state) {}

Handshake Handshake::call(os::System& system, std::unique_ptr<os::Socket> socket,
                          const LinkIdentity& identity, Rank to, wire::LinkPurpose purpose) {
  Handshake handshake(system, std::move(socket), identity, State::kWantChallenge);
  handshake.hello_ = {purpose,        identity.rank,    to, identity.round,
                      identity.group, identity.version, {}};
  system.random_bytes(handshake.hello_.nonce);
  handshake.send(handshake.hello_);
  return handshake;
}

Handshake Handshake::answer(os::System& system, std::unique_ptr<os::Socket> socket,
                            const LinkIdentity& identity) {
  return Handshake(system, std::move(socket), identity, State::kWantHello);
}

os::PollItem Handshake::interest() const {
  return {.target = socket_.get(),
          .want_read = state_ != State::kDone,
          .want_write = !outgoing_.empty()};
}

Status Handshake::step() {
  CADRE_RETURN_IF_ERROR(flush());
  while (state_ != State::kDone) {
    auto message = receive();
    if (!message.ok()) return message.error();
    if (!message.value()) break;
    CADRE_RETURN_IF_ERROR(handle(*message.value()));
    CADRE_RETURN_IF_ERROR(flush());
  }
  return {};
}

void Handshake::send(const wire::ControlMessage& message) {
  const std::vector<std::byte> frame = wire::encode_control(message);
  outgoing_.insert(outgoing_.end(), frame.begin(), frame.end());
}

Status Handshake::flush() {
  while (!outgoing_.empty()) {
    const Result<size_t> sent = socket_->try_send(outgoing_);
    if (!sent.ok()) return sent.error();
    if (*sent == 0) break;
    outgoing_.erase(outgoing_.begin(), outgoing_.begin() + static_cast<ptrdiff_t>(*sent));
  }
  return {};
}

Result<std::optional<wire::ControlMessage>> Handshake::receive() {
  while (true) {
    size_t wanted = kPrefixBytes;
    if (incoming_.size() >= kPrefixBytes) {
      const auto size =
          wire::ByteReader(ConstBytes(incoming_).first(kPrefixBytes)).integer<uint32_t>();
      if (size > wire::kMaxControlFrameBytes) {
        return refuse(
            size == kC10dGreeting
                ? "it speaks the protocol of c10d's TCPStore, as torchrun does; start the "
                  "job with `cadre run` on all hosts, or with torchrun on all"
                : "a frame is larger than the limit");
      }
      wanted += size;
      if (incoming_.size() == wanted) break;
    }
    const size_t have = incoming_.size();
    incoming_.resize(wanted);
    const Result<size_t> received = socket_->try_recv(Bytes(incoming_).subspan(have));
    incoming_.resize(have + (received.ok() ? *received : 0));
    if (!received.ok()) return received.error();
    if (*received == 0) return std::optional<wire::ControlMessage>();
  }
  Result<wire::ControlMessage> message =
      wire::decode_control(ConstBytes(incoming_).subspan(kPrefixBytes));
  incoming_.clear();
  if (!message.ok()) return refuse(message.error().message());
  return std::optional<wire::ControlMessage>(std::move(message).value());
}

Status Handshake::handle(const wire::ControlMessage& message) {
  if (const auto* refusal = std::get_if<wire::Refusal>(&message)) {
    return Error(ErrorCode::kUnavailable,
                 format("the other end refused the connection: {}", refusal->reason));
  }
  if (const auto* hello = std::get_if<wire::Hello>(&message); hello && state_ == State::kWantHello)
    return handle_hello(*hello);
  if (const auto* challenge = std::get_if<wire::Challenge>(&message);
      challenge && state_ == State::kWantChallenge)
    return handle_challenge(*challenge);
  if (const auto* answer = std::get_if<wire::Answer>(&message);
      answer && state_ == State::kWantAnswer)
    return handle_answer(*answer);
  if (const auto* acceptance = std::get_if<wire::Acceptance>(&message);
      acceptance && state_ == State::kWantAcceptance)
    return handle_acceptance(*acceptance);
  return refuse("a message of this type does not come at this point of the handshake");
}

Status Handshake::check_user() {
  const bool is_unix = socket_->peer_address().kind == os::Address::Kind::kUnix;
  if (!is_unix && !identity_.job_token.empty()) return {};
  const Status status = socket_->check_peer_user();
  if (status.ok()) return {};
  return refuse(status.error().message());
}

Status Handshake::handle_hello(const wire::Hello& hello) {
  hello_ = hello;
  CADRE_RETURN_IF_ERROR(check_user());
  if (hello.version != identity_.version) {
    return refuse(format("{} runs Cadre {}, {} runs Cadre {}: use one build", peer_name(hello.from),
                         hello.version, own_name(), identity_.version));
  }
  const bool is_for_agent = hello.purpose == wire::LinkPurpose::kAgent;
  if (is_for_agent && hello.group != identity_.group) {
    return refuse(
        format("the connection is for {}, but it reached {}", hello.group, identity_.group));
  }
  if (hello.group != identity_.group || hello.round != identity_.round ||
      hello.to != identity_.rank) {
    return refuse(format(
        "the connection is for rank {} of group \"{}\" in round {}, but it reached rank {} of "
        "group \"{}\" in round {}",
        hello.to, hello.group, hello.round, identity_.rank, identity_.group, identity_.round));
  }
  system_->random_bytes(answer_nonce_);
  send(wire::Challenge{answer_nonce_});
  state_ = State::kWantAnswer;
  return {};
}

Status Handshake::handle_challenge(const wire::Challenge& challenge) {
  // The user is checked only now, because a TCP connection belongs to no process at the other end
  // until that process has accepted it.
  CADRE_RETURN_IF_ERROR(check_user());
  answer_nonce_ = challenge.nonce;
  Result<wire::Proof> proof = proof_of("call");
  if (!proof.ok()) return proof.error();
  send(wire::Answer{*proof});
  state_ = State::kWantAcceptance;
  return {};
}

Status Handshake::handle_answer(const wire::Answer& answer) {
  const Result<wire::Proof> expected = proof_of("call");
  if (!expected.ok()) return expected.error();
  if (!wire::equals_in_constant_time(*expected, answer.proof)) {
    return refuse(format("{} has another job token than {}", peer_name(hello_.from), own_name()));
  }
  Result<wire::Proof> proof = proof_of("answer");
  if (!proof.ok()) return proof.error();
  send(wire::Acceptance{*proof});
  state_ = State::kDone;
  return {};
}

Status Handshake::handle_acceptance(const wire::Acceptance& acceptance) {
  const Result<wire::Proof> expected = proof_of("answer");
  if (!expected.ok()) return expected.error();
  if (!wire::equals_in_constant_time(*expected, acceptance.proof)) {
    return refuse(format("{} has another job token than {}", peer_name(hello_.to), own_name()));
  }
  state_ = State::kDone;
  return {};
}

Error Handshake::refuse(std::string reason) {
  send(wire::Refusal{reason});
  // Best effort: if the refusal cannot be sent, the other end still sees that the stream has ended.
  static_cast<void>(flush());
  return Error(ErrorCode::kInvalidArgument, format("refused a connection: {}", reason));
}

std::string Handshake::peer_name(Rank rank) const {
  const bool is_agent = hello_.purpose == wire::LinkPurpose::kAgent;
  return is_agent ? "the agent at " + peer() : format("rank {}", rank);
}

std::string Handshake::own_name() const {
  const bool is_agent = hello_.purpose == wire::LinkPurpose::kAgent;
  return is_agent ? "the agent at " + socket_->local_address().to_string()
                  : format("rank {}", identity_.rank);
}

Result<wire::Proof> Handshake::proof_of(std::string_view end) const {
  // The text that the proof covers. Both ends must compute the same one (control-messages.md).
  const std::string prover =
      format("cadre link {} {} from {} to {} round {} group {}", end,
             static_cast<int>(hello_.purpose), hello_.from, hello_.to, hello_.round, hello_.group);
  const bool is_call = end == "call";
  return wire::prove_token(identity_.job_token.view(), prover,
                           is_call ? answer_nonce_ : hello_.nonce,
                           is_call ? hello_.nonce : answer_nonce_);
}

}  // namespace cadre
