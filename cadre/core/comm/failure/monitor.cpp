#include "cadre/core/comm/failure/monitor.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/queue/thrown_error.h"
#include "cadre/core/os/waiter_listing.h"

namespace cadre {

using wire::Activity;
using wire::ActivityState;

Monitor::Monitor(os::System& system, MonitorSetup setup, StatusPage page,
                 std::shared_ptr<GroupCell> cell)
    : system_(system),
      setup_(std::move(setup)),
      cell_(std::move(cell)),
      peers_(setup_.roster.members.size()),
      ends_(setup_.roster.world_size(), setup_.roster.self),
      num_earlier_failures_(setup_.late_errors->num_failures()),
      arbiter_(setup_.roster, setup_.record_path),
      page_(std::move(page)) {}

void Monitor::start() {
  if (setup_.plane == nullptr) return;
  setup_.plane->attach(setup_.key, shared_from_this());
  if (setup_.creation != kNoGroup) setup_.plane->attach(setup_.creation, shared_from_this());
}

void Monitor::stop() {
  {
    std::lock_guard lock(mutex_);
    is_leaving_ = true;
    if (std::exchange(is_stopped_, true) || ends_.is_open()) return;
  }
  detach();
}

void Monitor::release_page() {
  const TimePoint now = system_.now();
  std::lock_guard lock(mutex_);
  for (size_t i = 0; page_ && i < peers_.size(); ++i) {
    if (setup_.slots[i] < 0) continue;
    peers_[i].reported = view_of(i, now).activity;
    peers_[i].reported_at = now;
  }
  page_.reset();
  const auto own = std::make_shared<GroupCell>();
  own->collective.copy(cell_->collective);
  own->message.copy(cell_->message);
  cell_ = own;
}

std::shared_ptr<GroupCell> Monitor::shared_cell() const {
  const std::lock_guard lock(mutex_);
  return cell_;
}

int Monitor::group_rank(int fabric_rank) const {
  const auto found = std::ranges::find(setup_.roster.members, fabric_rank);
  return found == setup_.roster.members.end()
             ? -1
             : static_cast<int>(found - setup_.roster.members.begin());
}

// A peer may leave at the moment at which this rank starts a collective. The thread that enters the
// collective first stores running_number_ and then loads first_left_; the thread that handles the
// leave first stores first_left_ and then loads running_number_. These accesses are sequentially
// consistent, so at least one of the threads sees the other's store.
void Monitor::enter_collective(uint64_t number) {
  running_number_.store(number, std::memory_order_seq_cst);
  if (first_left_.load(std::memory_order_seq_cst) < number) fail_if_left_before(number);
}

void Monitor::leave_collective() {
  running_number_.store(0, std::memory_order_release);
}

void Monitor::fail_if_left_before(uint64_t number) {
  int peer = -1;
  uint64_t left_after = 0;
  {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < peers_.size(); ++i) {
      const auto& left = peers_[i].left_after;
      if (left && *left < number && (peer < 0 || *left < left_after)) {
        peer = static_cast<int>(i);
        left_after = *left;
      }
    }
    has_failed_by_leave_ = has_failed_by_leave_ || (peer >= 0 && !has_failed());
  }
  if (peer < 0) return;
  fail({ErrorCode::kPeerLost, peer, left_cause(roster(), peer, left_after), {}});
}

Error Monitor::error() {
  const TimePoint now = system_.now();
  const std::lock_guard lock(mutex_);
  // The cell of the status page is read under the lock, so that its content is not older than the
  // published failure.
  return arbiter_.error(cell_->collective.read(now));
}

void Monitor::fail(const Failure& failure) {
  const TimePoint now = system_.now();
  {
    const std::lock_guard lock(mutex_);
    if (!arbiter_.report(failure, now)) return wake_observers();
  }
  VisitedGroups visited;
  publish(failure, visited);
}

void Monitor::fail_after(const std::function<Finding()>& investigate) {
  {
    const std::lock_guard lock(mutex_);
    if (!arbiter_.claim()) return;
  }
  Finding finding;
  try {
    finding = investigate();
  } catch (const std::exception& thrown) {
    const Error error = error_of(thrown);
    finding.failure = {error.code(), roster().self.value, error.message(), {}};
  }
  const TimePoint now = system_.now();
  const Deadline decision(now + finding.patience);
  std::unique_lock lock(mutex_);
  arbiter_.conclude(std::move(finding), now);
  if (!arbiter_.is_decided(now)) {
    lock.unlock();
    await([&](TimePoint at) { return arbiter_.is_decided(at); }, decision);
    lock.lock();
  }
  const Failure& decided = arbiter_.decided();  // the decision does not change any more
  lock.unlock();
  VisitedGroups visited;
  publish(decided, visited);
}

void Monitor::fail_by_timeout(const Overdue& overdue) {
  fail_after([&] {
    const auto views = ask_peers(system_.deadline_in(kAskTime));
    const int awaited = overdue.waiting_for;
    Suspect culprit = find_culprit(views, roster().self, overdue.number, awaited);
    const bool is_cut_off =
        !culprit.is_certain && awaited >= 0 && setup_.plane != nullptr &&
        setup_.plane->is_cut_off(setup_.roster.members[static_cast<size_t>(awaited)],
                                 system_.deadline_in(kAskTime));
    if (is_cut_off) culprit = {awaited, true};
    PeerView view = culprit.rank < 0 ? PeerView() : views[static_cast<size_t>(culprit.rank)];
    view.is_cut_off = is_cut_off;
    std::string cause = timeout_cause(roster(), culprit.rank, view);
    if (!overdue.where.empty()) cause = format("{}: {}", overdue.where, cause);
    const OpKind kind = OpDescriptor::from_fingerprint(overdue.activity.fingerprint).kind;
    const bool is_ring = kind == OpKind::kSend && is_ring_of_sends(views, roster().self, awaited);
    return Finding{{.code = ErrorCode::kTimeout,
                    .culprit = culprit.rank,
                    .cause = std::move(cause),
                    .operation = overdue.activity,
                    .remedy = std::string(is_ring ? kNoRingOfSends : "")},
                   culprit.is_certain
                       ? Duration(0)
                       : kDoubtTime + lag_of_chain(views, roster().self, awaited, kMaxLag)};
  });
}

// The thread that has claimed the failure must end the waits of all other threads, even if no
// memory is left to compose a message.
void Monitor::publish(const Failure& failure, VisitedGroups& visited) {
  try {
    visited.push_back(this);
    if (!failure.is_linked) setup_.late_errors->note_failure();
    ExplainedFailure explained = arbiter_.explain(failure, shared_cell()->read(system_.now()));
    const Error logged = explained.logged;
    // The members are informed before the waits of this group end, because this rank may leave the
    // group as soon as they end.
    publish_to_members(failure, explained.sentence);
    if (const auto first = first_failure(failure, explained.sentence)) {
      links_.spread(*first, roster(), visited);
    }
    end_waits(std::move(explained));
    if (failure.is_logged) log().write(LogLevel::kError, "comm", logged.message());
  } catch (const std::exception& thrown) {
    const Error error = error_of(thrown);
    end_waits({.error = error, .logged = error});
  }
}

void Monitor::end_waits(ExplainedFailure explained) {
  if (setup_.on_failed) setup_.on_failed(explained.error);
  {
    const std::lock_guard lock(mutex_);
    arbiter_.publish(std::move(explained));
    // The flag is set before an observer can throw the error and call close(): if close() did not
    // see the failure, it would publish a leave in good order.
    has_failed_.store(true, std::memory_order_release);
    wake_observers();
  }
  interrupt_.raise();
}

// Publishes only failures that this rank has found: a failure that another rank has found is
// published by that rank.
void Monitor::publish_to_members(const Failure& failure, const std::string& sentence) {
  const int self = roster().self.value;
  const bool is_own = failure.is_linked || failure.reporter < 0 || failure.reporter == self;
  {
    std::lock_guard lock(mutex_);
    if (setup_.plane == nullptr || is_stopped_ || !is_own) return;
  }
  const std::vector<int>& members = setup_.roster.members;
  const int origin = members[static_cast<size_t>(self)];
  const int culprit =
      failure.culprit < 0 ? failure.outside_culprit : members[static_cast<size_t>(failure.culprit)];
  // The notice also names a culprit outside this group, because a receiver may have another group
  // of which that rank is a member.
  const ErrorCode code = failure.is_loss ? ErrorCode::kPeerLost : failure.code;
  setup_.plane->tell_failure(
      {setup_.key, origin,
       wire::AbortNotice{code, culprit, origin, failure.cause, sentence, failure.remedy}});
}

void Monitor::await_failure(int peer, Deadline deadline) {
  await(
      [&](TimePoint) {
        return arbiter_.phase() == FailureArbiter::Phase::kPublished ||
               (peer >= 0 && peers_[static_cast<size_t>(peer)].left_after.has_value());
      },
      deadline);
}

// Waits until the thread that has claimed the failure has published it. That thread polls the
// peers, tries to connect, and then waits for a better finding of another rank; the deadline is the
// sum of these times.
Error Monitor::published_failure() {
  await_failure(-1, system_.deadline_in(2 * kAskTime + 2 * kDoubtTime + kMaxLag));
  if (has_failed()) return error();
  fail({ErrorCode::kInternal, -1, "an operation was interrupted without a reason", {}});
  await_failure(-1, system_.deadline_in(kAskTime));
  return error();
}

std::optional<Monitor::EndOfStream> Monitor::why_stream_ended(int peer, const Error& error) {
  await_failure(peer, system_.deadline_in(kVerdictTime));
  if (has_failed()) return std::nullopt;
  // The operation is a receive from any rank, which fails only when the streams of all peers have
  // ended.
  if (peer < 0) return EndOfStream{first_left(peers()), all_left_cause(roster(), peers(), error)};
  const PeerView view = peers()[static_cast<size_t>(peer)];
  if (view.left_after) return EndOfStream{peer, left_cause(roster(), peer, *view.left_after)};
  if (auto loss = loss_after_leaving()) return loss;
  return EndOfStream{
      peer, format("the connection to {} broke: {}", roster().describe(peer), error.message())};
}

// Returns the loss of a member that was lost after it had left. Only ranks that had not received
// the leave treat this as a failure; they do not publish it, because the control plane publishes
// the loss.
std::optional<Monitor::EndOfStream> Monitor::loss_after_leaving() const {
  const TimePoint now = system_.now();
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (!peers_[i].ended_by) continue;
    const int rank = static_cast<int>(i);
    return EndOfStream{rank, gone_cause(roster(), rank, view_of(i, now), *peers_[i].ended_by)};
  }
  return std::nullopt;
}

std::vector<PeerView> Monitor::peers() const {
  const TimePoint now = system_.now();
  std::lock_guard lock(mutex_);
  std::vector<PeerView> views;
  for (size_t i = 0; i < peers_.size(); ++i) views.push_back(view_of(i, now));
  return views;
}

PeerView Monitor::view_of(size_t rank, TimePoint now) const {
  const Peer& peer = peers_[rank];
  PeerView view;
  view.is_gone = peer.is_gone;
  view.has_aborted = peer.has_aborted;
  view.left_after = peer.left_after;
  view.answers = has_asked_ && peer.answers;
  if (view.answers) view.elsewhere = peer.elsewhere;
  // The status page has too few cells for a process with many groups. The activity of a group
  // without a cell is known from the answers to status questions.
  const int slot = setup_.slots[rank];
  const bool is_in_page = slot >= 0 && page_;
  const GroupCell* const cell = is_in_page ? page_->slot(slot).find(setup_.key) : nullptr;
  if (cell != nullptr) {
    view.activity = cell->read(now);
  } else if (peer.reported) {
    view.activity = *peer.reported;
    view.activity.age_ns += (now - peer.reported_at).count();
  }
  return view;
}

std::vector<PeerView> Monitor::ask_peers(Deadline deadline) {
  if (setup_.plane != nullptr) {
    const auto answers = setup_.plane->ask(setup_.key, setup_.roster.members, deadline);
    const TimePoint now = system_.now();
    std::lock_guard lock(mutex_);
    has_asked_ = true;
    for (Peer& peer : peers_) peer.answers = false;
    for (const StatusAnswer& answer : answers) {
      Peer& peer = peers_[static_cast<size_t>(group_rank(answer.rank))];
      peer.answers = !answer.has_left;
      peer.has_aborted |= answer.has_left && !peer.left_after;
      if (answer.has_left) continue;
      peer.reported = answer.activity;
      peer.reported_at = now;
      peer.elsewhere = answer.activity.elsewhere;
    }
  }
  return peers();
}

void Monitor::publish_leave(uint64_t number, Deadline deadline) {
  if (setup_.plane == nullptr) return;
  const Activity last = own_cell().collective.read(system_.now());
  const bool is_done = last.number == number && last.state == ActivityState::kDone;
  bool has_claim = false;
  {
    std::unique_lock lock(mutex_);
    if (arbiter_.phase() == FailureArbiter::Phase::kClaimed) {
      lock.unlock();
      await_failure(-1, deadline);
      lock.lock();
    }
    has_claim = arbiter_.phase() != FailureArbiter::Phase::kNone;
    is_leaving_ = true;
    // Ranks of a failed group may leave after different collectives, which is no mismatch. There is
    // one exception: if the group failed because a member has left, and the last collective of this
    // rank has succeeded, no call has thrown that failure, so a mismatch must be reported.
    const bool may_compare = !has_failed() || (has_failed_by_leave_ && is_done);
    if (may_compare) ends_.note_left({roster().self.value, number, last.fingerprint});
    if (has_failed()) ends_.note_failed();
  }
  if (!has_claim) setup_.plane->tell_left(setup_.key, number, last.fingerprint);
  report_mismatch();
}

// If two ranks have different last collectives, at least the rank that leaves later detects the
// mismatch.
void Monitor::report_mismatch() {
  std::unique_lock lock(mutex_);
  const auto mismatch = ends_.take_mismatch();
  const uint64_t num_explained = num_earlier_failures_ + (has_failed() ? 1 : 0);
  if (!mismatch || setup_.late_errors->num_failures() > num_explained) return;
  lock.unlock();
  const Error error = end_mismatch_error(roster(), *mismatch, setup_.record_path);
  log().write(LogLevel::kError, "comm", error.message());
  setup_.late_errors->add(error);
}

void Monitor::detach_if_over() {
  {
    const std::lock_guard lock(mutex_);
    if (!is_stopped_ || ends_.is_open()) return;
  }
  detach();
}

void Monitor::await(const std::function<bool(TimePoint now)>& is_met, Deadline deadline) {
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  const WaiterListing listing(mutex_, observers_, *waiter);
  while (true) {
    const TimePoint now = system_.now();
    {
      std::lock_guard lock(mutex_);
      if (is_met(now)) return;
    }
    if (deadline.has_passed(now)) return;
    waiter->park(deadline);
  }
}

void Monitor::on_rank_lost(const LossReport& loss) {
  const int rank = group_rank(loss.rank);
  if (rank < 0) return;
  if (rank == roster().self.value) return fail_as_reported_lost(loss);
  for (const GroupActivity& last : loss.last) {
    if (last.group == setup_.key) report_activity(rank, last.activity);
  }
  const TimePoint now = system_.now();
  PeerView view;
  bool is_loss = false;
  {
    std::lock_guard lock(mutex_);
    Peer& peer = peers_[static_cast<size_t>(rank)];
    is_loss = !peer.left_after && !peer.has_aborted && !is_leaving_;
    peer.is_gone = peer.is_gone || !peer.left_after;
    if (peer.left_after) peer.ended_by = loss.sign;
    if (!peer.left_after) ends_.note_failed();
    view = view_of(static_cast<size_t>(rank), now);
    wake_observers();
  }
  detach_if_over();
  if (!is_loss) return;
  const int reporter = group_rank(loss.reporter);
  fail({.code = ErrorCode::kPeerLost,
        .culprit = rank,
        .cause = gone_cause(roster(), rank, view, loss.sign),
        .reporter = reporter < 0 ? roster().self.value : reporter,
        .is_loss = true});
}

void Monitor::report_activity(int peer, const Activity& activity) {
  const TimePoint now = system_.now();
  std::lock_guard lock(mutex_);
  peers_[static_cast<size_t>(peer)].reported = activity;
  peers_[static_cast<size_t>(peer)].reported_at = now;
}

// Fails the group because another rank has reported this rank as lost after a connection between
// them was cut, or because this process has found that its connections were closed from outside.
void Monitor::fail_as_reported_lost(const LossReport& loss) {
  {
    std::lock_guard lock(mutex_);
    if (is_leaving_) return;
  }
  const int reporter = group_rank(loss.reporter);
  if (reporter == roster().self.value) return fail(closed_here(roster()));
  const std::string who = reporter < 0 ? "another rank" : roster().describe(reporter);
  fail({ErrorCode::kAborted,
        roster().self.value,
        format("{}{} lost the connection to this rank: {}", kFirstFailure, who,
               gone_cause(roster(), roster().self.value, {own_activity().value_or(Activity())},
                          loss.sign)),
        {},
        reporter});
}

void Monitor::on_rank_left_group(const wire::GroupLeave& leave) {
  const uint64_t num_collectives = leave.num_collectives;
  const int peer = group_rank(leave.rank);
  if (peer < 0 || peer == roster().self.value) return;
  {
    std::lock_guard lock(mutex_);
    peers_[static_cast<size_t>(peer)].left_after = num_collectives;
    ends_.note_left({peer, num_collectives, leave.last});
    wake_observers();
  }
  report_mismatch();
  detach_if_over();
  note_left(leave.rank);
  // Two leaves may be delivered concurrently: an earlier one by attach() and a new one by the
  // control plane's thread.
  uint64_t first = first_left_.load(std::memory_order_relaxed);
  while (num_collectives < first &&
         !first_left_.compare_exchange_weak(first, num_collectives, std::memory_order_seq_cst)) {
  }
  const uint64_t running = running_number_.load(std::memory_order_seq_cst);
  if (running > num_collectives) fail_if_left_before(running);
}

void Monitor::on_group_failed(const GroupFailure& failure) {
  const int origin = group_rank(failure.origin);
  if (origin < 0 || origin == roster().self.value) return;
  const wire::AbortNotice& notice = failure.notice;
  const int culprit = group_rank(notice.culprit);
  const int reporter = std::max(group_rank(notice.reporter), -1);
  const bool names_a_peer = culprit >= 0 && culprit != roster().self.value;
  const bool is_loss = notice.code == ErrorCode::kPeerLost && names_a_peer;
  bool is_leaving = false;
  {
    std::lock_guard lock(mutex_);
    peers_[static_cast<size_t>(origin)].has_aborted = true;
    ends_.note_failed();
    is_leaving = is_leaving_;
    wake_observers();
    if (!is_leaving && is_loss && arbiter_.phase() == FailureArbiter::Phase::kNone) {
      peers_[static_cast<size_t>(culprit)].is_gone = true;
    }
  }
  detach_if_over();
  // A rank that is leaving ignores failures of other ranks: otherwise it would publish a failure of
  // its own to members that have not heard of its leave yet.
  if (is_leaving) return;
  Failure failed = failure_from_notice(notice, is_loss, {culprit, reporter});
  if (culprit < 0) failed.outside_culprit = notice.culprit;
  // kPeerLost does not always mean that the culprit was lost: a culprit in this group may also have
  // left the group. Only the control plane knows whether a member was lost, so its record is read.
  const bool is_loss_outside = notice.code == ErrorCode::kPeerLost && failed.outside_culprit >= 0;
  failed.is_loss = is_loss_outside || (names_a_peer && setup_.plane != nullptr &&
                                       setup_.plane->loss_of(notice.culprit).has_value());
  fail(failed);
}

std::optional<wire::Activity> Monitor::own_activity() {
  {
    const std::lock_guard lock(mutex_);
    if (is_stopped_) return std::nullopt;
  }
  Activity activity = shared_cell()->read(system_.now());
  const bool is_here = activity.state == ActivityState::kRunning;
  if (!is_here && setup_.running_elsewhere) activity.elsewhere = setup_.running_elsewhere();
  return activity;
}

}  // namespace cadre
