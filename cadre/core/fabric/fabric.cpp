#include "cadre/core/fabric/fabric.h"

#include <algorithm>
#include <span>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/fabric/bootstrap/connect_fabric.h"
#include "cadre/core/fabric/bootstrap/listening.h"
#include "cadre/core/fabric/group_identity.h"
#include "cadre/core/os/process_watcher.h"
#include "cadre/core/os/shared_pages.h"

namespace cadre {
namespace {

// The size of the first page of the host's memory, which the bootstrap uses. The status page
// follows it.
constexpr size_t kPageBytes = 4096;
constexpr Duration kLeaveTime = std::chrono::seconds(1);

// The key under which the fabric itself attaches to the control plane. No group has this key.
constexpr GroupKey kFabricKey = 1;

// Reports dead ranks to HostMemory, so that the pieces of memory that they held are released.
class HolderWatch final : public GroupEvents {
 public:
  HolderWatch(std::shared_ptr<const Layout> layout, std::shared_ptr<HostMemory> memory, int rank)
      : layout_(std::move(layout)), memory_(std::move(memory)), host_(layout_->host_of(rank)) {}

  void on_rank_lost(const LossReport& loss) override {
    if (layout_->host_of(loss.rank) == host_) memory_->forget_holder(layout_->slot_of(loss.rank));
  }
  void on_rank_left_group(const wire::GroupLeave&) override {}
  void on_group_failed(const GroupFailure&) override {}
  std::optional<wire::Activity> own_activity() override { return std::nullopt; }

 private:
  const std::shared_ptr<const Layout> layout_;  // shared with the fabric
  const std::shared_ptr<HostMemory> memory_;
  const int host_;
};

HostMemoryLayout memory_layout(const os::HostInfo& host, int num_slots) {
  const size_t front = kPageBytes + StatusPage::bytes_for(num_slots);
  HostMemoryLayout layout = {.num_slots = num_slots,
                             .front_bytes = (front + kPageBytes - 1) / kPageBytes * kPageBytes};
  layout.slice_bytes = HostMemory::default_slice_bytes(host, layout);
  return layout;
}

}  // namespace

Fabric::Fabric(Key, os::System& system, const Membership& membership,
               const FabricSettings& settings)
    : system_(system),
      rank_(membership.rank),
      fork_mark_(std::make_shared<const os::ForkMark>()),
      flight_files_(settings.flight_record_path) {}

Result<std::shared_ptr<Fabric>> Fabric::connect(os::System& system, const Membership& membership,
                                                const FabricSettings& settings, Deadline deadline) {
  if (membership.world_size == 1) {
    auto fabric = stand_alone(system, membership, settings);
    auto own = settings.settings ? settings.settings() : Result<std::string>(std::string());
    if (!own.ok()) return own.error();
    fabric->settings_ = std::move(own).value();
    return fabric;
  }
  auto fabric = std::make_shared<Fabric>(Key(), system, membership, settings);
  CADRE_RETURN_IF_ERROR(fabric->connect_ranks(membership, settings, deadline));
  return fabric;
}

std::shared_ptr<Fabric> Fabric::stand_alone(os::System& system, const Membership& membership,
                                            const FabricSettings& settings) {
  auto fabric = std::make_shared<Fabric>(Key(), system, membership, settings);
  const wire::RankAddress address = address_of_this_process(system);
  fabric->layout_ = std::make_shared<const Layout>(
      std::vector(static_cast<size_t>(membership.world_size), address));
  fabric->obstacle_ = "a process without peers shares memory with nobody";
  fabric->cells_ = std::make_unique<StatusCells>(fabric->page_, 0);
  return fabric;
}

Status Fabric::connect_ranks(const Membership& membership, const FabricSettings& settings,
                             Deadline deadline) {
  const os::HostInfo host = system_.host();
  const FabricOptions fabric_options{
      .id = settings.connection,
      .listen_host = settings.listen_host,
      .version = CADRE_VERSION,
      .device = settings.device,
      .may_share_memory = true,
      .host_segment_bytes =
          [&host](int num_slots) {
            return HostMemory::segment_bytes(memory_layout(host, num_slots));
          },
      .settings = settings.settings};
  auto connected = connect_fabric(system_, membership, fabric_options, deadline);
  if (!connected.ok()) return connected.error();
  FabricConnections& connections = connected.value();
  layout_ = connections.layout;
  settings_ = std::move(connections.settings);
  is_crowded_ = connections.is_crowded;
  obstacle_ = connections.obstacle;
  const int num_slots = static_cast<int>(layout_->ranks_of(layout_->host_of(rank_.value)).size());
  int own_slot = 0;
  if (connections.host_memory != nullptr) {
    own_slot = layout_->slot_of(rank_.value);
    auto memory = HostMemory::attach(connections.host_memory,
                                     HostMemory::layout_of(connections.host_memory->bytes().size(),
                                                           memory_layout(host, num_slots)),
                                     own_slot);
    if (!memory.ok()) return memory.error();
    host_memory_ = std::move(memory).value();
    page_ = StatusPage(connections.host_memory, kPageBytes, num_slots);
    CADRE_RETURN_IF_ERROR(os::reserve_pages(
        *connections.host_memory, kPageBytes + own_slot * sizeof(StatusSlot), sizeof(StatusSlot)));
  }
  cells_ = std::make_unique<StatusCells>(page_, own_slot);
  start_plane(std::move(connections), membership, settings);
  return {};
}

void Fabric::start_plane(FabricConnections connections, const Membership& membership,
                         const FabricSettings& settings) {
  log_ = settings.log;
  links_ = std::make_shared<TcpLinks>(
      system_, TcpLinksOptions{rank_.value, layout_->num_ranks(), is_crowded_},
      [this](int peer, Deadline deadline) { return plane_->dial_data(peer, deadline); });
  std::vector<std::unique_ptr<os::Pollable>> processes = watch_processes(settings.log.get());
  plane_ = std::make_unique<ControlPlane>(
      system_,
      ControlPlane::Setup{.layout = layout_,
                          .rank = rank_.value,
                          .identity = std::move(connections.identity),
                          .control = std::move(connections.control),
                          .tcp_listeners = std::move(connections.tcp_listeners),
                          .unix_listener = std::move(connections.unix_listener),
                          .processes = std::move(processes),
                          .store_host = membership.store_host,
                          .silence_limit = settings.silence_limit,
                          .lost_ranks = layout_->num_hosts() > 1 ? membership.lost_ranks : nullptr,
                          .log = settings.log,
                          .last_activities = [this](int rank) { return last_activities(rank); },
                          .on_data_connection =
                              [links = links_](int peer, std::unique_ptr<os::Socket> socket) {
                                links->add(peer, std::move(socket));
                              }});
  if (host_memory_ != nullptr) {
    plane_->attach(kFabricKey, std::make_shared<HolderWatch>(layout_, host_memory_, rank_.value));
  }
}

Fabric::~Fabric() {
  close(system_.deadline_in(kLeaveTime));
}

void Fabric::join_group() {
  num_groups_.fetch_add(1, std::memory_order_relaxed);
}

void Fabric::leave_group(Deadline deadline) {
  if (num_groups_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    close(deadline.earlier(system_.deadline_in(kLeaveTime)));
  }
}

// Sends the pending bytes of all groups before the control plane reports that this process leaves,
// because peers may wait for those bytes.
void Fabric::close(Deadline deadline) {
  if (std::exchange(is_closed_, true)) return;
  if (links_ != nullptr) links_->drain(deadline);
  if (plane_ != nullptr) plane_->close(deadline);
  cells_.reset();
  page_ = StatusPage();
  if (host_memory_ != nullptr) withdraw_memory();
  host_memory_.reset();
}

// Replaces the shared memory of tensors that outlive the fabric by private memory, because peers
// whose groups are still open may write to the shared memory.
void Fabric::withdraw_memory() {
  const Status withdrawn = host_memory_->withdraw_all("this process has left the job");
  if (withdrawn.ok() || log_ == nullptr) return;
  log_->write(LogLevel::kError, "comm",
              format("peers may still write into symmetric memory of this rank, do not use its "
                     "content: {}",
                     withdrawn.error().message()));
}

int Fabric::status_slot_of(int rank) const {
  if (rank == rank_.value) return host_memory_ == nullptr ? 0 : layout_->slot_of(rank);
  const bool is_readable =
      host_memory_ != nullptr && layout_->host_of(rank) == layout_->host_of(rank_.value);
  return is_readable ? layout_->slot_of(rank) : -1;
}

bool Fabric::share_memory(std::span<const int> ranks) const {
  return host_memory_ != nullptr && std::ranges::all_of(ranks, [this](int rank) {
           return layout_->host_of(rank) == layout_->host_of(rank_.value);
         });
}

std::vector<int> Fabric::slots_of(std::span<const int> ranks) const {
  std::vector<int> slots;
  for (const int rank : ranks) slots.push_back(layout_->slot_of(rank));
  return slots;
}

Result<std::vector<GroupPlaces>> Fabric::exchange_places(const GroupPlaces& own,
                                                         const std::function<Status()>& check,
                                                         Deadline deadline) {
  StatusSlot& slot = page_.slot(layout_->slot_of(rank_.value));
  slot.block = own.block;
  slot.message_page = own.message_page;
  system_.publish(slot.is_ready, 1);
  std::vector<GroupPlaces> places;
  for (const int rank : layout_->ranks_of(layout_->host_of(rank_.value))) {
    StatusSlot& theirs = page_.slot(layout_->slot_of(rank));
    while (theirs.is_ready.value.load(std::memory_order_acquire) == 0) {
      CADRE_RETURN_IF_ERROR(check());
      // wait_while() returns after System::kMaxNap at the latest.
      if (!system_.wait_while(theirs.is_ready, 0, deadline) &&
          theirs.is_ready.value.load(std::memory_order_acquire) == 0) {
        return Error(
                   ErrorCode::kTimeout,
                   format("{} connected, but did not prepare its memory before the deadline. Look "
                          "at its log, or give more time",
                          layout_->describe(rank)))
            .with_culprit(rank);
      }
    }
    places.push_back({theirs.block, theirs.message_page});
  }
  return places;
}

// Watches peers in the same PID namespace. If the kernel does not permit this (pidfd_open fails
// with ENOSYS or EPERM), the death of a peer is detected when its control connection ends, as for
// peers on other hosts.
std::vector<std::unique_ptr<os::Pollable>> Fabric::watch_processes(LogSink* log) const {
  std::vector<std::unique_ptr<os::Pollable>> processes(static_cast<size_t>(layout_->num_ranks()));
  auto* watcher = dynamic_cast<os::ProcessWatcher*>(&system_);
  const wire::RankAddress& own = layout_->rank_address(rank_.value);
  if (watcher == nullptr || own.pid_namespace == 0) return processes;
  for (const int rank : layout_->ranks_of(layout_->host_of(rank_.value))) {
    const wire::RankAddress& rank_address = layout_->rank_address(rank);
    if (rank_address.pid == own.pid || rank_address.pid_namespace != own.pid_namespace) continue;
    auto& process = processes[static_cast<size_t>(rank)];
    process = watcher->watch_process(rank_address.pid);
    if (process == nullptr && log != nullptr) {
      log->write(
          LogLevel::kInfo, "comm",
          format("cannot watch the process of rank={} pid={}: its death is detected when its "
                 "connection ends",
                 rank, rank_address.pid));
    }
  }
  return processes;
}

std::vector<GroupActivity> Fabric::last_activities(int rank) const {
  const int slot = status_slot_of(rank);
  if (slot < 0) return {};
  const TimePoint now = system_.now();
  std::vector<GroupActivity> activities;
  for (const GroupCell& cell : page_.slot(slot).cells) {
    const GroupKey group = cell.group.load(std::memory_order_acquire);
    const wire::Activity activity = cell.read(now);
    if (group == 0 || activity.state == wire::ActivityState::kNothingYet) continue;
    activities.push_back({group, activity});
  }
  return activities;
}

}  // namespace cadre
