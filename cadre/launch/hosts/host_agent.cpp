#include "cadre/launch/hosts/host_agent.h"

#include <algorithm>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/store/tcp/greeting.h"

namespace cadre::launch {
namespace {

// The time in which the last messages of an agent that ends are sent.
constexpr Duration kFlushTime = std::chrono::seconds(1);
// The longest time between two looks of the thread at its state.
constexpr Duration kTick = std::chrono::seconds(1);

uint64_t random_seed(os::System& system) {
  uint64_t seed = 0;
  system.random_bytes(std::as_writable_bytes(std::span(&seed, 1)));
  return seed;
}

LinkIdentity identity_of(const HostAgentOptions& options) {
  return {.rank = 0,
          .round = 0,
          .group = "job " + options.agent.job,
          .version = std::string(store::this_build()),
          .job_token = options.token};
}

RegistryWatch::Wish wish_of(const Agent& agent, const AgentOptions& options) {
  using Kind = RegistryWatch::Wish::Kind;
  const Table& table = agent.table();
  Claim own{.agent = options.self.id, .address = options.self.address};
  if (agent.is_coordinator()) {
    own.epoch = table.epoch;
    own.round = agent.is_beginning() ? 0 : table.round;
    return {.kind = Kind::kClaim, .own = std::move(own)};
  }
  if (!agent.is_looking()) return {};
  // An agent that knows a round of the job becomes coordinator by the line of succession only.
  if (table.round > 0) return {.kind = Kind::kFind};
  return {.kind = Kind::kClaim, .own = std::move(own)};
}

}  // namespace

os::Address address_of_agent(std::string_view address) {
  auto parsed = os::Address::parse(cadre::format("tcp:{}", address));
  return parsed.ok() ? *std::move(parsed) : os::Address{};
}

HostAgent::HostAgent(os::System& system, HostAgentOptions options, LogSink& log)
    : system_(system),
      options_(options.agent),
      token_(options.token),
      log_(log),
      wake_up_(system.make_event()),
      has_orders_(system.make_event()),
      agent_(options.agent, random_seed(system)),
      links_(system,
             {.identity = identity_of(options),
              .listeners = std::move(options.listeners),
              .num_agents = options.agent.max_hosts},
             *wake_up_, log) {
  if (options.registry != nullptr) {
    watch_ = std::make_unique<RegistryWatch>(
        system_,
        RegistryWatch::Options{.agent = options_.self.id,
                               .name = std::move(options.registry_name),
                               .registry = std::move(options.registry),
                               .first_wish = wish_of(agent_, options_),
                               .interval = std::min(options_.beat_interval, kTick)},
        *wake_up_, log_);
  }
  thread_ = system_.spawn("cadre-agent", [this] { run(); });
}

HostAgent::~HostAgent() {
  {
    std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_up_->notify();
  thread_->join();
}

std::vector<HostOrder> HostAgent::take_orders() {
  std::lock_guard lock(mutex_);
  has_orders_->clear();
  return std::exchange(orders_, {});
}

void HostAgent::workers_ended(Outcome outcome, std::string reason) {
  tell({.outcome = outcome, .reason = std::move(reason)});
}

void HostAgent::leave() {
  tell({.is_leaving = true});
}

void HostAgent::tell(Report report) {
  {
    std::lock_guard lock(mutex_);
    reports_.push_back(std::move(report));
  }
  wake_up_->notify();
}

void HostAgent::order(HostOrder order) {
  std::lock_guard lock(mutex_);
  orders_.push_back(std::move(order));
  has_orders_->notify();
}

void HostAgent::run() {
  const auto is_stopping = [this] {
    std::lock_guard lock(mutex_);
    return is_stopping_;
  };
  agent_.start(system_.now());
  perform();
  hear_registry();
  while (!agent_.has_ended() && !is_stopping()) {
    const Deadline due =
        links_.next_deadline(system_.deadline_in(kTick).earlier(Deadline(agent_.next_timer())));
    std::vector<os::PollItem> items = {{.target = wake_up_.get(), .want_read = true}};
    links_.add_interests(items);
    system_.poll(items, due);
    wake_up_->clear();
    hear_registry();  // It comes first, because an own claim may have expired.
    hear_reports();
    hear_links();
    const TimePoint now = system_.now();
    if (!agent_.has_ended() && now >= agent_.next_timer()) agent_.timer(now);
    perform();
    hear_registry();
  }
  if (watch_ != nullptr) watch_->wish({});
  links_.flush(system_.deadline_in(kFlushTime));
}

void HostAgent::hear_reports() {
  std::vector<Report> reports;
  {
    std::lock_guard lock(mutex_);
    reports.swap(reports_);
  }
  for (const Report& report : reports) {
    if (report.is_leaving) {
      agent_.leave(system_.now());
    } else {
      agent_.workers_ended(system_.now(), report.outcome, report.reason);
    }
    perform();
  }
}

void HostAgent::hear_registry() {
  if (watch_ == nullptr || agent_.has_ended()) return;
  watch_->wish(wish_of(agent_, options_));
  const TimePoint now = system_.now();
  if (auto endpoint = watch_->answer(now)) agent_.set_endpoint(now, *std::move(endpoint));
  perform();
}

void HostAgent::hear_links() {
  using Kind = AgentLinks::Event::Kind;
  for (const AgentLinks::Event& event : links_.advance()) {
    const TimePoint now = system_.now();
    switch (event.kind) {
      case Kind::kConnected:
        agent_.connected(now, event.connection);
        break;
      case Kind::kFailed:
        agent_.connect_failed(now, event.connection, event.is_refused);
        break;
      case Kind::kAccepted:
        agent_.accepted(now, event.connection);
        break;
      case Kind::kLost:
        agent_.connection_lost(now, event.connection);
        break;
      case Kind::kReceived:
        // A round starts in the event of the table that says so, so this is the port of its store.
        remote_store_port_ = event.message.store_port;
        agent_.received(now, event.connection, event.message);
        break;
    }
    perform();
  }
}

void HostAgent::perform() {
  while (true) {
    std::vector<AgentAction> actions = agent_.take_actions();
    if (actions.empty()) return name_lost_ranks();
    for (AgentAction& action : actions) perform(std::move(action));
  }
}

// While a round ends, more of its hosts may be lost.
void HostAgent::name_lost_ranks() {
  const Table& table = agent_.table();
  if (table.phase != Phase::kDraining || table.round != table_at_start_.round) return;
  std::vector<RankRange> lost = lost_ranks();
  if (lost == named_) return;
  named_ = lost;
  order({.kind = HostOrder::Kind::kNameLost, .lost_ranks = std::move(lost)});
}

void HostAgent::perform(AgentAction action) {
  using Kind = AgentAction::Kind;
  switch (action.kind) {
    case Kind::kConnect:
      links_.connect(action.connection, action.text, system_.deadline_in(options_.silence));
      break;
    case Kind::kSend: {
      const Table* table = action.message.table.get();
      const bool is_own =
          action.message.kind == MessageKind::kTable && table->coordinator == options_.self.id;
      const bool has_store =
          is_own && (table->phase == Phase::kStarting || table->phase == Phase::kRunning);
      if (has_store) action.message.store_port = store_port(table->round);
      links_.send(action.connection, action.message);
      break;
    }
    case Kind::kClose:
      links_.close(action.connection);
      break;
    case Kind::kStartWorkers:
      start_workers(action);
      break;
    case Kind::kStopWorkers:
      order({.kind = HostOrder::Kind::kStop, .is_for_newcomers = has_round_ended_for_newcomers()});
      break;
    case Kind::kKillWorkers:
      order({.kind = HostOrder::Kind::kKill, .by = action.by});
      break;
    case Kind::kLog:
      order({.kind = HostOrder::Kind::kSay, .text = std::move(action.text)});
      break;
    case Kind::kEnd:
      order({.kind = HostOrder::Kind::kEnd,
             .text = std::move(action.text),
             .exit_code = action.exit_code});
      break;
  }
}

// Returns whether the present round ends because hosts have joined: no host was lost, no worker has
// failed, and there is a place for a spare host. More hosts than places are no reason. A host that
// is proven to have ended is not in the table any more.
bool HostAgent::has_round_ended_for_newcomers() const {
  const Table& table = agent_.table();
  const size_t num_hosts = table.num_in(HostState::kIn);
  return table.num_in(HostState::kSpare) > 0 &&
         num_hosts == table_at_start_.num_in(HostState::kIn) && num_hosts < options_.max_hosts &&
         table.restarts_used == table_at_start_.restarts_used;
}

// Returns the ranks of the hosts that had a place when the round started and have none any more, in
// ascending order.
std::vector<RankRange> HostAgent::lost_ranks() const {
  std::vector<RankRange> lost;
  for (const Host& host : table_at_start_.hosts) {
    const Host* const present = agent_.table().find(host.id);
    if (present != nullptr && present->state == HostState::kIn) continue;
    const auto ranks = ranks_of(table_at_start_, host.id);
    if (!ranks) continue;
    const int first = static_cast<int>(ranks->first_rank);
    lost.push_back({first, first + static_cast<int>(ranks->local_world_size) - 1});
  }
  std::ranges::sort(lost, {}, &RankRange::first);
  return lost;
}

void HostAgent::start_workers(const AgentAction& action) {
  table_at_start_ = agent_.table();
  named_.clear();
  const bool is_own = action.text == options_.self.address;
  order({.kind = HostOrder::Kind::kStart,
         .round = action.round,
         .num_restarts = agent_.table().restarts_used,
         .job_id = agent_.table().first_coordinator,
         .ranks = action.ranks,
         .store_host = address_of_agent(action.text).host,
         .store_port = is_own ? store_port(action.round) : remote_store_port_});
}

// Each round has a store of its own, so that it contains no keys of an earlier round.
uint16_t HostAgent::store_port(uint64_t round) {
  if (store_round_ == round) return store_ == nullptr ? 0 : store_->address().port;
  store_.reset();
  store_round_ = round;
  TcpStoreServerOptions options{.token = token_, .c10d_hosts = links_.peer_hosts(), .log = &log_};
  options.address.host = address_of_agent(options_.self.address).host;
  auto store = TcpStoreServer::start(system_, options);
  if (!store.ok()) {
    order({.text = cadre::format("the store of round {}: {}", round, store.error().message())});
    return 0;
  }
  store_ = *std::move(store);
  return store_->address().port;
}

}  // namespace cadre::launch
