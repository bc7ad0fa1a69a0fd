#include "cadre/core/comm/communicator_impl.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <set>
#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/hierarchical/hierarchical_engine.h"
#include "cadre/core/collective/host/host_engine.h"
#include "cadre/core/collective/net/net_engine.h"
#include "cadre/core/comm/abandoned_memory.h"
#include "cadre/core/comm/queue/thrown_error.h"
#include "cadre/core/comm/tuning.h"
#include "cadre/core/fabric/flight/process_start.h"
#include "cadre/core/os/host/wall_clock.h"
#include "cadre/core/os/keep_until_exit.h"
#include "cadre/core/store/prefix_store.h"
#include "cadre/core/transport/shm/shm_transport.h"

namespace cadre {
namespace {

// The time limit for operations to end after an abort, including the polls of peers that follow a
// failure.
constexpr Duration kAbortTime = std::chrono::seconds(5);
constexpr Duration kGoodbyeTime = std::chrono::seconds(1);

DeviceType device_type_of(const CommunicatorOptions& options) {
  return options.device_backend ? options.device_backend->device.type : DeviceType::kCpu;
}

}  // namespace

Result<GroupPieces> GroupPieces::cut(HostMemory& memory, const std::vector<int>& holders) {
  auto block = HostEngine::cut_block(memory, holders);
  if (!block.ok()) return block.error();
  auto page = ShmTransport::cut_page(memory, holders);
  if (page.ok()) return GroupPieces{std::move(block).value(), std::move(page).value()};
  block->drop_holders();
  return page.error();
}

void GroupPieces::keep_holders(const std::vector<int>& slots) {
  block.keep_holders(slots);
  message_page.keep_holders(slots);
}

void GroupPieces::discard() {
  block.drop_holders();
  message_page.drop_holders();
  *this = {};
}

GroupPlaces GroupPieces::places() const {
  return {block.place(), message_page.place()};
}

Communicator::Impl::Impl(std::shared_ptr<Fabric> fabric_in, const CommunicatorOptions& options_in,
                         GroupIdentity identity_in, GroupMembers members_in)
    : fabric(std::move(fabric_in)),
      system(fabric->system()),
      options(options_in),
      identity(std::move(identity_in)),
      members(std::move(members_in)),
      rank(members.self),
      world_size(static_cast<int>(members.ranks.size())),
      fork_guard(std::make_shared<const ForkGuard>(options.name, rank, own_address().pid,
                                                   fabric->fork_mark())),
      one_sided_access(std::make_shared<OneSidedAccess>(options.log)),
      recorder(make_recorder()),
      monitor(make_monitor()) {
  fabric->join_group();
  monitor->start();
}

std::unique_ptr<FlightRecorder> Communicator::Impl::make_recorder() const {
  const wire::RankAddress& own = own_address();
  const std::string& path = options.flight_record_path;
  FlightIdentity flight{options.name, own.host, rank,
                        world_size,   own.pid,  members.membership.round};
  if (!path.empty()) {
    flight.process_start = process_start_of(own.pid);
    flight.made_at_s = os::wall_clock_seconds();
  }
  flight.id = identity.id();
  auto made = FlightRecorder::create(path, flight);
  if (!made.ok()) {
    // If the file cannot be written, the job goes on and the record is kept in memory, as if no
    // folder were set.
    if (options.log) {
      options.log->write(LogLevel::kWarning, "comm",
                         format("flight_record=none reason=\"{}\": cadre trace will not show this "
                                "rank; free space in the folder or choose another one",
                                made.error().message()));
    }
    made = FlightRecorder::create("", flight);
  }
  std::unique_ptr<FlightRecorder> result = std::move(made).value_or_throw();
  result->set_connection(identity.key());
  return result;
}

std::shared_ptr<Monitor> Communicator::Impl::make_monitor() const {
  std::vector<int> slots;
  for (const int member : members.ranks) slots.push_back(fabric->status_slot_of(member));
  return std::make_shared<Monitor>(
      system,
      MonitorSetup{Roster{options.name, rank, fabric->shared_layout(), members.ranks},
                   identity.key(), members.creation ? members.creation->key() : kNoGroup,
                   world_size > 1 ? fabric->plane() : nullptr, std::move(slots),
                   [fabric = fabric.get(), system = &system, key = identity.key()] {
                     return fabric->status_cells().running_besides(key, system->now());
                   },
                   [links = fabric->shared_links(), identity = identity](int left) {
                     if (links == nullptr) return;
                     links->note_left(identity.stream(kCollectivePurpose), left);
                     links->note_left(identity.stream(kMessagePurpose), left);
                   },
                   [access = one_sided_access](const Error& failure) { access->end(failure); },
                   fabric->late_errors(),
                   recorder->has_file() ? options.flight_record_path : std::string(), options.log},
      fabric->status_page(), fabric->status_cells().take(identity.key(), options.name));
}

bool Communicator::Impl::spans_hosts() const {
  const Layout& layout = fabric->layout();
  return std::ranges::any_of(members.ranks, [&](int member) {
    return layout.host_of(member) != layout.host_of(members.ranks.front());
  });
}

std::vector<Rank> Communicator::Impl::local_ranks() const {
  const Layout& layout = fabric->layout();
  std::vector<Rank> ranks;
  for (int member = 0; member < world_size; ++member) {
    const int of_fabric = members.ranks[static_cast<size_t>(member)];
    if (layout.host_of(of_fabric) == layout.host_of(fabric->rank())) ranks.emplace_back(member);
  }
  return ranks;
}

std::vector<int> Communicator::Impl::local_slots() const {
  std::vector<int> ranks;
  for (const Rank local : local_ranks()) {
    ranks.push_back(members.ranks[static_cast<size_t>(local.value)]);
  }
  return fabric->slots_of(ranks);
}

bool Communicator::Impl::uses_host_memory() const {
  if (world_size == 1) return false;
  if (options.backend) {
    if (options.transport != TransportChoice::kSharedMemory) return false;
    throw Error(ErrorCode::kInvalidArgument,
                "the options ask for shared memory and for a backend of the program, but only "
                "the host engine uses it: choose kAuto or kTcp, or no backend");
  }
  const bool can_share = fabric->host_memory() != nullptr;
  if (options.transport == TransportChoice::kSharedMemory && (spans_hosts() || !can_share)) {
    throw Error(ErrorCode::kInvalidArgument,
                format("the options ask for shared memory, but {}: choose kAuto or kTcp",
                       spans_hosts() ? "the ranks are on several hosts" : fabric->obstacle()));
  }
  return can_share && options.transport != TransportChoice::kTcp && local_ranks().size() > 1;
}

// Returns whether the engine combines a host engine on each host with a net engine between them.
// Equal on all members, also if some of the hosts share no memory.
bool Communicator::Impl::is_hierarchical() const {
  if (options.transport != TransportChoice::kAuto || !spans_hosts()) return false;
  std::set<int> hosts;
  for (const int member : members.ranks) hosts.insert(fabric->layout().host_of(member));
  return hosts.size() < members.ranks.size();
}

void Communicator::Impl::open_first(Deadline deadline) {
  try {
    if (!uses_host_memory()) return open(std::nullopt, {}, deadline);
    GroupPieces pieces = GroupPieces::cut(*fabric->host_memory(), local_slots()).value_or_throw();
    const auto check = [this]() -> Status {
      return monitor->has_failed() ? Status(monitor->error()) : Status();
    };
    const auto local = fabric->exchange_places(pieces.places(), check, deadline).value_or_throw();
    std::vector<GroupPlaces> places(static_cast<size_t>(world_size));
    const std::vector<Rank> ranks = local_ranks();
    for (size_t i = 0; i < ranks.size(); ++i) {
      places[static_cast<size_t>(ranks[i].value)] = local[i];
    }
    open(std::move(pieces), places, deadline);
  } catch (const std::exception& thrown) {
    give_up(thrown, "connecting");
    throw;
  }
}

Rank Communicator::Impl::culprit_of(const Error& error) const {
  const Rank named = error.details().culprit.value_or(rank);
  return named >= 0 && named < world_size ? named : rank;
}

void Communicator::Impl::give_up(const std::exception& thrown, std::string_view task) {
  const Error error = error_of(thrown);
  monitor->fail({.code = error.code(),
                 .culprit = culprit_of(error).value,
                 .cause = format("{} gave up {}: {}", monitor->roster().describe(rank.value), task,
                                 error.message()),
                 .is_logged = false});
}

void Communicator::Impl::open(std::optional<GroupPieces> pieces,
                              const std::vector<GroupPlaces>& places, Deadline deadline) {
  const bool has_memory = pieces.has_value() && !spans_hosts();
  std::unique_ptr<HostEngine> local;
  if (pieces) {
    // The holds of this rank are those of the objects that are made of them.
    try {
      local = make_host_engine(std::move(pieces->block), places);
    } catch (...) {
      release_blocks(places);
      release_pages(places);
      throw;
    }
    if (!has_memory) release_pages(places);
  }
  if (has_memory) {
    engines.set_host(std::move(local));
    open_message_pages(std::move(pieces->message_page), places);
  } else if (world_size > 1 && fabric->links() != nullptr) {
    open_streams(std::move(local));
  }
  if (options.backend) engines.set_host(build_engine(options.backend, {}, deadline));
  if (options.device_backend) build_device_engine(*options.device_backend, deadline);
  if (rank == 0 && options.log) log_start();
  signal_waits = std::make_shared<SignalWaits>(
      SignalWaits::Parts{system, *monitor, *recorder, fabric->is_crowded()});
  heap = std::make_unique<SymmetricHeap>(SymmetricHeap::Parts{
      system, rank, world_size, engines.host(), has_memory ? fabric->host_memory() : nullptr,
      has_memory ? fabric->slots_of(members.ranks) : std::vector<int>(), signal_waits, fork_guard,
      one_sided_access});
  runner = std::make_unique<CollectiveRunner>(
      CollectiveRunner::Parts{system, *monitor, *recorder, engines, heap.get(), options.timeout});
  if (message_transport != nullptr) {
    messages = std::make_shared<MessageQueue>(MessageQueue::Parts{
        system, *monitor, *recorder, *message_transport, options.timeout, fork_guard, options.log});
  }
  queue = std::make_shared<OperationQueue>(system, *runner, fork_guard, options.log);
}

// Returns "host", or "host+nccl" if there is an engine for the device, too.
std::string Communicator::Impl::engine_names() const {
  const std::string host(engines.host_capabilities().name);
  const std::optional<Device> device = engines.device();
  return device ? format("{}+{}", host, engines.capabilities_for(device->type).name) : host;
}

std::string_view Communicator::Impl::transport_name() const {
  if (engines.host() == nullptr) return "none";
  if (options.backend) return "backend";
  if (engines.host_capabilities().shares_memory) return "shared_memory";
  return is_hierarchical() ? "shared_memory+tcp" : "tcp";
}

// Logs one line with the connected group and the transport and algorithm of each size.
void Communicator::Impl::log_start() const {
  const wire::RankAddress& own = own_address();
  std::set<int> hosts;
  for (const int member : members.ranks) hosts.insert(fabric->layout().host_of(member));
  const std::optional<Device> device = engines.device();
  const std::string on_device = device ? format(" device={}", to_string(*device)) : "";
  options.log->write(
      LogLevel::kInfo, "comm",
      format("connected group={} round={} world_size={} hosts={} host={} pid={} engine={}{} "
             "transport={} timeout_s={} version={} algorithms=\"{}\"",
             options.name, members.membership.round, world_size, hosts.size(), own.host, own.pid,
             engine_names(), on_device, transport_name(), options.timeout.count() / 1'000'000'000,
             CADRE_VERSION, engines.host_capabilities().algorithms));
}

std::unique_ptr<HostEngine> Communicator::Impl::make_host_engine(
    Piece block, const std::vector<GroupPlaces>& places) const {
  const std::vector<Rank> ranks = local_ranks();
  std::vector<Place> blocks;
  for (const Rank local : ranks) blocks.push_back(places[static_cast<size_t>(local.value)].block);
  const auto own = static_cast<int>(std::ranges::find(ranks, rank) - ranks.begin());
  return std::make_unique<HostEngine>(system, monitor->interrupt(),
                                      HostEngineSetup{.memory = fabric->host_memory(),
                                                      .rank = own,
                                                      .oversubscribed = fabric->is_crowded(),
                                                      .slots = local_slots(),
                                                      .blocks = std::move(blocks),
                                                      .block = std::move(block),
                                                      .group_ranks = ranks});
}

// REQUIRES: all members are on this host.
void Communicator::Impl::open_message_pages(Piece page, const std::vector<GroupPlaces>& places) {
  std::vector<Place> pages;
  for (const GroupPlaces& theirs : places) pages.push_back(theirs.message_page);
  try {
    message_transport =
        std::make_unique<ShmTransport>(system, monitor->interrupt(),
                                       ShmTransportSetup{.memory = fabric->host_memory(),
                                                         .rank = rank,
                                                         .crowded = fabric->is_crowded(),
                                                         .slots = local_slots(),
                                                         .pages = std::move(pages),
                                                         .page = std::move(page)});
  } catch (...) {
    release_pages(places);
    throw;
  }
}

// Releases this rank's holds on the blocks of other members on this host.
void Communicator::Impl::release_blocks(const std::vector<GroupPlaces>& places) const {
  const std::vector<Rank> ranks = local_ranks();
  const std::vector<int> slots = local_slots();
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] == rank) continue;
    fabric->host_memory()->release_hold(slots[i],
                                        places[static_cast<size_t>(ranks[i].value)].block.piece);
  }
}

// Releases this rank's holds on the message pages of other members on this host.
void Communicator::Impl::release_pages(const std::vector<GroupPlaces>& places) const {
  const std::vector<Rank> ranks = local_ranks();
  const std::vector<int> slots = local_slots();
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] == rank) continue;
    fabric->host_memory()->release_hold(
        slots[i], places[static_cast<size_t>(ranks[i].value)].message_page.piece);
  }
}

void Communicator::Impl::open_streams(std::unique_ptr<HostEngine> local) {
  const auto stream = [this](uint8_t purpose) {
    return fabric->links()->open(identity.stream(purpose), members.ranks, rank,
                                 monitor->interrupt());
  };
  message_transport = stream(kMessagePurpose);
  if (!options.backend) {
    transport = stream(kCollectivePurpose);
    engines.set_host(make_net_engine(std::move(local)));
  }
  // Members may have left before the streams were opened, so note_left() is repeated for them.
  const std::vector<PeerView> views = monitor->peers();
  for (size_t i = 0; i < views.size(); ++i) {
    if (views[i].left_after) monitor->note_left(members.ranks[i]);
  }
}

// Makes the engine of the members over TCP; `local` is that of the members on this host, if any.
std::unique_ptr<Backend> Communicator::Impl::make_net_engine(std::unique_ptr<HostEngine> local) {
  const CrossoverTable table = tuned_table(options.tuning).value_or_throw();
  if (!is_hierarchical()) return std::make_unique<NetEngine>(system, *transport, table);
  std::vector<int> hosts;
  for (const int member : members.ranks) hosts.push_back(fabric->layout().host_of(member));
  return std::make_unique<HierarchicalEngine>(
      system, *transport,
      HierarchicalEngineSetup{
          .host_of_rank = std::move(hosts), .local = std::move(local), .table = table});
}

void Communicator::Impl::build_device_engine(const DeviceBackend& chosen, Deadline deadline) {
  if (chosen.device.type == DeviceType::kCpu || !chosen.make) {
    throw Error(ErrorCode::kInvalidArgument,
                format("the options have {} as their device_backend: pass a device and a factory, "
                       "and choose the engine for memory of the CPU by `backend`",
                       chosen.make ? "the CPU" : "no factory"));
  }
  engines.set_device(chosen.device, build_engine(chosen.make, chosen.device, deadline));
}

std::unique_ptr<Backend> Communicator::Impl::build_engine(const BackendFactory& factory,
                                                          const Device& device,
                                                          Deadline deadline) const {
  const std::shared_ptr<Store>& store = members.membership.store;
  // The keys of the two engines of a group are apart.
  const std::string prefix =
      format("cadre/backend/{}/{}", to_string(device.type), identity.unique_name());
  return factory(
             {.rank = rank,
              .world_size = world_size,
              .device = device,
              .host = engines.host(),
              .group = options.name,
              .store = store == nullptr ? nullptr : std::make_shared<PrefixStore>(prefix, store),
              .interrupt = monitor->interrupt(),
              .system = system,
              .deadline = deadline,
              .log = options.log.get()})
      .value_or_throw();
}

Communicator::Impl::~Impl() {
  // Each step is run again, because an exception may have ended end() early: no thread may outlive
  // the objects that it uses.
  attempt([this] { end(); });
  if (queue == nullptr) return;
  attempt([this] { stop_threads(); });
  attempt([this] { release(system.deadline_in(kGoodbyeTime)); });
  attempt([this] {
    if (runner->has_abandoned()) leave_engines_to_process();
  });
}

// Runs one step of the destructor, which must not throw. A lack of memory or threads is logged.
void Communicator::Impl::attempt(const std::function<void()>& step) const noexcept {
  try {
    step();
  } catch (const std::exception& thrown) {
    try {
      if (options.log == nullptr) return;
      options.log->write(LogLevel::kError, "comm",
                         format("group={} ended only in part: {}", options.name, thrown.what()));
    } catch (...) {
      // There is not enough memory for the log line either.
    }
  } catch (...) {
    // A plug-in engine has thrown an object that is no std::exception.
  }
}

// Ends the group without waiting for other ranks: pending operations are aborted. If an exception
// unwinds the stack, that exception reports the cause, and this failure is not logged.
void Communicator::Impl::end() {
  if (!is_closed_ && has_pending()) {
    const bool is_unwinding = std::uncaught_exceptions() > num_exceptions_;
    monitor->fail({.code = ErrorCode::kAborted,
                   .cause = is_unwinding
                                ? "an exception ended the group's scope while operations were "
                                  "pending: that exception is the first failure"
                                : "the group was destroyed while operations were pending; close() "
                                  "it first",
                   .is_logged = !is_unwinding});
  }
  if (queue == nullptr) {  // the group was not opened
    monitor->stop();
    release(system.deadline_in(kGoodbyeTime));
    return;
  }
  static_cast<void>(close(system.deadline_in(kGoodbyeTime)));
}

bool Communicator::Impl::is_on_own_thread() const {
  return (queue != nullptr && queue->is_on_this_thread()) ||
         (messages != nullptr && messages->is_on_this_thread());
}

bool Communicator::Impl::awaits_other() const {
  return (queue != nullptr && queue->awaits_other()) ||
         (messages != nullptr && messages->awaits_other());
}

// Keeps the engines until the process ends. The library behind one of them still works on the
// memory of operations, and one of its threads may read the Interrupt. The engine's destructor
// would wait for the library, which may wait indefinitely for a lost rank.
void Communicator::Impl::leave_engines_to_process() {
  if (options.log) {
    options.log->write(LogLevel::kWarning, "comm",
                       format("engine={} group={} left=unfinished: operations that it cannot abort "
                              "keep their memory until this process ends; end it",
                              engine_names(), options.name));
  }
  os::keep_until_exit(std::pair(monitor, std::move(engines)));  // the monitor owns the Interrupt
}

void Communicator::Impl::abort(const std::string& reason) {
  monitor->fail({ErrorCode::kAborted, -1, format("abort() was called: {}", reason), {}});
}

bool Communicator::Impl::close(Deadline deadline) {
  if (is_closed_.exchange(true)) return false;
  const Error refusal = monitor->has_failed() ? monitor->error() : closed_error("");
  queue->refuse(refusal);
  signal_waits->refuse(refusal);
  if (messages != nullptr) messages->refuse(refusal);
  // Callbacks that still run do not count as pending operations: stop_threads() waits for them.
  if (!drain(deadline) && has_pending()) {
    monitor->fail({ErrorCode::kAborted,
                   -1,
                   "close() reached its deadline while operations were pending",
                   {}});
    drain(system.deadline_in(kAbortTime));
  }
  monitor->publish_leave(queue->num_issued(), system.deadline_in(kAbortTime));
  stop_threads();
  // An aborted operation that still runs in the thread of another caller uses the engines. While
  // there is one, the engines are not destroyed before the group.
  if (is_idle()) release(deadline.earlier(system.deadline_in(kGoodbyeTime)));
  return true;
}

Error Communicator::Impl::closed_error(std::string_view call) const {
  ErrorDetails details;
  details.operation = call;
  details.group = options.name;
  const int of_world = members.ranks[static_cast<size_t>(rank.value)];
  const std::string world_rank = rank == of_world ? "" : format(" (world rank {})", of_world);
  return Error(ErrorCode::kInvalidArgument,
               format("{}group \"{}\", rank {}{}: the group is closed; connect a new one",
                      call.empty() ? "" : format("{} on ", call), options.name, rank, world_rank))
      .with_details(std::move(details));
}

void Communicator::Impl::check_open(std::string_view call) const {
  if (is_closed_ && !monitor->has_failed()) throw closed_error(call);
}

void Communicator::Impl::stop_threads() {
  queue->close();
  runner->stop();
  signal_waits->close();
  if (messages != nullptr) messages->close();
  monitor->stop();
}

bool Communicator::Impl::has_pending() const {
  return queue != nullptr && (queue->has_pending() || !signal_waits->is_idle() ||
                              (messages != nullptr && messages->has_pending()));
}

bool Communicator::Impl::is_idle() const {
  return queue->is_idle() && signal_waits->is_idle() &&
         (messages == nullptr || messages->is_idle());
}

bool Communicator::Impl::drain(Deadline deadline) {
  const bool is_drained = queue->drain(deadline) && signal_waits->drain(deadline);
  return (messages == nullptr || messages->drain(deadline)) && is_drained;
}

// Frees the memory of the group now, and not only when the last handle to the group is destroyed.
// The last group of the process also leaves the fabric.
void Communicator::Impl::release(Deadline deadline) {
  if (std::exchange(is_released_, true)) return;
  heap.reset();
  if (runner == nullptr || !runner->has_abandoned()) engines.clear();
  message_transport.reset();
  transport.reset();
  monitor->release_page();
  recorder->set_closed();
  if (recorder->has_file()) {
    fabric->flight_files().release(options.flight_record_path, monitor->has_failed());
  }
  fabric->leave_group(deadline);
}

Communicator::Impl& CommunicatorParts::impl_of(const Communicator& group) {
  return group.impl_->checked();
}

bool CommunicatorParts::must_end_elsewhere(const Communicator& group) {
  return !group.impl_->fork_guard->is_in_child() && ProgressQueue::is_any_on_this_thread();
}

std::weak_ptr<const void> CommunicatorParts::life_of(const Communicator& group) {
  return impl_of(group).one_sided_access;
}

bool may_use_memory_after_return(const Communicator& group, DeviceType type) {
  const Capabilities& can = CommunicatorParts::impl_of(group).engines.capabilities_for(type);
  return !can.is_abortable || can.is_stream_ordered;
}

FabricSettings fabric_settings(const Membership& membership, const CommunicatorOptions& options) {
  return {.connection = connection_name(membership.group, id_of(options)),
          .listen_host = options.listen_host,
          .device = device_type_of(options),
          .flight_record_path = options.flight_record_path,
          .silence_limit = options.silence_limit,
          .log = options.log,
          .settings = [options] { return tuning_to_give(options); }};
}

}  // namespace cadre
