#include "cadre/core/fabric/bootstrap/callers.h"

#include <algorithm>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

constexpr Duration kHandshakeTime = std::chrono::seconds(1);
// The pause after a failed accept(), most likely because descriptors have run out. The connection
// stays in the listener's queue, so without a pause poll() would report the listener as ready at
// once.
constexpr Duration kAcceptPause = std::chrono::milliseconds(100);
// The number of connections that one listener accepts before the handshakes are advanced again. A
// smaller limit applies while each new connection replaces an older one, so that the older ones
// have time to finish their handshakes.
constexpr size_t kMaxAcceptsPerTurn = 64;
constexpr size_t kMaxReplacementsPerTurn = 8;
// The number of connections that are dropped when the process has run out of descriptors, so that
// the rest of the process can open some.
constexpr size_t kRoom = 16;

}  // namespace

Callers::Callers(os::System& system, const LinkIdentity& identity,
                 std::vector<os::Listener*> listeners, size_t num_expected)
    : system_(system),
      identity_(identity),
      listeners_(std::move(listeners)),
      max_callers_(num_expected + kMaxStrangers) {}

std::vector<Handshake> Callers::advance() {
  std::vector<Handshake> done;
  // The handshakes are advanced before new connections are accepted, because a new connection could
  // replace one whose handshake is about to be done.
  step(done);
  if (may_accept()) {
    failure_.clear();
    for (os::Listener* const listener : listeners_) accept(*listener);
  }
  step(done);
  return done;
}

void Callers::stop_accepting() {
  is_accepting_ = false;
  std::erase_if(callers_, [](const Caller& caller) { return !caller.handshake.wants_answer(); });
}

void Callers::accept(os::Listener& listener) {
  bool has_made_room = false;
  for (size_t num_left = kMaxAcceptsPerTurn; num_left > 0; --num_left) {
    auto accepted = listener.try_accept();
    if (!accepted.ok()) {
      failure_ = accepted.error().message();
      if (has_made_room || !make_room()) {
        accept_after_ = system_.now() + kAcceptPause;
        return;
      }
      has_made_room = true;
      num_left = std::min(num_left, kMaxReplacementsPerTurn);
      continue;
    }
    has_made_room = false;
    if (*accepted == nullptr) return;
    if (callers_.size() == max_callers_ && drop_one()) {
      num_left = std::min(num_left, kMaxReplacementsPerTurn);
    }
    callers_.push_back({Handshake::answer(system_, std::move(accepted).value(), identity_),
                        system_.deadline_in(kHandshakeTime)});
  }
}

// Called if accept fails, most likely because descriptors have run out. Drops some callers, and
// sets the limit to the number of remaining callers: from then on each new caller replaces an older
// one, and the rest of the process has descriptors for its segment and connections. Returns whether
// a caller was dropped.
bool Callers::make_room() {
  const size_t num_dropped = std::min(kRoom, (callers_.size() + 1) / 2);
  for (size_t i = 0; i < num_dropped; ++i) drop_one();
  max_callers_ = std::max<size_t>(callers_.size(), 1);
  return num_dropped > 0;
}

// Drops the oldest caller that has not sent its hello message, or the oldest of all if every caller
// has sent it. Returns false if there is no caller at all.
bool Callers::drop_one() {
  auto dropped = std::find_if(callers_.begin(), callers_.end(), [](const Caller& caller) {
    return !caller.handshake.wants_answer();
  });
  if (dropped == callers_.end()) dropped = callers_.begin();
  if (dropped == callers_.end()) return false;
  callers_.erase(dropped);
  return true;
}

void Callers::step(std::vector<Handshake>& done) {
  const TimePoint now = system_.now();
  std::erase_if(callers_, [&](Caller& caller) {
    if (const Status status = caller.handshake.step(); !status.ok()) {
      // A process that has ended its connection was not refused.
      const bool was_refused = status.error().code() != ErrorCode::kPeerLost;
      if (was_refused) note_refusal(caller.handshake, status.error().message());
      return true;
    }
    if (!caller.handshake.is_done()) {
      const bool is_late = caller.deadline.has_passed(now);
      if (is_late) {
        note_refusal(caller.handshake, "it has not proved within 1 s that it has the job's token");
      }
      return is_late;
    }
    done.push_back(std::move(caller.handshake));
    return true;
  });
}

void Callers::note_refusal(const Handshake& handshake, std::string_view reason) {
  if (refusals_.size() < kMaxRefusals) {
    refusals_.push_back(format("{}: {}", handshake.peer(), reason));
  }
}

std::string Callers::accept_failure() const {
  if (failure_.empty()) return "";
  return format(
      "; this rank could not accept connections: {} (raise ulimit -n if descriptors ran out)",
      failure_);
}

void Callers::add_interests(std::vector<os::PollItem>& items) const {
  if (may_accept()) {
    for (os::Listener* const listener : listeners_) {
      items.push_back({.target = listener, .want_read = true});
    }
  }
  for (const Caller& caller : callers_) items.push_back(caller.handshake.interest());
}

Deadline Callers::next_deadline(Deadline deadline) const {
  if (is_accepting_ && !may_accept()) deadline = deadline.earlier(Deadline(accept_after_));
  // The callers are sorted by deadline, so the first deadline is the earliest.
  return callers_.empty() ? deadline : deadline.earlier(callers_.front().deadline);
}

}  // namespace cadre
