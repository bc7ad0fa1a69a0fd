#include "cadre/comm/communicator.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/comm/calls/checks.h"
#include "cadre/comm/calls/exchange_calls.h"
#include "cadre/comm/calls/make_operation.h"
#include "cadre/comm/communicator_impl.h"

namespace cadre {
namespace {

Operation broadcast_of(Bytes data, DType dtype, Rank root, int world_size,
                       const CollectiveOptions& options) {
  check_elements("broadcast", data, dtype);
  check_rank("broadcast", "root", root, world_size);
  return make_operation(
      {OpKind::kBroadcast, dtype, ReduceOp::kSum, root, data.size() / size_of(dtype)}, data, data,
      options);
}

Operation all_reduce_of(ConstBytes in, Bytes out, DType dtype, ReduceOp op,
                        const CollectiveOptions& options) {
  check_elements("all_reduce", in, dtype);
  check_sizes("all_reduce", out.size(), in.size(), "the output");
  check_in_place("all_reduce", in, out, 0);
  check_reduction("all_reduce", dtype, op);
  return make_operation({OpKind::kAllReduce, dtype, op, 0, in.size() / size_of(dtype)}, in, out,
                        options);
}

Operation all_gather_of(ConstBytes in, Bytes out, DType dtype, const Caller& caller,
                        const CollectiveOptions& options) {
  check_elements("all_gather", in, dtype);
  check_sizes("all_gather", out.size(), in.size() * static_cast<size_t>(caller.world_size),
              "the output");
  check_in_place("all_gather", in, out, caller.rank);
  return make_operation({OpKind::kAllGather, dtype, ReduceOp::kSum, 0, in.size() / size_of(dtype)},
                        in, out, options);
}

Operation reduce_scatter_of(ConstBytes in, Bytes out, const ReduceKind& kind, const Caller& caller,
                            const CollectiveOptions& options) {
  const auto [dtype, op] = kind;
  check_elements("reduce_scatter", out, dtype);
  check_sizes("reduce_scatter", in.size(), out.size() * static_cast<size_t>(caller.world_size),
              "the input");
  check_in_place("reduce_scatter", out, in, caller.rank);
  check_reduction("reduce_scatter", dtype, op);
  return make_operation({OpKind::kReduceScatter, dtype, op, 0, out.size() / size_of(dtype)}, in,
                        out, options);
}

Operation barrier_of(const CollectiveOptions& options) {
  return make_operation({.kind = OpKind::kBarrier}, {}, {}, options);
}

Message send_of(ConstBytes data, DType dtype, Rank destination, int tag,
                const CollectiveOptions& options) {
  check_elements("send", data, dtype);
  check_factor({.kind = OpKind::kSend}, options);
  return {.kind = OpKind::kSend,
          .peer = destination,
          .tag = tag,
          .dtype = dtype,
          .in = data,
          .deadline = options.deadline,
          .keep_alive = options.keep_alive};
}

// More than any machine has; sums with it do not wrap.
constexpr size_t kMaxSymmetricBytes = size_t{1} << 56;

Message recv_of(Bytes data, DType dtype, Rank source, int tag, const CollectiveOptions& options) {
  check_elements("recv", data, dtype);
  check_factor({.kind = OpKind::kRecv}, options);
  return {.kind = OpKind::kRecv,
          .peer = source,
          .tag = tag,
          .dtype = dtype,
          .out = data,
          .deadline = options.deadline,
          .keep_alive = options.keep_alive};
}

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
    auto fabric = Fabric::connect(system, membership, options, deadline).value_or_throw();
    std::vector<int> all(static_cast<size_t>(membership.world_size));
    std::iota(all.begin(), all.end(), 0);
    auto impl = std::make_unique<Impl>(std::move(fabric), options,
                                       GroupMembers{std::move(all), membership.rank, membership});
    impl->open_first(deadline);
    return std::make_unique<Communicator>(Key(), std::move(impl));
  } catch (const Error& error) {
    throw error.with_context(format("connecting rank {} of {} to group \"{}\" in round {}",
                                    membership.rank, membership.world_size, options.name,
                                    membership.round));
  }
}

Communicator::Communicator(Key, std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

// A child's copy cannot be taken apart: its locks and connections may be in any state, and its
// threads are not there. It goes with the child.
Communicator::~Communicator() {
  if (impl_->home->is_left()) static_cast<void>(impl_.release());
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
  return impl_->id;
}
os::System& Communicator::system() const {
  return impl_->system;
}
std::string_view Communicator::backend_name() const {
  return impl_->backend_name;
}
bool Communicator::shares_memory() const {
  return impl_->backend_name == "host";
}
const Membership& Communicator::membership() const {
  return impl_->at_home().members.membership;
}
const CommunicatorOptions& Communicator::options() const {
  return impl_->options;
}
std::vector<Rank> Communicator::global_ranks() const {
  return {impl_->members.ranks.begin(), impl_->members.ranks.end()};
}
Rank Communicator::global_rank(Rank group_rank) const {
  check_rank("global_rank", "the rank", group_rank, world_size());
  return impl_->members.ranks[static_cast<size_t>(group_rank.value)];
}
std::optional<Rank> Communicator::group_rank(Rank global_rank) const {
  const auto& ranks = impl_->members.ranks;
  const auto found = std::ranges::find(ranks, global_rank.value);
  if (found == ranks.end()) return std::nullopt;
  return static_cast<int>(found - ranks.begin());
}
uint64_t Communicator::num_collectives() const {
  return impl_->at_home().queue->num_issued();
}

void Communicator::broadcast(Bytes data, DType dtype, Rank root, const CollectiveOptions& options) {
  Operation operation = broadcast_of(data, dtype, root, world_size(), options);
  impl_->at_home().queue->run(operation);
}
void Communicator::all_reduce(ConstBytes in, Bytes out, DType dtype, ReduceOp op,
                              const CollectiveOptions& options) {
  Operation operation = all_reduce_of(in, out, dtype, op, options);
  impl_->at_home().queue->run(operation);
}
void Communicator::all_gather(ConstBytes in, Bytes out, DType dtype,
                              const CollectiveOptions& options) {
  Operation operation = all_gather_of(in, out, dtype, {rank(), world_size()}, options);
  impl_->at_home().queue->run(operation);
}
void Communicator::reduce_scatter(ConstBytes in, Bytes out, DType dtype, ReduceOp op,
                                  const CollectiveOptions& options) {
  Operation operation = reduce_scatter_of(in, out, {dtype, op}, {rank(), world_size()}, options);
  impl_->at_home().queue->run(operation);
}
void Communicator::barrier(const CollectiveOptions& options) {
  Operation operation = barrier_of(options);
  impl_->at_home().queue->run(operation);
}
void Communicator::reduce(ConstBytes in, Bytes out, DType dtype, ReduceOp op, Rank root,
                          const CollectiveOptions& options) {
  Operation operation = reduce_of(in, out, {dtype, op}, root, {rank(), world_size()}, options);
  impl_->at_home().queue->run(operation);
}
void Communicator::gather(ConstBytes in, Bytes out, DType dtype, Rank root,
                          const CollectiveOptions& options) {
  Operation operation = gather_of(in, out, dtype, root, {rank(), world_size()}, options);
  impl_->at_home().queue->run(operation);
}
void Communicator::scatter(ConstBytes in, Bytes out, DType dtype, Rank root,
                           const CollectiveOptions& options) {
  Operation operation = scatter_of(in, out, dtype, root, {rank(), world_size()}, options);
  impl_->at_home().queue->run(operation);
}
void Communicator::all_to_all(ConstBytes in, Bytes out, DType dtype,
                              const CollectiveOptions& options) {
  Operation operation = all_to_all_of(in, out, dtype, {rank(), world_size()}, options);
  impl_->at_home().queue->run(operation);
}
void Communicator::all_to_all_v(ConstBytes in, Bytes out, DType dtype, const SplitCounts& counts,
                                const CollectiveOptions& options) {
  Operation operation = all_to_all_v_of(in, out, dtype, counts, {rank(), world_size()}, options);
  impl_->at_home().queue->run(operation);
}
Work Communicator::broadcast_async(Bytes data, DType dtype, Rank root,
                                   const CollectiveOptions& options) {
  return impl_->at_home().queue->issue(broadcast_of(data, dtype, root, world_size(), options));
}
Work Communicator::all_reduce_async(ConstBytes in, Bytes out, DType dtype, ReduceOp op,
                                    const CollectiveOptions& options) {
  return impl_->at_home().queue->issue(all_reduce_of(in, out, dtype, op, options));
}
Work Communicator::all_gather_async(ConstBytes in, Bytes out, DType dtype,
                                    const CollectiveOptions& options) {
  return impl_->at_home().queue->issue(
      all_gather_of(in, out, dtype, {rank(), world_size()}, options));
}
Work Communicator::reduce_scatter_async(ConstBytes in, Bytes out, DType dtype, ReduceOp op,
                                        const CollectiveOptions& options) {
  return impl_->at_home().queue->issue(
      reduce_scatter_of(in, out, {dtype, op}, {rank(), world_size()}, options));
}
Work Communicator::barrier_async(const CollectiveOptions& options) {
  return impl_->at_home().queue->issue(barrier_of(options));
}
Work Communicator::reduce_async(ConstBytes in, Bytes out, DType dtype, ReduceOp op, Rank root,
                                const CollectiveOptions& options) {
  return impl_->at_home().queue->issue(
      reduce_of(in, out, {dtype, op}, root, {rank(), world_size()}, options));
}
Work Communicator::gather_async(ConstBytes in, Bytes out, DType dtype, Rank root,
                                const CollectiveOptions& options) {
  return impl_->at_home().queue->issue(
      gather_of(in, out, dtype, root, {rank(), world_size()}, options));
}
Work Communicator::scatter_async(ConstBytes in, Bytes out, DType dtype, Rank root,
                                 const CollectiveOptions& options) {
  return impl_->at_home().queue->issue(
      scatter_of(in, out, dtype, root, {rank(), world_size()}, options));
}
Work Communicator::all_to_all_async(ConstBytes in, Bytes out, DType dtype,
                                    const CollectiveOptions& options) {
  return impl_->at_home().queue->issue(
      all_to_all_of(in, out, dtype, {rank(), world_size()}, options));
}
Work Communicator::all_to_all_v_async(ConstBytes in, Bytes out, DType dtype,
                                      const SplitCounts& counts, const CollectiveOptions& options) {
  return impl_->at_home().queue->issue(
      all_to_all_v_of(in, out, dtype, counts, {rank(), world_size()}, options));
}
void Communicator::send(ConstBytes data, DType dtype, Rank destination, int tag,
                        const CollectiveOptions& options) {
  check_peer("send", destination, rank(), world_size());
  impl_->at_home().messages->run(send_of(data, dtype, destination, tag, options));
}
void Communicator::recv(Bytes data, DType dtype, Rank source, int tag,
                        const CollectiveOptions& options) {
  check_peer("recv", source, rank(), world_size());
  impl_->at_home().messages->run(recv_of(data, dtype, source, tag, options));
}
Rank Communicator::recv_from_any(Bytes data, DType dtype, int tag,
                                 const CollectiveOptions& options) {
  if (world_size() == 1) refuse_call("recv_from_any: a world of one has no other rank");
  return impl_->at_home().messages->run(recv_of(data, dtype, kAnySource, tag, options));
}
Work Communicator::send_async(ConstBytes data, DType dtype, Rank destination, int tag,
                              const CollectiveOptions& options) {
  check_peer("send", destination, rank(), world_size());
  return impl_->at_home().messages->issue(send_of(data, dtype, destination, tag, options));
}
Work Communicator::recv_async(Bytes data, DType dtype, Rank source, int tag,
                              const CollectiveOptions& options) {
  check_peer("recv", source, rank(), world_size());
  return impl_->at_home().messages->issue(recv_of(data, dtype, source, tag, options));
}

std::shared_ptr<SymmetricBuffer> Communicator::allocate_symmetric(
    size_t num_bytes, const CollectiveOptions& options) {
  if (num_bytes > kMaxSymmetricBytes) {
    refuse_call(
        format("allocate_symmetric: {} bytes; expected at most {}, is it a negative number?",
               num_bytes, kMaxSymmetricBytes));
  }
  Operation operation = make_operation(
      {OpKind::kAllocate, DType::kUint8, ReduceOp::kSum, 0, num_bytes}, {}, {}, options);
  impl_->at_home().queue->run(operation);
  return operation.allocated;
}

Duration Communicator::time_in_operations() const {
  return impl_->at_home().runner->time_spent();
}

std::vector<PeerStatus> Communicator::peers() const {
  const Roster& roster = impl_->at_home().monitor->roster();
  const std::vector<PeerView> views = impl_->at_home().monitor->peers();
  std::vector<PeerStatus> peers;
  for (int i = 0; i < impl_->world_size; ++i) {
    const auto at = static_cast<size_t>(i);
    const wire::RankCard& card = roster.card(i);
    peers.push_back({i, card.host, card.pid, describe_peer(views[at])});
  }
  return peers;
}

std::vector<Rank> Communicator::lost_ranks() const {
  const std::vector<PeerView> views = impl_->at_home().monitor->peers();
  std::vector<Rank> lost;
  for (size_t i = 0; i < views.size(); ++i) {
    if (views[i].is_gone || views[i].left_after) lost.push_back(static_cast<int>(i));
  }
  return lost;
}

FlightRecord Communicator::flight_record() const {
  return impl_->at_home().recorder->read();
}

void Communicator::abort(const std::string& reason) {
  impl_->at_home().abort(reason);
}
void Communicator::close(Deadline deadline) {
  Impl& impl = impl_->at_home();
  if (!impl.close(deadline)) return;
  if (const auto late = impl.fabric->late_errors()->take()) throw *late;
}

}  // namespace cadre
