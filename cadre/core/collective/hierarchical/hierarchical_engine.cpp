#include "cadre/core/collective/hierarchical/hierarchical_engine.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/net/elementwise.h"

namespace cadre {
namespace {

void copy_unless_same(std::byte* to, ConstBytes from) {
  if (!from.empty() && to != from.data()) std::memcpy(to, from.data(), from.size());
}

// Returns the sizes of the ranks' parts in the longer buffer, in elements of `size` bytes.
std::vector<uint64_t> parts_of(const Collective& c, int num_ranks, size_t size) {
  switch (c.kind) {
    case OpKind::kAllGatherV:
      return c.splits.output;
    case OpKind::kReduceScatterV:
      return c.splits.input;
    default: {
      const size_t part = c.kind == OpKind::kAllGather ? c.in.size() : c.out.size();
      return std::vector<uint64_t>(static_cast<size_t>(num_ranks), part / size);
    }
  }
}

uint64_t sum_of(std::span<const uint64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}

// Returns the sum of the counts of these ranks.
uint64_t sum_of(std::span<const Rank> ranks, std::span<const uint64_t> counts) {
  uint64_t sum = 0;
  for (const Rank rank : ranks) sum += counts[static_cast<size_t>(rank.value)];
  return sum;
}

// Returns where each part begins if they are contiguous and in rank order.
std::vector<uint64_t> begins_of(std::span<const uint64_t> counts) {
  std::vector<uint64_t> begins(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), begins.begin(), uint64_t{0});
  return begins;
}

}  // namespace

HierarchicalEngine::HierarchicalEngine(os::System& system, Transport& transport,
                                       HierarchicalEngineSetup setup)
    : rank_(transport.rank()),
      host_of_rank_(std::move(setup.host_of_rank)),
      local_(std::move(setup.local)),
      table_(setup.table),
      piece_bytes_(setup.piece_bytes),
      net_(system, transport, setup.table),
      hosts_(host_of_rank_) {}

Capabilities HierarchicalEngine::capabilities() const {
  Capabilities can = full_capabilities("hierarchical");
  can.algorithms = format("between hosts {}", to_string(table_));
  return can;
}

Completion HierarchicalEngine::submit(const OpContext& op,
                                      std::span<const Collective> collectives) {
  if (!has_agreed_) {
    const Status agreed = agree(op);
    if (!agreed.ok()) return agreed;
  }
  return run_in_order(op, collectives, [this](const OpContext& one, const Collective& collective) {
    return run(one, collective);
  });
}

// A host whose ranks share no memory is only known to these ranks. So before the first operation,
// as operation 0, every rank tells the others whether it shares memory.
Status HierarchicalEngine::agree(const OpContext& op) {
  const auto own = static_cast<std::byte>(local_ != nullptr ? 1 : 0);
  std::vector<std::byte> shares(host_of_rank_.size());
  Collective gather = Collective::all_gather({&own, 1}, shares, DType::kUint8);
  const auto descriptor = validate(gather, rank_, static_cast<int>(host_of_rank_.size()));
  if (!descriptor.ok()) return descriptor.error();
  const Fingerprint fingerprint = descriptor->fingerprint();
  const OpContext exchange{0, {&fingerprint, 1}, op.deadline, op.progress};
  CADRE_RETURN_IF_ERROR(net_.submit(exchange, {&gather, 1}).status());
  std::vector<int> host_of_rank = host_of_rank_;
  for (size_t rank = 0; rank < shares.size(); ++rank) {
    if (shares[rank] == std::byte{0}) host_of_rank[rank] = -1 - static_cast<int>(rank);
  }
  hosts_ = HostMap(host_of_rank);
  host_ = hosts_.host_of(rank_);
  index_ = hosts_.index_of(rank_);
  if (is_lead() && hosts_.most_ranks() > 1) net_.watch(watched_in(hosts_.column(0), host_));
  has_agreed_ = true;
  return {};
}

Status HierarchicalEngine::run(const OpContext& op, const Collective& c) {
  if (hosts_.most_ranks() == 1) return net_.submit(op, {&c, 1}).status();
  switch (c.kind) {
    case OpKind::kAllReduce:
      return all_reduce(op, c);
    case OpKind::kReduce:
      return reduce(op, c);
    case OpKind::kBroadcast:
      return broadcast(op, c);
    case OpKind::kAllGather:
    case OpKind::kAllGatherV:
      return all_gather(op, c);
    case OpKind::kReduceScatter:
    case OpKind::kReduceScatterV:
      return reduce_scatter(op, c);
    case OpKind::kBarrier:
      return barrier(op);
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll:
    case OpKind::kAllToAllV:
      return run_flat(op, c);
    case OpKind::kSend:
    case OpKind::kRecv:
    case OpKind::kAllocate:
    case OpKind::kWaitSignal:
      break;
  }
  return Error(ErrorCode::kInternal, format("hierarchical engine: {} is not a collective", c.kind));
}

// Every byte of these operations crosses the network once without a hierarchy, too. The ranks of a
// host first compare their operations: a rank of the host that is in another operation waits in the
// host engine, where it reads no messages of the net engine. The leads tell each other their
// operation (watch()), because a host whose ranks only send may be in its next operation before the
// other hosts notice a difference.
Status HierarchicalEngine::run_flat(const OpContext& op, const Collective& c) {
  if (local_ != nullptr) CADRE_RETURN_IF_ERROR(inside(op, Collective::barrier()));
  return net_.submit(op, {&c, 1}).status();
}

Status HierarchicalEngine::all_reduce(const OpContext& op, const Collective& c) {
  const Arithmetic arithmetic = arithmetic_of(c);
  const size_t size = size_of(c.dtype);
  const uint64_t count = c.in.size() / size;
  const Algorithm algorithm = choose({.kind = OpKind::kAllReduce,
                                      .dtype = c.dtype,
                                      .num_bytes = c.in.size(),
                                      .world_size = hosts_.num_hosts()},
                                     table_);
  net_.begin(op, algorithm);
  const size_t num_bytes = count * arithmetic.size();
  const Bytes all_sums = arithmetic.is_wide() ? Bytes(work_.bytes(num_bytes), num_bytes) : c.out;

  const auto before = [&](const Piece& piece) {
    return reduce_piece(op, c, all_sums, piece, arithmetic);
  };
  const auto cross = [&](const Piece& piece, IdleWork& idle) {
    if (!piece.is_crossed_by(index_)) return Status();
    const ScheduleKey key = key_across(OpKind::kAllReduce, algorithm, piece.slices.count);
    const uint64_t begin = piece.own_begin();
    return all_reduce_across(op, among_hosts(make_schedule(key), index_),
                             all_sums.data() + begin * arithmetic.size(),
                             c.out.data() + begin * size, arithmetic, idle);
  };
  const auto after = [&](const Piece& piece) {
    if (local_ == nullptr) return Status();
    const Slices& slices = piece.slices;
    const Bytes out = c.out.subspan(piece.begin * size, piece.count * size);
    if (slices.num_columns == 1) return inside(op, Collective::broadcast(out, c.dtype, 0));
    const Bytes own = out.subspan(slices.begin * size, slices.count * size);
    return inside(op, Collective::all_gather_v(own, out, c.dtype, slices.counts));
  };
  return in_pieces(pieces_of(count, arithmetic.size(), algorithm), before, cross, after);
}

// The pieces, slices and algorithms are those of all_reduce, so the root gets the same bits.
Status HierarchicalEngine::reduce(const OpContext& op, const Collective& c) {
  const Arithmetic arithmetic = arithmetic_of(c);
  const size_t size = size_of(c.dtype);
  const uint64_t count = c.in.size() / size;
  const Algorithm algorithm = choose({.kind = OpKind::kReduce,
                                      .dtype = c.dtype,
                                      .num_bytes = c.in.size(),
                                      .world_size = hosts_.num_hosts()},
                                     table_);
  net_.begin(op, algorithm);
  const size_t num_bytes = count * arithmetic.size();
  const Bytes all_sums(work_.bytes(num_bytes), num_bytes);
  const int root_host = hosts_.host_of(c.root);
  const bool is_on_root_host = host_ == root_host;
  // The ranks of the root's host gather the slices, of which only the root keeps the result.
  Bytes gathered = c.out;
  if (is_on_root_host && rank_ != c.root) gathered = {result_.bytes(c.in.size()), c.in.size()};

  const auto before = [&](const Piece& piece) {
    return reduce_piece(op, c, all_sums, piece, arithmetic);
  };
  const auto cross = [&](const Piece& piece, IdleWork& idle) {
    if (!piece.is_crossed_by(index_)) return Status();
    ScheduleKey key = key_across(OpKind::kReduce, algorithm, piece.slices.count);
    key.root = root_host;
    std::byte* const own = all_sums.data() + piece.own_begin() * arithmetic.size();
    return across(op, among_hosts(make_schedule(key), index_), {.in = own, .out = own},
                  arithmetic.summed, &idle);
  };
  const auto after = [&](const Piece& piece) {
    if (!is_on_root_host) return Status();
    const Slices& slices = piece.slices;
    const Bytes out = gathered.subspan(piece.begin * size, piece.count * size);
    const Bytes own = out.subspan(slices.begin * size, slices.count * size);
    complete(own.data(), all_sums.data() + piece.own_begin() * arithmetic.size(), slices.count,
             arithmetic);
    if (local_ == nullptr) return Status();
    return inside(op, Collective::all_gather_v(own, out, c.dtype, slices.counts));
  };
  return in_pieces(pieces_of(count, arithmetic.size(), algorithm), before, cross, after);
}

Status HierarchicalEngine::broadcast(const OpContext& op, const Collective& c) {
  const Algorithm algorithm = choose(
      {.kind = OpKind::kBroadcast, .num_bytes = c.out.size(), .world_size = hosts_.num_hosts()},
      table_);
  net_.begin(op, algorithm);
  const int root_host = hosts_.host_of(c.root);
  const bool has_root = host_ == root_host;
  // The root's host shares the data first, because the rank that sends it may not be the root.
  if (has_root && local_ != nullptr) {
    CADRE_RETURN_IF_ERROR(
        inside(op, Collective::broadcast(c.out, DType::kUint8, hosts_.index_of(c.root))));
  }
  if (is_lead()) {
    ScheduleKey key = key_across(OpKind::kBroadcast, algorithm, c.out.size());
    key.root = root_host;
    CADRE_RETURN_IF_ERROR(across(op, among_hosts(make_schedule(key), 0),
                                 {.in = c.out.data(), .out = c.out.data()}, {DType::kUint8}));
  }
  if (has_root || local_ == nullptr) return {};
  return inside(op, Collective::broadcast(c.out, DType::kUint8, 0));
}

// The ranks of a host gather their parts, the leads exchange the parts of the hosts, and each
// shares the result with its host. The parts are exchanged in host order.
Status HierarchicalEngine::all_gather(const OpContext& op, const Collective& c) {
  const std::vector<uint64_t> parts = parts_of(c, hosts_.num_ranks(), size_of(c.dtype));
  const size_t size = size_of(c.dtype);
  const bool is_in_place = hosts_.is_in_host_order();
  const Bytes all = is_in_place ? c.out : Bytes(work_.bytes(c.out.size()), c.out.size());
  std::vector<uint64_t> bytes_of_host;
  for (int host = 0; host < hosts_.num_hosts(); ++host) {
    bytes_of_host.push_back(sum_of(hosts_.ranks_of(host), parts) * size);
  }
  const size_t host_begin = begins_of(bytes_of_host)[static_cast<size_t>(host_)];
  const Bytes of_host = all.subspan(host_begin, bytes_of_host[static_cast<size_t>(host_)]);
  net_.begin(op, Algorithm::kPairwise);
  if (local_ == nullptr) {
    copy_unless_same(of_host.data(), c.in);
  } else {
    std::vector<uint64_t> bytes_of_local;
    for (const Rank rank : hosts_.ranks_of(host_)) {
      bytes_of_local.push_back(parts[static_cast<size_t>(rank.value)] * size);
    }
    CADRE_RETURN_IF_ERROR(inside(
        op, Collective::all_gather_v(c.in, of_host, DType::kUint8, std::move(bytes_of_local))));
  }
  if (is_lead()) {
    CADRE_RETURN_IF_ERROR(across(op,
                                 among_hosts(make_all_gather_v_schedule(host_, bytes_of_host), 0),
                                 {.in = of_host.data(), .out = all.data()}, {DType::kUint8}));
  }
  if (local_ != nullptr) {
    CADRE_RETURN_IF_ERROR(inside(op, Collective::broadcast(all, DType::kUint8, 0)));
  }
  if (is_in_place) return {};
  const std::vector<uint64_t> begins = begins_of(parts);
  const std::byte* from = all.data();
  for (const Rank rank : hosts_.in_host_order()) {
    const auto index = static_cast<size_t>(rank.value);
    copy_unless_same(c.out.data() + begins[index] * size, {from, parts[index] * size});
    from += parts[index] * size;
  }
  return {};
}

// If all hosts have as many ranks, the rank with index i of a host gets the parts that belong to
// the ranks with index i of all hosts, so that the exchange between hosts gives each rank its own
// part. Else the lead of each host gets the parts of all ranks of its host.
Status HierarchicalEngine::reduce_scatter(const OpContext& op, const Collective& c) {
  const Arithmetic arithmetic = arithmetic_of(c);
  const std::vector<uint64_t> parts = parts_of(c, hosts_.num_ranks(), size_of(c.dtype));
  const std::vector<uint64_t> begins = begins_of(parts);
  const size_t size = size_of(c.dtype);
  const bool is_even = hosts_.fewest_ranks() == hosts_.most_ranks();
  net_.begin(op, Algorithm::kRing);

  // The input in the order in which the ranks of a host take it.
  std::vector<Rank> order;
  std::vector<uint64_t> counts(static_cast<size_t>(num_local()));
  for (int index = 0; is_even && index < num_local(); ++index) {
    const std::vector<Rank>& column = hosts_.column(index);
    order.insert(order.end(), column.begin(), column.end());
    counts[static_cast<size_t>(index)] = sum_of(column, parts);
  }
  if (!is_even) {
    order = hosts_.in_host_order();
    counts[0] = sum_of(parts);
  }
  const size_t num_bytes = sum_of(parts) * arithmetic.size();
  const Bytes sums(work_.bytes(num_bytes), num_bytes);
  std::byte* to = sums.data();
  for (const Rank rank : order) {
    const auto index = static_cast<size_t>(rank.value);
    const ConstBytes part = c.in.subspan(begins[index] * size, parts[index] * size);
    const size_t num_summed = parts[index] * arithmetic.size();
    copy_unless_same(to, widened(part, {to, num_summed}, arithmetic));
    to += num_summed;
  }
  Slices slices = slices_of(std::move(counts));
  slices.num_columns = is_even ? hosts_.fewest_ranks() : 1;
  CADRE_RETURN_IF_ERROR(reduce_inside(op, sums, sums, slices, arithmetic.summed));

  std::vector<uint64_t> count_of_host;
  for (int host = 0; host < hosts_.num_hosts(); ++host) {
    const std::vector<Rank>& ranks = hosts_.ranks_of(host);
    count_of_host.push_back(
        is_even ? parts[static_cast<size_t>(hosts_.column(index_)[static_cast<size_t>(host)].value)]
                : sum_of(ranks, parts));
  }
  const uint64_t own_count = count_of_host[static_cast<size_t>(host_)];
  // A part of an even reduce_scatter is complete in place; else the ranks of the host share one
  // result.
  const size_t summed_bytes = own_count * arithmetic.size();
  std::byte* const result = result_.bytes(summed_bytes + own_count * size);
  std::byte* const shared = result + summed_bytes;
  const bool is_own = is_even || local_ == nullptr;
  if (index_ < slices.num_columns) {
    CADRE_RETURN_IF_ERROR(across(
        op, among_hosts(make_reduce_scatter_v_schedule(host_, count_of_host), index_),
        {.in = sums.data() + slices.begin * arithmetic.size(), .out = result}, arithmetic.summed));
    complete(is_own ? c.out.data() : shared, result, own_count, arithmetic);
  }
  if (is_own) return {};
  CADRE_RETURN_IF_ERROR(
      inside(op, Collective::broadcast({shared, own_count * size}, DType::kUint8, 0)));
  const std::span<const Rank> before =
      std::span(hosts_.ranks_of(host_)).first(static_cast<size_t>(index_));
  copy_unless_same(c.out.data(), {shared + sum_of(before, parts) * size, c.out.size()});
  return {};
}

Status HierarchicalEngine::barrier(const OpContext& op) {
  net_.begin(op, Algorithm::kDissemination);
  if (local_ != nullptr) CADRE_RETURN_IF_ERROR(inside(op, Collective::barrier()));
  if (is_lead()) {
    CADRE_RETURN_IF_ERROR(across(
        op,
        among_hosts(make_schedule(key_across(OpKind::kBarrier, Algorithm::kDissemination, 0)), 0),
        {}, {DType::kUint8}));
  }
  return local_ == nullptr ? Status() : inside(op, Collective::barrier());
}

HierarchicalEngine::Arithmetic HierarchicalEngine::arithmetic_of(const Collective& c) const {
  Arithmetic arithmetic{.given = {c.dtype, c.reduction.op()}};
  arithmetic.summed = arithmetic.given;
  if (needs_widening(arithmetic.given)) arithmetic.summed.dtype = DType::kFloat32;
  if (arithmetic.given.op == ReduceOp::kAvg) {
    arithmetic.summed.op = ReduceOp::kSum;
    arithmetic.divisor = hosts_.num_ranks();
  }
  return arithmetic;
}

HierarchicalEngine::Slices HierarchicalEngine::slices_of(std::vector<uint64_t> counts) const {
  Slices slices;
  slices.begin = sum_of(std::span(counts).first(static_cast<size_t>(index_)));
  slices.count = counts[static_cast<size_t>(index_)];
  slices.counts = std::move(counts);
  return slices;
}

// A ring is used for large data, which is divided among the ranks of a host. Small data goes
// through the lead.
HierarchicalEngine::Slices HierarchicalEngine::even_slices(uint64_t count,
                                                           Algorithm algorithm) const {
  const int num_columns = algorithm == Algorithm::kRing ? hosts_.fewest_ranks() : 1;
  std::vector<uint64_t> counts(static_cast<size_t>(num_local()));
  for (int index = 0; index < num_columns; ++index) {
    counts[static_cast<size_t>(index)] = part_of(count, num_columns, index).count;
  }
  Slices slices = slices_of(std::move(counts));
  slices.num_columns = num_columns;
  return slices;
}

// Small data crosses in one piece.
std::vector<HierarchicalEngine::Piece> HierarchicalEngine::pieces_of(uint64_t count, size_t size,
                                                                     Algorithm algorithm) const {
  int num_pieces = 1;
  if (algorithm == Algorithm::kRing) {
    const uint64_t most = piece_bytes_ * static_cast<uint64_t>(hosts_.fewest_ranks()) / size;
    num_pieces = static_cast<int>(std::max<uint64_t>((count + most - 1) / most, 1));
  }
  std::vector<Piece> pieces;
  for (int i = 0; i < num_pieces; ++i) {
    const Block part = part_of(count, num_pieces, i);
    pieces.push_back({part.begin, part.count, even_slices(part.count, algorithm)});
  }
  return pieces;
}

// A rank that waits in the host engine for another rank of its host does not move its data over
// the network meanwhile. It cannot wait for ever: that rank runs its idle work before it waits for
// the network, so it enters the same operation of the host engine. All ranks of a host run the host
// stages in the same order, also those that exchange nothing over the network.
Status HierarchicalEngine::in_pieces(std::span<const Piece> pieces,
                                     const std::function<Status(const Piece&)>& before,
                                     const std::function<Status(const Piece&, IdleWork&)>& cross,
                                     const std::function<Status(const Piece&)>& after) {
  CADRE_RETURN_IF_ERROR(before(pieces[0]));
  for (size_t i = 0; i < pieces.size(); ++i) {
    IdleWork idle = [&]() -> Status {
      if (i > 0) CADRE_RETURN_IF_ERROR(after(pieces[i - 1]));
      return i + 1 < pieces.size() ? before(pieces[i + 1]) : Status();
    };
    CADRE_RETURN_IF_ERROR(cross(pieces[i], idle));
    CADRE_RETURN_IF_ERROR(run_once(idle));
  }
  return after(pieces.back());
}

Status HierarchicalEngine::reduce_piece(const OpContext& op, const Collective& c, Bytes all_sums,
                                        const Piece& piece, const Arithmetic& arithmetic) {
  const size_t size = size_of(c.dtype);
  const Bytes sums =
      all_sums.subspan(piece.begin * arithmetic.size(), piece.count * arithmetic.size());
  const ConstBytes in = c.in.subspan(piece.begin * size, piece.count * size);
  return reduce_inside(op, widened(in, sums, arithmetic), sums, piece.slices, arithmetic.summed);
}

Status HierarchicalEngine::reduce_inside(const OpContext& op, ConstBytes in, Bytes sums,
                                         const Slices& slices, ReduceKind kind) {
  if (local_ == nullptr) {
    copy_unless_same(sums.data(), in);
    return {};
  }
  const size_t size = size_of(kind.dtype);
  if (slices.num_columns == 1) {
    return inside(op, Collective::reduce(in, is_lead() ? sums : Bytes(), kind.dtype, kind.op, 0));
  }
  return inside(
      op, Collective::reduce_scatter_v(in, sums.subspan(slices.begin * size, slices.count * size),
                                       kind.dtype, kind.op, slices.counts));
}

// Returns the input in the dtype of partial results: `in` itself, or `wide` with its elements.
ConstBytes HierarchicalEngine::widened(ConstBytes in, Bytes wide,
                                       const Arithmetic& arithmetic) const {
  if (!arithmetic.is_wide()) return in;
  widen(reinterpret_cast<float*>(wide.data()), in.data(),
        in.size() / size_of(arithmetic.given.dtype), arithmetic.given.dtype);
  return wide;
}

// Writes the results for complete sums to `out`: divided for an AVG, and rounded if they are wide.
// Changes the sums.
void HierarchicalEngine::complete(std::byte* out, std::byte* sums, uint64_t count,
                                  const Arithmetic& arithmetic) const {
  if (arithmetic.divisor != 1) divide(sums, count, arithmetic.summed.dtype, arithmetic.divisor);
  if (arithmetic.is_wide()) {
    narrow(out, reinterpret_cast<const float*>(sums), count, arithmetic.given.dtype);
  } else {
    copy_unless_same(out, {sums, count * arithmetic.size()});
  }
}

Status HierarchicalEngine::inside(const OpContext& op, const Collective& c) {
  return local_->submit(op, {&c, 1}).status();
}

Schedule HierarchicalEngine::among_hosts(Schedule schedule, int index) const {
  const std::vector<Rank>& column = hosts_.column(index);
  const auto rank_at = [&column](int host) {
    return host == kNobody ? kNobody : column[static_cast<size_t>(host)].value;
  };
  for (Step& step : schedule.steps) {
    step.send_to = rank_at(step.send_to);
    step.recv_from = rank_at(step.recv_from);
  }
  return schedule;
}

Status HierarchicalEngine::across(const OpContext& op, const Schedule& schedule, SlotMemory memory,
                                  ReduceKind kind, IdleWork* idle) {
  return across(op, {.schedule = schedule,
                     .end = schedule.steps.size(),
                     .memory = memory,
                     .kind = kind,
                     .idle = idle});
}

Status HierarchicalEngine::across(const OpContext& op, ScheduleRun run) {
  const std::vector<Rank> watched = watched_in(hosts_.column(index_), host_);
  run.watched = &watched;
  return net_.run_among(op, run);
}

// Runs the reduce steps on the sums, rounds each complete element once, and then runs the remaining
// steps, which only move data, on the results.
Status HierarchicalEngine::all_reduce_across(const OpContext& op, const Schedule& schedule,
                                             std::byte* sums, std::byte* out,
                                             const Arithmetic& arithmetic, IdleWork& idle) {
  CADRE_RETURN_IF_ERROR(across(op, {.schedule = schedule,
                                    .end = schedule.num_reduce_steps,
                                    .memory = {.in = sums, .out = sums},
                                    .kind = arithmetic.summed,
                                    .idle = &idle}));
  for (const Step& step : schedule.steps) {
    if (!step.completes) continue;
    complete(out + step.recv.begin * size_of(arithmetic.given.dtype),
             sums + step.recv.begin * arithmetic.size(), step.recv.count, arithmetic);
  }
  return across(op, {.schedule = schedule,
                     .begin = schedule.num_reduce_steps,
                     .end = schedule.steps.size(),
                     .memory = {.in = out, .out = out},
                     .kind = {.dtype = arithmetic.given.dtype},
                     .idle = &idle});
}

ScheduleKey HierarchicalEngine::key_across(OpKind kind, Algorithm algorithm, uint64_t count) const {
  return {.algorithm = algorithm,
          .kind = kind,
          .rank = host_,
          .world_size = hosts_.num_hosts(),
          .count = count,
          .segment_count = table_.chain_segment_bytes};
}

}  // namespace cadre
