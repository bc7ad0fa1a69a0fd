#include "cadre/core/fabric/plane/plane_loop.h"

#include <algorithm>
#include <set>
#include <utility>

#include "cadre/core/os/defaults.h"
#include "cadre/core/os/io/handle_owner.h"

namespace cadre {
namespace {

using wire::Event;

constexpr Duration kIdleLook = std::chrono::seconds(60);
constexpr uint64_t kNoLink = 0;

std::vector<std::unique_ptr<os::Listener>> take_listeners(ControlPlane::Setup& setup) {
  std::vector<std::unique_ptr<os::Listener>> listeners = std::move(setup.tcp_listeners);
  if (setup.unix_listener != nullptr) listeners.push_back(std::move(setup.unix_listener));
  return listeners;
}

}  // namespace

PlaneLoop::PlaneLoop(PlaneContext context, ControlPlane::Setup setup)
    : context_(std::move(context)),
      setup_(std::move(setup)),
      layout_(context_.plan.layout),
      self_(setup_.rank),
      healer_(context_.system, {.plan = context_.plan,
                                .listeners = take_listeners(setup_),
                                .silence_limit = setup_.silence_limit,
                                .wake_up = context_.wake_up,
                                .log = setup_.log != nullptr ? *setup_.log : null_log_sink(),
                                .meter = context_.meter,
                                .on_data_connection = setup_.on_data_connection}),
      periodic_at_(context_.system.now()),
      silence_judged_at_(periodic_at_) {
  for (int peer = 0; static_cast<size_t>(peer) < setup_.control.size(); ++peer) {
    auto& socket = setup_.control[static_cast<size_t>(peer)];
    if (socket != nullptr) add_link(peer, std::move(socket), false);
  }
  setup_.processes.resize(static_cast<size_t>(layout_.num_ranks()));
}

void PlaneLoop::run() {
  while (true) {
    obey_orders();
    for (const auto& link : links_) link->flush();
    context_.state.deliver();
    if (has_left()) break;
    std::vector<os::PollItem> items = {{.target = &context_.wake_up, .want_read = true}};
    for (const auto& link : links_) items.push_back(link->interest());
    for (const auto& process : setup_.processes) {
      if (process != nullptr) items.push_back({.target = process.get(), .want_read = true});
    }
    healer_.add_interests(items);
    context_.system.poll(items, next_look(context_.system.now()));
    look(items);
  }
  healer_.stop();
  context_.state.end();
}

// Processes `items`, which are in the order in which run() has listed them. All connections are
// read before this rank judges which ends mean a loss, because an event from one connection may
// explain the end of another.
void PlaneLoop::look(std::vector<os::PollItem>& items) {
  const TimePoint now = context_.system.now();
  auto item = items.begin();
  if ((item++)->can_read) context_.wake_up.clear();
  for (const auto& link : links_) {
    if ((item++)->can_read) receive_from(*link);
  }
  for (int rank = 0; rank < layout_.num_ranks(); ++rank) {
    auto& process = setup_.processes[static_cast<size_t>(rank)];
    if (process == nullptr || !(item++)->can_read) continue;
    const bool is_own = os::owns_handle(*process);
    process.reset();
    if (is_own) {
      ended_processes_[rank] = now;
    } else {
      report_closed_here();
    }
  }
  const bool is_healer_ready = std::any_of(
      item, items.end(), [](const os::PollItem& one) { return one.can_read || one.can_write; });
  judge_silence(now);
  judge_ends();
  bury_ended(now);
  heal(is_healer_ready);
  work_periodically(context_.system.now());
}

Deadline PlaneLoop::next_look(TimePoint now) const {
  if (flush_by_) return Deadline(*flush_by_);
  Deadline look = Deadline(now + kIdleLook);
  if (receipts_by_) look = look.earlier(*receipts_by_);
  if (is_periodic()) look = look.earlier(Deadline(periodic_at_ + kStatusInterval));
  for (const auto& [rank, at] : ended_processes_) {
    look = look.earlier(Deadline(at + kLastWordsTime));
  }
  return healer_.next_deadline(look);
}

bool PlaneLoop::is_near(int rank) const {
  return layout_.host_of(rank) == layout_.host_of(self_);
}

void PlaneLoop::add_link(int peer, std::unique_ptr<os::Socket> socket, bool is_healed) {
  links_.push_back(std::make_unique<ControlLink>(
      ControlLink::Setup{++num_links_, peer, !is_near(peer), is_healed, std::move(socket)},
      context_.meter));
  if (!is_healed) return;
  for (const Event& event : context_.state.all_events()) links_.back()->post(event);
}

ControlLink* PlaneLoop::find_link(uint64_t id) {
  const auto found =
      std::ranges::find_if(links_, [id](const auto& link) { return link->id() == id; });
  return found == links_.end() ? nullptr : found->get();
}

bool PlaneLoop::has_link(int peer) const {
  return std::ranges::any_of(links_, [peer](const auto& link) { return link->peer() == peer; });
}

void PlaneLoop::obey_orders() {
  const PlaneState::Orders orders = context_.state.take_orders();
  for (const Event& event : orders.events) {
    if (std::holds_alternative<wire::StatusQuestion>(event)) {
      spread(event, Scope::kEverywhere, kNoLink);
    } else {
      learn(event, nullptr);
    }
  }
  if (orders.leave_by && !receipts_by_) start_leaving(*orders.leave_by);
}

void PlaneLoop::start_leaving(Deadline receipts_by) {
  receipts_by_ = receipts_by;
  learn(wire::FabricLeave{self_}, nullptr);
  healer_.start_leaving();
}

// Returns whether this process knows of a recent failure. If so, it connects to its new neighbours
// before it leaves: the peers that would forward the failure may have left already, and the
// remaining ranks replace those connections only after a pause. Otherwise all ranks that know of
// the failure might leave before the remaining ranks have received it.
bool PlaneLoop::has_news_of_failure() const {
  return failure_heard_at_ && context_.system.now() - *failure_heard_at_ < kFailureNewsTime;
}

// Returns whether this process has connections to too few peers to leave. A leave event that is
// sent to a single peer may not reach the other ranks, because that peer may be stopped or
// partitioned from them. The other ranks would then try to connect to this process, fail, and
// report it as lost.
bool PlaneLoop::has_few_peers(const std::vector<bool>& is_present) const {
  std::set<int> peers;
  for (const auto& link : links_) {
    if (is_present[static_cast<size_t>(link->peer())]) peers.insert(link->peer());
  }
  const auto num_others = static_cast<size_t>(std::ranges::count(is_present, true)) - 1;
  return peers.size() < std::min(kMinLeavePeers, num_others);
}

EdgeHealer::View PlaneLoop::healer_view() const {
  EdgeHealer::View view{.is_present = context_.state.presence(),
                        .has_link = [this](int rank) { return has_link(rank); },
                        .may_dial = !context_.state.is_lost(self_)};
  if (receipts_by_) view.may_dial &= has_news_of_failure() || has_few_peers(view.is_present);
  return view;
}

// Returns true when all peers have acknowledged the leave of this process and all pending bytes are
// sent, or the deadlines of these steps have passed. Does not wait for lost ranks.
bool PlaneLoop::has_left() {
  if (!receipts_by_) return false;
  const TimePoint now = context_.system.now();
  const auto all_of_living = [&](auto&& holds) {
    return std::ranges::all_of(links_, [&](const auto& link) {
      return holds(*link) || context_.state.is_lost(link->peer());
    });
  };
  const EdgeHealer::View view = healer_view();
  const bool is_confirmed =
      all_of_living([](const ControlLink& link) { return link.has_receipt; }) &&
      (!view.may_dial || healer_.is_complete(view));
  if (!is_confirmed && !receipts_by_->has_passed(now)) return false;
  if (!flush_by_) flush_by_ = now + kFlushTime;
  return all_of_living([](const ControlLink& link) { return link.is_flushed(); }) ||
         now >= *flush_by_;
}

void PlaneLoop::receive_from(ControlLink& link) {
  std::vector<wire::ControlMessage> messages;
  const Status status = link.receive(messages);
  for (const wire::ControlMessage& message : messages) handle(link, message);
  if (status.ok()) return;
  const bool is_own = status.error().details().is_own_limit;
  ends_.push_back({link.id(), SignOfLoss::kConnectionEnded, is_own});
}

void PlaneLoop::handle(ControlLink& link, const wire::ControlMessage& message) {
  if (const auto* batch = std::get_if<wire::EventBatch>(&message)) {
    for (const Event& event : batch->events) handle_event(link, event);
  }
  if (std::holds_alternative<wire::LeaveReceipt>(message)) link.has_receipt = true;
}

void PlaneLoop::handle_event(ControlLink& link, const Event& event) {
  if (const auto* question = std::get_if<wire::StatusQuestion>(&event)) {
    return handle_question(link, *question);
  }
  if (const auto* answer = std::get_if<wire::StatusAnswer>(&event)) return handle_answer(*answer);
  learn(event, &link);
  const auto* leave = std::get_if<wire::FabricLeave>(&event);
  if (leave != nullptr && leave->rank == link.peer()) link.post_receipt();
}

// Forwards the question and answers it. Within the host of the asking rank no forwarding is needed,
// because that rank has sent it to all ranks of its host.
void PlaneLoop::handle_question(ControlLink& link, const wire::StatusQuestion& question) {
  const bool is_foreign =
      question.origin >= 0 && question.origin < layout_.num_ranks() && question.origin != self_;
  if (!is_foreign || !routes_.add(question, link.id())) return;
  spread(question, scope_of(&link), link.id());
  const std::shared_ptr<GroupEvents> group = context_.state.group(question.group);
  const auto activity = group == nullptr ? std::nullopt : group->own_activity();
  if (activity) {
    link.post(wire::StatusAnswer{question.origin, question.number, self_, *activity});
  }
}

void PlaneLoop::handle_answer(const wire::StatusAnswer& answer) {
  if (answer.origin == self_) return context_.state.take_answer(answer);
  const std::optional<uint64_t> way = routes_.way_back(answer);
  ControlLink* const link = way ? find_link(*way) : nullptr;
  if (link != nullptr) link->post(answer);
}

// A rank sends its events to all ranks of its host, so an event from a rank of this host is not
// forwarded within the host. But if that rank is lost, it may have reached only some ranks of the
// host.
PlaneLoop::Scope PlaneLoop::scope_of(const ControlLink* by) const {
  if (by == nullptr || by->crosses_hosts()) return Scope::kEverywhere;
  return context_.state.is_lost(by->peer()) ? Scope::kEverywhere : Scope::kOtherHosts;
}

void PlaneLoop::learn(const Event& event, const ControlLink* by) {
  const int from = by == nullptr ? EventLog::kOwn : by->peer();
  if (!context_.state.learn(event, from)) return;
  ++context_.meter.events;
  spread(event, scope_of(by), by == nullptr ? kNoLink : by->id());
  if (std::holds_alternative<wire::FabricLeave>(event)) healer_.note_leave();
  const bool is_failure = std::holds_alternative<wire::GroupFailure>(event) ||
                          std::holds_alternative<LossReport>(event);
  if (is_failure) failure_heard_at_ = context_.system.now();
  const auto* loss = std::get_if<wire::LossReport>(&event);
  if (loss == nullptr) return;
  healer_.note_loss();
  if (!is_near(loss->rank) || loss->rank == self_) return;
  for (const Event& told : context_.state.events_told_by(loss->rank)) {
    spread(told, Scope::kOwnHost, kNoLink);
  }
}

void PlaneLoop::spread(const Event& event, Scope scope, uint64_t except_link) {
  for (const auto& link : links_) {
    const bool is_in_scope =
        scope == Scope::kEverywhere || link->crosses_hosts() == (scope == Scope::kOtherHosts);
    if (is_in_scope && link->id() != except_link) link->post(event);
  }
}

void PlaneLoop::judge_ends() {
  for (const End& end : std::exchange(ends_, {})) {
    const ControlLink* const link = find_link(end.link);
    if (link == nullptr) continue;
    const int peer = link->peer();
    const bool is_unheard = link->is_unheard();
    std::erase_if(links_, [&](const auto& one) { return one->id() == end.link; });
    if (end.is_own) report_closed_here();
    if (end.is_own || has_link(peer)) continue;
    if (is_unheard) {
      healer_.suspect(peer);
    } else {
      report_loss(peer, end.sign);
    }
  }
}

// Ends the connections of processes that ended more than kLastWordsTime ago. Such a connection is
// still open only because a forked child of the process holds it, so no more bytes are expected
// from it.
void PlaneLoop::bury_ended(TimePoint now) {
  for (auto process = ended_processes_.begin(); process != ended_processes_.end();) {
    if (now - process->second < kLastWordsTime) {
      ++process;
      continue;
    }
    const int rank = process->first;
    process = ended_processes_.erase(process);
    std::erase_if(links_, [rank](const auto& link) { return link->peer() == rank; });
    report_loss(rank, SignOfLoss::kProcessEnded);
  }
}

// Reports peers on other hosts from which no byte has come for the limit of silence. Each call adds
// at most two heartbeat intervals to the silence of a peer, so that the time during which this
// process was stopped does not count. Ranks of this host send no heartbeats.
void PlaneLoop::judge_silence(TimePoint now) {
  const Duration since = std::min<Duration>(now - silence_judged_at_, 2 * kStatusInterval);
  silence_judged_at_ = now;
  for (const auto& link : links_) {
    if (!link->crosses_hosts()) continue;
    link->silent_for += since;
    if (link->silent_for >= setup_.silence_limit) {
      ends_.push_back({link->id(), SignOfLoss::kSilence});
    }
  }
}

void PlaneLoop::report_loss(int rank, SignOfLoss sign) {
  if (receipts_by_) return;
  LossReport loss{rank, self_, sign, {}};
  if (is_near(rank) && setup_.last_activities) loss.last = setup_.last_activities(rank);
  loss.last.resize(std::min(loss.last.size(), wire::kMaxLastActivities));
  learn(loss, nullptr);
}

// Reports this rank itself as lost, because the program has closed its connections. The peers see
// the connections end and report the same.
void PlaneLoop::report_closed_here() {
  if (!receipts_by_) learn(LossReport{self_, self_, SignOfLoss::kConnectionEnded, {}}, nullptr);
}

void PlaneLoop::heal(bool is_ready) {
  EdgeHealer::Findings findings = healer_.advance(healer_view(), is_ready);
  for (Dialer::Outcome& connection : findings.connections) {
    add_link(connection.peer, std::move(connection.socket), true);
  }
  for (const EdgeHealer::Verdict& verdict : findings.verdicts) {
    report_loss(verdict.rank, verdict.sign);
    if (!verdict.is_of_host || is_near(verdict.rank)) continue;
    for (const int rank : layout_.ranks_of(layout_.host_of(verdict.rank))) {
      if (!has_link(rank)) report_loss(rank, verdict.sign);
    }
  }
}

bool PlaneLoop::is_periodic() const {
  return setup_.lost_ranks != nullptr ||
         std::ranges::any_of(links_, [](const auto& link) { return link->crosses_hosts(); });
}

void PlaneLoop::work_periodically(TimePoint now) {
  if (now - periodic_at_ < kStatusInterval) return;
  periodic_at_ = now;
  for (const auto& link : links_) {
    if (link->crosses_hosts()) link->beat();
  }
  if (setup_.lost_ranks != nullptr) ask_launcher();
}

// The connections of a rank whose host is frozen or cut off stay open until the limit of silence,
// which is longer than the launcher needs to notice the loss of the host.
void PlaneLoop::ask_launcher() {
  for (const int rank : setup_.lost_ranks()) {
    const bool is_far = rank >= 0 && rank < layout_.num_ranks() && !is_near(rank);
    if (is_far && !context_.state.is_lost(rank)) report_loss(rank, SignOfLoss::kNamedByLauncher);
  }
}

}  // namespace cadre
