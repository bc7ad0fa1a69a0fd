#include "cadre/comm/communicator_impl.h"

#include <algorithm>
#include <exception>
#include <set>
#include <string_view>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/collective/host/host_engine.h"
#include "cadre/collective/net/net_engine.h"
#include "cadre/comm/trace/process_start.h"
#include "cadre/os/host/wall_clock.h"
#include "cadre/os/process_watcher.h"
#include "cadre/transport/shm/shm_transport.h"
#include "cadre/transport/tcp/tcp_transport.h"

namespace cadre {
namespace {

// Of the rings between two ranks of a host, for send and recv.
constexpr size_t kMessageRingBytes = 64 << 10;
// After an abort every operation ends within the questions that follow a failure.
constexpr Duration kAbortTime = std::chrono::seconds(5);
constexpr Duration kGoodbyeTime = std::chrono::seconds(1);

Membership membership_of(const Membership& membership, const std::string& group) {
  Membership own = membership;
  own.group = group;
  return own;
}

wire::RankCard card_of_this_process(os::System& system) {
  const os::HostInfo host = system.host();
  wire::RankCard card;
  card.host = host.name;
  card.boot_id = host.boot_id;
  card.pid = host.pid;
  return card;
}

}  // namespace

Communicator::Impl::Impl(os::System& system_in, const Membership& membership_in,
                         const CommunicatorOptions& options_in, Deadline deadline)
    : system(system_in),
      options(options_in),
      id(options.id.empty() ? options.name : options.id),
      membership(membership_of(membership_in, id)),
      rank(membership.rank),
      world_size(membership.world_size),
      home(std::make_shared<const HomeProcess>(options.name, rank, system_in.host().pid)),
      interrupt(system_in) {
  const wire::RankCard own = card_of_this_process(system);
  recorder = make_recorder(own);
  if (world_size > 1) {
    connect(deadline);
  } else {
    Mesh alone;
    alone.cards = {own};
    system.random_bytes(std::as_writable_bytes(std::span(&alone.cards.front().probe, 1)));
    alone.control.resize(1);
    start_monitor(alone);
  }
  Backend* backend = host_engine != nullptr ? host_engine.get() : net_engine.get();
  if (backend != nullptr) backend_name = backend->capabilities().name;
  if (rank == 0 && options.log) log_start(membership.round, own, backend);
  if (host_engine != nullptr) {
    heap = std::make_unique<SymmetricHeap>(system, interrupt, *host, host_engine, home);
  }
  runner = std::make_unique<CollectiveRunner>(
      CollectiveRunner::Parts{system, *monitor, *recorder, backend, heap.get(), options.timeout});
  if (message_transport != nullptr) {
    messages = std::make_shared<MessageQueue>(MessageQueue::Parts{
        system, *monitor, *recorder, *message_transport, options.timeout, home});
  }
  queue = std::make_shared<OperationQueue>(system, *runner, home);
}

std::unique_ptr<FlightRecorder> Communicator::Impl::make_recorder(const wire::RankCard& own) const {
  const std::string& path = options.flight_record_path;
  FlightIdentity identity{options.name, own.host, rank, world_size, own.pid, membership.round};
  if (!path.empty()) {
    identity.process_start = process_start_of(own.pid);
    identity.made_at_s = os::wall_clock_seconds();
  }
  identity.id = id;
  auto made = FlightRecorder::create(path, identity);
  if (!made.ok()) {
    // A job is worth more than its record, which then lies in memory as it does without a folder.
    if (options.log) {
      options.log->write(LogLevel::kWarning, "comm",
                         format("flight_record=none reason=\"{}\": cadre trace will not have this "
                                "rank; make room there or name another folder",
                                made.error().message()));
    }
    made = FlightRecorder::create("", identity);
  }
  return std::move(made).value_or_throw();
}

// One line that says what was connected, and by what every size travels.
void Communicator::Impl::log_start(uint64_t round, const wire::RankCard& own,
                                   const Backend* backend) const {
  const Capabilities engine = backend == nullptr ? Capabilities{} : backend->capabilities();
  options.log->write(
      LogLevel::kInfo, "comm",
      format("connected group={} round={} world_size={} hosts={} host={} pid={} engine={} "
             "transport={} timeout_s={} version={} algorithms=\"{}\"",
             options.name, round, world_size, num_hosts_, own.host, own.pid, backend_name,
             backend == nullptr     ? "none"
             : engine.shares_memory ? "shared_memory"
                                    : "tcp",
             options.timeout.count() / 1'000'000'000, CADRE_VERSION, engine.algorithms));
}

void Communicator::Impl::connect(Deadline deadline) {
  const MeshOptions mesh_options{id, options.listen_host, CADRE_VERSION, options.transport};
  Mesh mesh = connect_mesh(system, membership, mesh_options, deadline).value_or_throw();
  host = std::move(mesh.host);
  std::set<std::string_view> boot_ids;
  for (const wire::RankCard& card : mesh.cards) boot_ids.insert(card.boot_id);
  num_hosts_ = static_cast<int>(boot_ids.size());
  if (mesh.uses_shared_memory) {
    build_host_engine(mesh, deadline);
  } else {
    build_net_engine(mesh);
  }
  start_monitor(mesh);
}

void Communicator::Impl::build_host_engine(const Mesh& mesh, Deadline deadline) {
  auto arena = host->share_segment(system, HostEngine::arena_bytes(world_size), nullptr, deadline)
                   .value_or_throw();
  auto rings =
      host->share_segment(system, ShmTransport::segment_bytes(world_size, kMessageRingBytes),
                          nullptr, deadline)
          .value_or_throw();
  host_engine = std::make_shared<HostEngine>(system, interrupt, std::move(arena),
                                             HostEngineOptions{rank, world_size, mesh.is_crowded});
  message_transport = std::make_unique<ShmTransport>(
      system, interrupt, ShmTransportOptions{rank, world_size, mesh.is_crowded}, std::move(rings));
}

void Communicator::Impl::build_net_engine(Mesh& mesh) {
  const TcpTransportOptions transport_options{rank, mesh.is_crowded};
  transport = std::make_unique<TcpTransport>(system, interrupt, transport_options,
                                             std::move(mesh.collective));
  message_transport = std::make_unique<TcpTransport>(system, interrupt, transport_options,
                                                     std::move(mesh.point_to_point));
  net_engine = std::make_unique<NetEngine>(system, *transport);
}

void Communicator::Impl::start_monitor(Mesh& mesh) {
  // A number that all ranks of this connection have, and no other connection has.
  recorder->set_connection(mesh.cards.front().probe);
  std::vector<int> slots(static_cast<size_t>(world_size), -1);
  StatusPage page;
  if (host && host->shares_memory()) {
    page = host->status_page();
    for (int i = 0; i < world_size; ++i) slots[static_cast<size_t>(i)] = host->slot_of(i);
  }
  auto processes = watch_processes(page, slots, mesh.cards);
  monitor = std::make_unique<Monitor>(
      system, interrupt,
      MonitorSetup{{options.name, rank, std::move(mesh.cards)},
                   page,
                   std::move(slots),
                   std::move(mesh.control),
                   std::move(processes),
                   recorder->has_file() ? options.flight_record_path : std::string(),
                   options.log ? *options.log : null_log_sink(),
                   options.silence_limit});
}

// Of the peers in the same PID namespace. Where the kernel or a container forbids it (pidfd_open:
// ENOSYS, EPERM) the end of a peer shows as the end of its control connection, as between hosts.
std::vector<std::unique_ptr<os::Pollable>> Communicator::Impl::watch_processes(
    const StatusPage& page, const std::vector<int>& slots,
    const std::vector<wire::RankCard>& cards) const {
  std::vector<std::unique_ptr<os::Pollable>> processes(slots.size());
  auto* watcher = dynamic_cast<os::ProcessWatcher*>(&system);
  const uint64_t own = watcher == nullptr ? 0 : watcher->pid_namespace();
  const int own_pid = cards[static_cast<size_t>(rank.value)].pid;
  for (size_t i = 0; i < slots.size() && own != 0; ++i) {
    if (slots[i] < 0 || cards[i].pid == own_pid) continue;
    const uint64_t its = page.slot(slots[i]).pid_namespace.load(std::memory_order_relaxed);
    if (its != own) continue;
    processes[i] = watcher->watch_process(cards[i].pid);
    if (processes[i] == nullptr && options.log) {
      options.log->write(LogLevel::kInfo, "comm",
                         format("cannot watch the process of rank={} pid={}: its end is noticed "
                                "when its connection ends",
                                i, cards[i].pid));
    }
  }
  return processes;
}

// A destructor must not wait for other ranks: what is still pending is aborted. An exception that
// unwinds says itself what happened on this rank.
Communicator::Impl::~Impl() {
  const bool is_pending = queue != nullptr && !is_idle();
  if (!is_closed_ && is_pending && monitor != nullptr) {
    const bool is_unwinding = std::uncaught_exceptions() > num_exceptions_;
    monitor->fail({.code = ErrorCode::kAborted,
                   .cause = is_unwinding
                                ? "an exception ended the group's scope while operations were "
                                  "pending: that exception is the first failure"
                                : "the group was destroyed while operations were pending; close() "
                                  "it first",
                   .is_logged = !is_unwinding});
  }
  if (queue == nullptr) return;
  close(system.deadline_in(kGoodbyeTime));
  // Once more, for a close() that an exception cut short: no thread may outlive what it works on.
  stop_threads();
}

void Communicator::Impl::abort(const std::string& reason) {
  monitor->fail({ErrorCode::kAborted, -1, format("abort() was called: {}", reason), {}});
}

void Communicator::Impl::close(Deadline deadline) {
  if (is_closed_.exchange(true)) return;
  const Error refusal = monitor->has_failed()
                            ? monitor->error()
                            : Error(ErrorCode::kInvalidArgument,
                                    format("group \"{}\" is closed on rank {}: connect a new one",
                                           options.name, rank));
  queue->refuse(refusal);
  if (messages != nullptr) messages->refuse(refusal);
  if (!drain(deadline)) {
    abort("close() reached its deadline with operations pending");
    drain(system.deadline_in(kAbortTime));
  }
  if (!monitor->has_failed()) {
    monitor->say_goodbye(queue->num_issued(), deadline.earlier(system.deadline_in(kGoodbyeTime)));
  }
  stop_threads();
  // An operation that runs on in another caller's thread, although it was aborted, uses the
  // engines; then they stay as long as the group.
  if (is_idle()) release();
}

void Communicator::Impl::stop_threads() {
  queue->close();
  if (messages != nullptr) messages->close();
  monitor->stop();
}

bool Communicator::Impl::is_idle() const {
  return queue->is_idle() && (messages == nullptr || messages->is_idle());
}

bool Communicator::Impl::drain(Deadline deadline) {
  const bool is_drained = queue->drain(deadline);
  return (messages == nullptr || messages->drain(deadline)) && is_drained;
}

// Descriptors and mappings go now, not with the last handle to the group.
void Communicator::Impl::release() {
  heap.reset();
  net_engine.reset();
  host_engine.reset();
  message_transport.reset();
  transport.reset();
  host.reset();
}

}  // namespace cadre
