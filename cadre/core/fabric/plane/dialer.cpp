#include "cadre/core/fabric/plane/dialer.h"

#include <algorithm>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/fabric/bootstrap/dial.h"
#include "cadre/core/os/defaults.h"

namespace cadre {
namespace {

// The pause before a dial is retried that failed because this process had no thread or descriptor
// left.
constexpr Duration kOwnLimitPause = std::chrono::seconds(1);

// Returns the unix address of a rank of this host, and the TCP address of any other rank.
Result<os::Address> address_of(const DialPlan& plan, int peer) {
  const wire::RankAddress& rank_address = plan.layout.rank_address(peer);
  const int self = plan.identity.rank;
  if (plan.layout.host_of(peer) == plan.layout.host_of(self)) {
    return os::Address::parse(rank_address.unix_address);
  }
  return tcp_address_of({.from = {plan.layout.rank_address(self), self},
                         .to = {rank_address, peer},
                         .store_host = plan.store_host});
}

}  // namespace

Dialer::Dialer(os::System& system, DialPlan plan, Duration silence_limit, os::Event& wake_up,
               LogSink& log)
    : system_(system),
      plan_(std::move(plan)),
      silence_limit_(silence_limit),
      wake_up_(wake_up),
      log_(log),
      advanced_at_(system.now()) {}

Dialer::~Dialer() {
  stop();
}

void Dialer::dial(int peer) {
  calls_.push_back({.peer = peer,
                    .give_up = system_.deadline_in(kConnectPeerTimeout),
                    .not_before = system_.now()});
}

bool Dialer::is_dialing(int peer) const {
  return std::ranges::any_of(calls_, [peer](const Call& call) { return call.peer == peer; });
}

void Dialer::drop(int peer) {
  for (Call& call : calls_) {
    if (call.peer != peer) continue;
    call.is_dropped = true;
    if (call.attempt != nullptr) call.attempt->drop();
  }
}

void Dialer::begin(Call& call) {
  try {
    call.attempt = std::make_unique<BackgroundConnect>(system_, address_of(plan_, call.peer),
                                                       call.give_up, wake_up_);
  } catch (const Error& error) {
    retry_later(call, error);
  }
}

// Retries the dial after a pause. Called if this process has no thread or descriptor left, which
// does not mean that the peer is lost.
void Dialer::retry_later(Call& call, const Error& error) {
  log_.write(LogLevel::kWarning, "comm",
             format("cannot dial rank={} now, trying again: {}", call.peer, error.message()));
  call.attempt.reset();
  call.not_before = system_.now() + kOwnLimitPause;
}

std::vector<Dialer::Outcome> Dialer::advance() {
  const TimePoint now = system_.now();
  // Limits the time that counts as silence of a peer, so that the time during which this process
  // was stopped does not count (PlaneLoop::judge_silence()).
  const Duration since_last = std::min<Duration>(now - advanced_at_, 2 * kStatusInterval);
  advanced_at_ = now;
  std::vector<Outcome> outcomes;
  for (size_t i = 0; i < calls_.size();) {
    Call& call = calls_[i];
    std::optional<Outcome> outcome = step(call, since_last);
    // A dial whose handshake has begun is not cancelled: the peer may have accepted the connection
    // and would then interpret the end of the connection as the death of this rank.
    const bool is_given_up = call.is_dropped && call.attempt == nullptr && !call.handshake;
    const bool is_over = outcome || is_given_up;
    const bool is_wanted = outcome && (!call.is_dropped || outcome->ending == Ending::kConnected);
    if (is_wanted) outcomes.push_back(std::move(*outcome));
    if (is_over) {
      calls_.erase(calls_.begin() + static_cast<ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  return outcomes;
}

std::optional<Dialer::Outcome> Dialer::step(Call& call, Duration since_last) {
  if (call.attempt != nullptr) {
    if (auto outcome = take_connection(call)) return outcome;
  }
  if (call.handshake) return step_handshake(call, since_last);
  const bool is_due = call.attempt == nullptr && !call.is_dropped;
  if (is_due && system_.now() >= call.not_before) begin(call);
  return std::nullopt;
}

std::optional<Dialer::Outcome> Dialer::take_connection(Call& call) {
  auto result = call.attempt->take();
  if (!result) return std::nullopt;
  call.attempt.reset();
  if (!result->ok() && result->error().details().is_own_limit) {
    retry_later(call, result->error());
    return std::nullopt;
  }
  if (!result->ok()) {
    const bool has_no_answer = result->error().code() == ErrorCode::kTimeout;
    return Outcome{call.peer, has_no_answer ? Ending::kUnanswered : Ending::kRefused, nullptr};
  }
  call.handshake = Handshake::call(system_, std::move(*result).value(), plan_.identity, call.peer,
                                   wire::LinkPurpose::kControl);
  return std::nullopt;
}

// A rank of this host that does not answer is never reported as silent: it may be stopped, and its
// death is detected by other means.
std::optional<Dialer::Outcome> Dialer::step_handshake(Call& call, Duration since_last) {
  const Status status = call.handshake->step();
  if (status.ok() && call.handshake->is_done()) {
    return Outcome{call.peer, Ending::kConnected, call.handshake->take()};
  }
  if (status.ok()) {
    call.silent_for += since_last;
    const bool is_near =
        plan_.layout.host_of(call.peer) == plan_.layout.host_of(plan_.identity.rank);
    if (is_near || call.silent_for < silence_limit_) return std::nullopt;
    return Outcome{call.peer, Ending::kSilent, nullptr};
  }
  call.handshake.reset();
  if (status.error().code() != ErrorCode::kPeerLost) {
    log_.write(LogLevel::kWarning, "comm",
               format("{} refused a control connection: {}", plan_.layout.describe(call.peer),
                      status.error().message()));
    return Outcome{call.peer, Ending::kRefused, nullptr};
  }
  const TimePoint now = system_.now();
  if (call.give_up.has_passed(now)) return Outcome{call.peer, Ending::kRefused, nullptr};
  call.not_before = now + kRedialPause;
  return std::nullopt;
}

void Dialer::add_interests(std::vector<os::PollItem>& items) const {
  for (const Call& call : calls_) {
    if (call.handshake) items.push_back(call.handshake->interest());
  }
}

Deadline Dialer::next_deadline(Deadline deadline) const {
  for (const Call& call : calls_) {
    const bool waits_for_time = call.attempt == nullptr && !call.handshake;
    if (waits_for_time) deadline = deadline.earlier(Deadline(call.not_before));
  }
  return deadline;
}

void Dialer::stop() {
  for (const Call& call : calls_) {
    if (call.attempt != nullptr) call.attempt->drop();
  }
  calls_.clear();
}

}  // namespace cadre
