#include "cadre/core/collective/net/net_engine.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/net/elementwise.h"

namespace cadre {
namespace {

// The number of different operations whose schedules are kept. A training step has a few dozen.
constexpr size_t kMaxSchedules = 256;

uint64_t sum_of_first(const std::vector<uint64_t>& sizes, size_t count) {
  return std::accumulate(sizes.begin(), sizes.begin() + static_cast<ptrdiff_t>(count), uint64_t{0});
}

void copy_unless_same(std::byte* to, ConstBytes from) {
  if (!from.empty() && to != from.data()) std::memcpy(to, from.data(), from.size());
}

}  // namespace

NetEngine::NetEngine(os::System& system, Transport& transport, const CrossoverTable& table)
    : transport_(transport), table_(table), executor_(system, transport) {}

const Schedule& NetEngine::schedule_for(const Choice& choice, uint64_t count, Rank root) {
  const ScheduleKey key{.algorithm = choose(choice, table_),
                        .kind = choice.kind,
                        .rank = transport_.rank(),
                        .world_size = transport_.world_size(),
                        .count = count,
                        .root = root,
                        .segment_count = table_.chain_segment_bytes / size_of(choice.dtype)};
  const auto known = schedules_.find(key);
  if (known != schedules_.end()) return known->second;
  if (schedules_.size() == kMaxSchedules) schedules_.clear();
  return schedules_.emplace(key, make_schedule(key)).first->second;
}

Status NetEngine::run_schedule(const OpContext& op, const Schedule& schedule, SlotMemory memory,
                               ReduceKind kind) {
  executor_.begin(op, schedule.key.algorithm);
  memory.scratch = scratch_.bytes(schedule.scratch_count * size_of(kind.dtype));
  return executor_.run(op, {schedule, 0, schedule.steps.size(), memory, kind});
}

Status NetEngine::run_among(const OpContext& op, ScheduleRun run) {
  run.memory.scratch = scratch_.bytes(run.schedule.scratch_count * size_of(run.kind.dtype));
  return executor_.run(op, run);
}

Capabilities NetEngine::capabilities() const {
  Capabilities can = full_capabilities("net");
  can.algorithms = to_string(table_);
  return can;
}

Completion NetEngine::submit(const OpContext& op, std::span<const Collective> collectives) {
  return run_in_order(op, collectives, [this](const OpContext& one, const Collective& collective) {
    return run(one, collective);
  });
}

Status NetEngine::run(const OpContext& op, const Collective& c) {
  switch (c.kind) {
    case OpKind::kBroadcast:
    case OpKind::kAllGather:
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll:
    case OpKind::kBarrier:
      return move(op, c);
    case OpKind::kAllReduce:
    case OpKind::kReduceScatter:
    case OpKind::kReduce:
      return reduce(op, c);
    case OpKind::kReduceScatterV:
      return reduce_scatter_v(op, c);
    case OpKind::kAllGatherV:
      return all_gather_v(op, c);
    case OpKind::kAllToAllV:
      return all_to_all_v(op, c);
    case OpKind::kSend:
    case OpKind::kRecv:
    case OpKind::kAllocate:
    case OpKind::kWaitSignal:
      break;
  }
  return Error(ErrorCode::kInternal, format("net engine: {} is not a collective", c.kind));
}

// The schedule moves the parts of other ranks; a rank's own part is copied here. The schedule
// counts bytes instead of elements.
Status NetEngine::move(const OpContext& op, const Collective& c) {
  const auto world_size = static_cast<size_t>(transport_.world_size());
  const bool is_whole_of_parts = c.kind != OpKind::kBroadcast && c.kind != OpKind::kBarrier;
  size_t part = c.kind == OpKind::kScatter ? c.out.size() : c.in.size();
  if (c.kind == OpKind::kAllToAll) part /= world_size;
  copy_own_part(c, part);
  const Schedule& schedule =
      schedule_for({.kind = c.kind,
                    .num_bytes = is_whole_of_parts ? part * world_size : part,
                    .world_size = transport_.world_size()},
                   part, c.root);
  return run_schedule(op, schedule, {.in = c.in.data(), .out = c.out.data()},
                      {.dtype = DType::kUint8});
}

void NetEngine::copy_own_part(const Collective& c, size_t part) const {
  const size_t own = static_cast<size_t>(transport_.rank().value) * part;
  const bool is_root = transport_.rank() == c.root;
  if (c.kind == OpKind::kAllGather || (c.kind == OpKind::kGather && is_root)) {
    copy_unless_same(c.out.data() + own, c.in);
  } else if (c.kind == OpKind::kScatter && is_root) {
    copy_unless_same(c.out.data(), c.in.subspan(own, part));
  } else if (c.kind == OpKind::kAllToAll) {
    copy_unless_same(c.out.data() + own, c.in.subspan(own, part));
  }
}

Status NetEngine::reduce(const OpContext& op, const Collective& c) {
  if (transport_.world_size() == 1) {
    copy_unless_same(c.out.data(), c.in);
    return {};
  }
  const size_t part = c.kind == OpKind::kReduceScatter ? c.out.size() : c.in.size();
  const Schedule& schedule = schedule_for({.kind = c.kind,
                                           .dtype = c.dtype,
                                           .num_bytes = c.in.size(),
                                           .world_size = transport_.world_size()},
                                          part / size_of(c.dtype), c.root);
  const SlotMemory memory{.in = c.in.data(), .out = c.out.data()};
  const ReduceKind kind{c.dtype, c.reduction.op()};
  if (!needs_widening(kind)) return run_schedule(op, schedule, memory, kind);
  if (c.kind == OpKind::kAllReduce) return all_reduce_widened(op, schedule, memory, kind);
  if (c.kind == OpKind::kReduce) return reduce_widened(op, schedule, memory, kind);
  return reduce_scatter_widened(op, schedule, c);
}

// Runs the reduce steps on a float32 copy of the elements, rounds each complete element once, and
// then runs the remaining steps, which only move data, on the rounded elements.
Status NetEngine::all_reduce_widened(const OpContext& op, const Schedule& schedule,
                                     SlotMemory memory, ReduceKind kind) {
  const uint64_t count = schedule.key.count;
  std::byte* const wide_bytes = wide_.bytes(count * sizeof(float));
  auto* const wide = reinterpret_cast<float*>(wide_bytes);
  widen(wide, memory.in, count, kind.dtype);
  executor_.begin(op, schedule.key.algorithm);
  CADRE_RETURN_IF_ERROR(executor_.run(op, {schedule,
                                           0,
                                           schedule.num_reduce_steps,
                                           {.in = wide_bytes, .out = wide_bytes},
                                           {DType::kFloat32, kind.op}}));
  for (const Step& step : schedule.steps) {
    if (!step.completes) continue;
    narrow(memory.out + step.recv.begin * size_of(kind.dtype), wide + step.recv.begin,
           step.recv.count, kind.dtype);
  }
  return executor_.run(op,
                       {schedule, schedule.num_reduce_steps, schedule.steps.size(), memory, kind});
}

Status NetEngine::reduce_scatter_widened(const OpContext& op, const Schedule& schedule,
                                         const Collective& c) {
  const uint64_t count = c.out.size() / size_of(c.dtype);
  const uint64_t in_count = c.in.size() / size_of(c.dtype);
  std::byte* const wide_in = wide_.bytes((in_count + count) * sizeof(float));
  std::byte* const wide_out = wide_in + in_count * sizeof(float);
  widen(reinterpret_cast<float*>(wide_in), c.in.data(), in_count, c.dtype);
  CADRE_RETURN_IF_ERROR(run_schedule(op, schedule, {.in = wide_in, .out = wide_out},
                                     {DType::kFloat32, c.reduction.op()}));
  narrow(c.out.data(), reinterpret_cast<const float*>(wide_out), count, c.dtype);
  return {};
}

Status NetEngine::reduce_scatter_v(const OpContext& op, const Collective& c) {
  if (transport_.world_size() == 1) {
    copy_unless_same(c.out.data(), c.in);
    return {};
  }
  const Schedule schedule = make_reduce_scatter_v_schedule(transport_.rank(), c.splits.input);
  const ReduceKind kind{c.dtype, c.reduction.op()};
  if (needs_widening(kind)) return reduce_scatter_widened(op, schedule, c);
  return run_schedule(op, schedule, {.in = c.in.data(), .out = c.out.data()}, kind);
}

// Runs all steps in float32; the root rounds the result at the end.
Status NetEngine::reduce_widened(const OpContext& op, const Schedule& schedule, SlotMemory memory,
                                 ReduceKind kind) {
  const uint64_t count = schedule.key.count;
  std::byte* const wide_bytes = wide_.bytes(count * sizeof(float));
  auto* const wide = reinterpret_cast<float*>(wide_bytes);
  widen(wide, memory.in, count, kind.dtype);
  CADRE_RETURN_IF_ERROR(run_schedule(op, schedule, {.in = wide_bytes, .out = wide_bytes},
                                     {DType::kFloat32, kind.op}));
  if (transport_.rank() == schedule.key.root) narrow(memory.out, wide, count, kind.dtype);
  return {};
}

Status NetEngine::all_gather_v(const OpContext& op, const Collective& c) {
  const Rank rank = transport_.rank();
  const std::vector<uint64_t> sizes = part_sizes(c).received;
  copy_unless_same(c.out.data() + sum_of_first(sizes, static_cast<size_t>(rank.value)), c.in);
  return run_schedule(op, make_all_gather_v_schedule(rank, sizes),
                      {.in = c.in.data(), .out = c.out.data()}, {.dtype = DType::kUint8});
}

Status NetEngine::all_to_all_v(const OpContext& op, const Collective& c) {
  const Rank rank = transport_.rank();
  const PartSizes sizes = part_sizes(c);
  PartTable table(transport_.world_size());
  table.set_row(rank, sizes);
  executor_.begin(op, Algorithm::kPairwise);
  CADRE_RETURN_IF_ERROR(exchange_sizes(op, table));
  CADRE_RETURN_IF_ERROR(table.check(op));

  const auto own = static_cast<size_t>(rank.value);
  copy_unless_same(c.out.data() + sum_of_first(sizes.received, own),
                   c.in.subspan(sum_of_first(sizes.sent, own), sizes.sent[own]));
  const Schedule schedule = make_all_to_all_v_schedule(rank, {sizes.sent, sizes.received});
  return executor_.run(op, {schedule,
                            0,
                            schedule.steps.size(),
                            {.in = c.in.data(), .out = c.out.data()},
                            {.dtype = DType::kUint8}});
}

// All ranks exchange the sizes first. So if a sender and a receiver pass different sizes for a
// part, all ranks detect it before any data is moved.
Status NetEngine::exchange_sizes(const OpContext& op, PartTable& table) {
  const Bytes rows = table.bytes();
  const Schedule& schedule = schedule_for(
      {.kind = OpKind::kAllGather, .num_bytes = rows.size(), .world_size = table.world_size()},
      PartTable::row_bytes(table.world_size()), 0);
  return executor_.run(op, {schedule,
                            0,
                            schedule.steps.size(),
                            {.in = table.row(transport_.rank()).data(), .out = rows.data()},
                            {.dtype = DType::kUint8},
                            "compare"});
}

}  // namespace cadre
