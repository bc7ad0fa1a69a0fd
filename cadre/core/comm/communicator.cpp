#include "cadre/core/comm/communicator.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "cadre/core/base/enum_set.h"
#include "cadre/core/base/format.h"
#include "cadre/core/base/quiet_log.h"
#include "cadre/core/comm/checks.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/comm/group_destruction.h"
#include "cadre/core/comm/message_calls.h"
#include "cadre/core/comm/queue/refused_call.h"
#include "cadre/core/comm/tuning.h"

namespace cadre {
namespace {

// Returns the name of a call as its error messages quote it.
std::string_view name_of(std::string_view call, OpKind kind) {
  return call.empty() ? to_string(kind) : call;
}

// Turns the error of a collective, whose message begins with the kind of the collective, into an
// error of the call that contains the collective.
Error refused(const Communicator& group, std::string_view call, OpKind kind, const Error& error) {
  if (error.code() != ErrorCode::kInvalidArgument) return error;
  std::string_view problem = error.message();
  const std::string prefix = format("{}: ", kind);
  if (problem.starts_with(prefix)) problem.remove_prefix(prefix.size());
  return refusal_of(group, name_of(call, kind), problem);
}

// Returns the fingerprint that the ranks compare. Throws if the collective is invalid or the engine
// does not support it.
Fingerprint validated(Collective& collective, const Communicator& group, const EngineSet& engines,
                      std::string_view call, size_t num_coalesced = 0) {
  const auto checked = validate(collective, group.rank(), group.world_size());
  if (!checked.ok()) throw refused(group, call, collective.kind, checked.error());
  const Status supported = engines.check(collective);
  if (!supported.ok()) throw refused(group, call, collective.kind, supported.error());
  OpDescriptor descriptor = *checked;
  descriptor.on_device = engines.is_on_device(collective.device.type);
  descriptor.num_coalesced = static_cast<uint16_t>(std::min<size_t>(num_coalesced, UINT16_MAX));
  collective.shape.reset();  // the shape is borrowed for the call; the descriptor has a copy
  return descriptor.fingerprint();
}

// Combines the collectives into one operation and passes it to `use`. Allocates no memory for a
// single collective.
template <typename Use>
auto with_operation(std::span<Collective> collectives, const Communicator& group,
                    const Communicator::Impl& impl, const CollectiveOptions& options,
                    const Use& use) {
  const auto use_with = [&](std::span<const Fingerprint> fingerprints) {
    const std::string_view call = name_of(options.call, collectives.front().kind);
    return use(Operation{.collectives = collectives,
                         .fingerprints = fingerprints,
                         .deadline = deadline_of(group, call, options),
                         .keep_alive = options.keep_alive,
                         .call = options.call});
  };
  if (collectives.empty()) {
    throw refusal_of(group, options.call.empty() ? "run" : options.call,
                     "the list of collectives is empty; pass at least one");
  }
  impl.check_open(name_of(options.call, collectives.front().kind));
  if (collectives.size() == 1) {
    const Fingerprint one = validated(collectives.front(), group, impl.engines, options.call);
    return use_with({&one, 1});
  }
  const Status together = impl.engines.check_together(collectives);
  if (!together.ok()) {
    throw refused(group, options.call, collectives.front().kind, together.error());
  }
  std::vector<Fingerprint> all;
  for (Collective& collective : collectives) {
    all.push_back(validated(collective, group, impl.engines, options.call, collectives.size()));
  }
  return use_with(all);
}

// Wraps the program's log, because an exception of it must not end a thread or a destructor of the
// group.
CommunicatorOptions with_quiet_log(CommunicatorOptions options) {
  if (options.log != nullptr && dynamic_cast<QuietLog*>(options.log.get()) == nullptr) {
    options.log = std::make_shared<QuietLog>(std::move(options.log));
  }
  return options;
}

// Warns on rank 0 if the group has a tuning file that was measured elsewhere.
void check_tuning(const Communicator& group) {
  const CommunicatorOptions& options = group.options();
  if (options.tuning.empty() || group.rank() != 0 || group.world_size() == 1) return;
  if (options.log == nullptr) return;
  const std::string mismatch = tuning_mismatch(options.tuning, group.backend_name(), group.hosts());
  if (mismatch.empty()) return;
  options.log->write(LogLevel::kWarning, "comm", format("group={} {}", group.name(), mismatch));
}

// Returns text such as "0, 2" with the ranks that have this type of device; of many, the first
// ones.
std::string ranks_with(const Layout& layout, DeviceType type) {
  constexpr int kMaxNamed = 8;
  std::string text;
  int num_ranks = 0;
  for (int rank = 0; rank < layout.num_ranks(); ++rank) {
    if (layout.rank_address(rank).device != type) continue;
    if (num_ranks++ < kMaxNamed) text += format("{}{}", text.empty() ? "" : ", ", rank);
  }
  if (num_ranks <= kMaxNamed) return text;
  return format("{} and {} others", text, num_ranks - kMaxNamed);
}

// The engine for a device needs all ranks of a group. All ranks see the same layout, so they throw
// the same error.
void check_device_types(const Layout& layout) {
  EnumSet<DeviceType> types;
  for (const wire::RankAddress& address : layout.rank_addresses) types.insert(address.device);
  std::string found;
  int num_types = 0;
  for (int i = 0; i < kNumDeviceTypes; ++i) {
    const auto type = static_cast<DeviceType>(i);
    if (!types.contains(type)) continue;
    found += format("{}{} on ranks {}", num_types++ == 0 ? "" : "; ",
                    type == DeviceType::kCpu ? "none" : to_string(type), ranks_with(layout, type));
  }
  if (num_types < 2) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("the ranks have devices of different types: {}. Let every rank have a device "
                     "of one type, or pass the CPU on all ranks (InitOptions::device)",
                     found));
}

// The maximum size of a symmetric buffer. No machine has so much memory, and additions to this
// number do not wrap.
constexpr size_t kMaxSymmetricBytes = size_t{1} << 56;

}  // namespace

std::unique_ptr<Communicator> Communicator::connect(os::System& system,
                                                    const Membership& membership,
                                                    const CommunicatorOptions& options,
                                                    Deadline deadline) {
  check_rank("connect", "this rank", membership.rank, membership.world_size);
  if (membership.world_size > 1 && membership.store == nullptr) {
    refuse_call(format("connect: a membership of {} ranks needs a store", membership.world_size));
  }
  try {
    const CommunicatorOptions quiet = with_quiet_log(options);
    const FabricSettings settings = fabric_settings(membership, quiet);
    auto fabric = Fabric::connect(system, membership, settings, deadline).value_or_throw();
    check_device_types(fabric->layout());
    std::vector<int> all(static_cast<size_t>(membership.world_size));
    std::iota(all.begin(), all.end(), 0);
    GroupMembers members{std::move(all), membership.rank, membership};
    members.membership.group = settings.connection;
    GroupIdentity identity =
        GroupIdentity::of_connection(id_of(options), fabric->connection_number());
    CommunicatorOptions own = quiet;
    own.flight_record_path = fabric->flight_files().path_for_first(identity, options.name);
    own.tuning = fabric->settings();
    auto impl =
        std::make_unique<Impl>(std::move(fabric), own, std::move(identity), std::move(members));
    impl->open_first(deadline);
    auto group = std::make_unique<Communicator>(std::move(impl));
    check_tuning(*group);
    return group;
  } catch (const Error& error) {
    ErrorDetails details = error.details();
    // The group that is being connected becomes the world, so its rank numbers are also those of
    // the world.
    details.culprit_world_rank = details.culprit;
    throw error.with_details(details).with_context(
        format("connecting rank {} of {} to group \"{}\" in round {}", membership.rank,
               membership.world_size, options.name, membership.round));
  }
}

Communicator::Communicator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

// Does nothing in a forked child, where the locks and connections of the group may be in any state
// and its threads do not exist. The child's copy of the group is leaked until the child exits.
Communicator::~Communicator() {
  if (impl_->fork_guard->is_in_child()) {
    static_cast<void>(impl_.release());
    return;
  }
  if (!ProgressQueue::is_any_on_this_thread()) return;
  const auto kept = impl_->options.log;
  destroy_in_other_thread([impl = impl_.release()] { std::unique_ptr<Impl>{impl}.reset(); }, kept);
}

Rank Communicator::rank() const {
  return impl_->rank;
}
int Communicator::world_size() const {
  return impl_->world_size;
}
const std::string& Communicator::name() const {
  return impl_->options.name;
}
const std::string& Communicator::id() const {
  return impl_->identity.id();
}
os::System& Communicator::system() const {
  return impl_->system;
}
std::string_view Communicator::backend_name() const {
  return impl_->engines.host_capabilities().name;
}
bool Communicator::shares_memory() const {
  return impl_->engines.host_capabilities().shares_memory;
}
std::optional<Device> Communicator::device() const {
  return impl_->engines.device();
}
const Membership& Communicator::membership() const {
  return impl_->checked().members.membership;
}
const CommunicatorOptions& Communicator::options() const {
  return impl_->options;
}
std::vector<Rank> Communicator::global_ranks() const {
  return {impl_->members.ranks.begin(), impl_->members.ranks.end()};
}
std::vector<int> Communicator::hosts() const {
  const Layout& layout = impl_->checked().fabric->layout();
  std::map<int, int> number_of_host;
  std::vector<int> hosts;
  for (const int rank : impl_->members.ranks) {
    const auto next = static_cast<int>(number_of_host.size());
    hosts.push_back(number_of_host.try_emplace(layout.host_of(rank), next).first->second);
  }
  return hosts;
}
Rank Communicator::global_rank(Rank group_rank) const {
  if (group_rank < 0 || group_rank >= world_size()) {
    throw refusal_of(
        *this, "global_rank",
        format("the rank {} is not in the group of {} ranks", group_rank, world_size()));
  }
  return impl_->members.ranks[static_cast<size_t>(group_rank.value)];
}
std::optional<Rank> Communicator::group_rank(Rank global_rank) const {
  const auto& ranks = impl_->members.ranks;
  const auto found = std::ranges::find(ranks, global_rank.value);
  if (found == ranks.end()) return std::nullopt;
  return static_cast<int>(found - ranks.begin());
}
uint64_t Communicator::num_collectives() const {
  return impl_->checked().queue->num_issued();
}

void Communicator::run(std::span<const Collective> collectives, const CollectiveOptions& options) {
  std::vector<Collective> own(collectives.begin(), collectives.end());
  run_own(own, options);
}
Work Communicator::issue(std::span<const Collective> collectives,
                         const CollectiveOptions& options) {
  std::vector<Collective> own(collectives.begin(), collectives.end());
  return issue_own(own, options);
}
void Communicator::run_own(std::span<Collective> collectives, const CollectiveOptions& options) {
  with_operation(collectives, *this, impl_->checked(), options,
                 [&](Operation operation) { impl_->queue->run(operation); });
}
Work Communicator::issue_own(std::span<Collective> collectives, const CollectiveOptions& options) {
  return with_operation(collectives, *this, impl_->checked(), options, [&](Operation operation) {
    const Capabilities& can = impl_->engines.capabilities_for(operation.device_type());
    return can.is_stream_ordered ? impl_->queue->issue_here(std::move(operation))
                                 : impl_->queue->issue(std::move(operation));
  });
}
void Communicator::send(ConstBytes data, DType dtype, Rank destination, int tag,
                        const CollectiveOptions& options) {
  run_message(*this, {}, MessageCall::send(data, dtype, destination, tag), options);
}
void Communicator::recv(Bytes data, DType dtype, Rank source, int tag,
                        const CollectiveOptions& options) {
  check_peer(*this, name_of(options.call, OpKind::kRecv), source);
  run_message(*this, {}, MessageCall::recv(data, dtype, source, tag), options);
}
Rank Communicator::recv_from_any(Bytes data, DType dtype, int tag,
                                 const CollectiveOptions& options) {
  return run_message(*this, {}, MessageCall::recv(data, dtype, kAnySource, tag), options);
}
Work Communicator::send_async(ConstBytes data, DType dtype, Rank destination, int tag,
                              const CollectiveOptions& options) {
  const MessageCall call = MessageCall::send(data, dtype, destination, tag);
  return issue(std::span(&call, 1), options).front();
}
Work Communicator::recv_async(Bytes data, DType dtype, Rank source, int tag,
                              const CollectiveOptions& options) {
  check_peer(*this, name_of(options.call, OpKind::kRecv), source);
  const MessageCall call = MessageCall::recv(data, dtype, source, tag);
  return issue(std::span(&call, 1), options).front();
}
std::vector<Work> Communicator::issue(std::span<const MessageCall> calls,
                                      const CollectiveOptions& options) {
  return issue_messages(*this, {}, calls, options);
}

std::shared_ptr<SymmetricBuffer> Communicator::allocate_symmetric(
    size_t num_bytes, const CollectiveOptions& options) {
  const std::string_view call = options.call.empty() ? "allocate_symmetric" : options.call;
  if (num_bytes > kMaxSymmetricBytes) {
    throw refusal_of(*this, call,
                     format("the size is {} bytes, expected at most {}; is it a negative number?",
                            num_bytes, kMaxSymmetricBytes));
  }
  impl_->checked().check_open(call);
  const Fingerprint fingerprint =
      OpDescriptor{.kind = OpKind::kAllocate, .count = num_bytes}.fingerprint();
  Operation operation{.fingerprints = {&fingerprint, 1},
                      .deadline = deadline_of(*this, call, options),
                      .keep_alive = options.keep_alive,
                      .call = options.call};
  impl_->checked().queue->run(operation);
  return operation.allocated;
}

Duration Communicator::time_in_operations() const {
  return impl_->checked().runner->time_spent();
}

std::vector<PeerStatus> Communicator::peers() const {
  const Roster& roster = impl_->checked().monitor->roster();
  const std::vector<PeerView> views = impl_->checked().monitor->peers();
  std::vector<PeerStatus> peers;
  for (int i = 0; i < impl_->world_size; ++i) {
    const auto at = static_cast<size_t>(i);
    const wire::RankAddress& rank_address = roster.rank_address(i);
    peers.push_back({i, rank_address.host, rank_address.pid, describe_peer(views[at])});
  }
  return peers;
}

std::vector<Rank> Communicator::lost_ranks() const {
  const std::vector<PeerView> views = impl_->checked().monitor->peers();
  std::vector<Rank> lost;
  for (size_t i = 0; i < views.size(); ++i) {
    if (views[i].is_gone || views[i].left_after) lost.push_back(static_cast<int>(i));
  }
  return lost;
}

std::optional<Error> Communicator::error() const {
  Monitor& monitor = *impl_->checked().monitor;
  return monitor.has_failed() ? std::optional(monitor.error()) : std::nullopt;
}

FlightRecord Communicator::flight_record() const {
  return impl_->checked().recorder->read();
}

void Communicator::abort(const std::string& reason) {
  impl_->checked().abort(reason);
}

void Communicator::fail_together(const Communicator& other) {
  Monitor::link(impl_->checked().monitor, other.impl_->checked().monitor);
}

void Communicator::close(Deadline deadline) {
  Impl& impl = impl_->checked();
  if (impl.is_on_own_thread()) {
    throw refusal_of(
        *this, "close",
        "a callback of the group, or the deleter of a keep_alive, called close(), which would wait "
        "for that caller; close the group in a thread of the program");
  }
  // The mark is set before this thread checks whether the other group waits. So if callbacks close
  // each other's groups, at least one of the two close() calls throws, and they do not wait for
  // each other.
  const ProgressQueue::AwaitsOther awaits_other;
  if (ProgressQueue::is_any_on_this_thread() && impl.awaits_other()) {
    throw refusal_of(
        *this, "close",
        "a callback of another group called close() while a callback of this group closes a group, "
        "so the two callbacks might wait for each other; close the group in a "
        "thread of the program");
  }
  if (!impl.close(deadline)) return;
  if (const auto late = impl.fabric->late_errors()->take()) throw *late;
}

}  // namespace cadre
