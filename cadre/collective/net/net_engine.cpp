#include "cadre/collective/net/net_engine.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "cadre/base/format.h"
#include "cadre/collective/net/elementwise.h"
#include "cadre/collective/reduction_table.h"

namespace cadre {
namespace {

// Schedules are kept for so many different operations; a training step has a few dozen.
constexpr size_t kMaxSchedules = 256;

Error bad_call(const OpContext& op, std::string_view what) {
  return Error(ErrorCode::kInvalidArgument,
               format("net engine: {} #{}: {}",
                      OpDescriptor::from_fingerprint(op.fingerprint).to_string(), op.number, what));
}

Status check_reduction(const OpContext& op, DType dtype, ReduceOp reduce_op) {
  const Status status = check_engine_reduction(dtype, reduce_op);
  if (status.ok()) return {};
  return status.error().with_context(format(
      "net engine: {} #{}", OpDescriptor::from_fingerprint(op.fingerprint).to_string(), op.number));
}

// `whole` bytes on one side against `num_parts` times `part` on the other.
Status check_sizes(const OpContext& op, size_t whole, size_t part, size_t num_parts) {
  if (whole == part * num_parts) return {};
  return bad_call(op, format("{} bytes on one side do not fit {} times {} on the other", whole,
                             num_parts, part));
}

Status check_elements(const OpContext& op, size_t num_bytes, DType dtype) {
  if (num_bytes % size_of(dtype) == 0) return {};
  return bad_call(op, format("{} bytes are no whole number of {} elements", num_bytes, dtype));
}

uint64_t sum_of(std::span<const uint64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
}

Status check_parts(const OpContext& op, size_t whole, std::span<const uint64_t> parts,
                   int world_size) {
  if (parts.size() == static_cast<size_t>(world_size) && sum_of(parts) == whole) return {};
  return bad_call(op, format("{} parts of {} bytes in all do not fit {} bytes for {} ranks",
                             parts.size(), sum_of(parts), whole, world_size));
}

void copy_unless_same(std::byte* to, ConstBytes from) {
  if (!from.empty() && to != from.data()) std::memcpy(to, from.data(), from.size());
}

// Minimum and maximum round nothing.
bool needs_widening(DType dtype, ReduceOp reduce_op) {
  const bool is_half = dtype == DType::kBfloat16 || dtype == DType::kFloat16;
  return is_half && reduce_op != ReduceOp::kMin && reduce_op != ReduceOp::kMax;
}

}  // namespace

NetEngine::NetEngine(os::System& system, Transport& transport, const CrossoverTable& table)
    : transport_(transport), table_(table), executor_(system, transport) {}

std::byte* NetEngine::Room::bytes(size_t num_bytes) {
  if (num_bytes > size_) {
    memory_ = std::make_unique_for_overwrite<std::byte[]>(num_bytes);
    size_ = num_bytes;
  }
  return memory_.get();
}

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

Status NetEngine::run(const OpContext& op, const Schedule& schedule, SlotMemory memory,
                      ReduceKind kind) {
  executor_.begin(op, schedule.key.algorithm);
  memory.scratch = scratch_.bytes(schedule.scratch_count * size_of(kind.dtype));
  return executor_.run(op, {schedule, 0, schedule.steps.size(), memory, kind});
}

Status NetEngine::broadcast(const OpContext& op, Bytes data, Rank root) {
  const Schedule& schedule = schedule_for(
      {.kind = OpKind::kBroadcast, .num_bytes = data.size(), .world_size = transport_.world_size()},
      data.size(), root);
  return run(op, schedule, {.in = data.data(), .out = data.data()}, {.dtype = DType::kUint8});
}

Status NetEngine::all_reduce(const OpContext& op, ConstBytes in, Bytes out, DType dtype,
                             ReduceOp reduce_op) {
  CADRE_RETURN_IF_ERROR(check_reduction(op, dtype, reduce_op));
  CADRE_RETURN_IF_ERROR(check_sizes(op, in.size(), out.size(), 1));
  CADRE_RETURN_IF_ERROR(check_elements(op, in.size(), dtype));
  if (transport_.world_size() == 1) {
    copy_unless_same(out.data(), in);
    return {};
  }
  const Schedule& schedule = schedule_for({.kind = OpKind::kAllReduce,
                                           .dtype = dtype,
                                           .num_bytes = in.size(),
                                           .world_size = transport_.world_size()},
                                          in.size() / size_of(dtype), 0);
  const SlotMemory memory{.in = in.data(), .out = out.data()};
  if (needs_widening(dtype, reduce_op))
    return all_reduce_widened(op, schedule, memory, {dtype, reduce_op});
  return run(op, schedule, memory, {dtype, reduce_op});
}

// The steps that add run on a float32 copy; what is complete is rounded once; the steps that only
// move run on the rounded result.
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

Status NetEngine::all_gather(const OpContext& op, ConstBytes in, Bytes out) {
  const auto world_size = static_cast<size_t>(transport_.world_size());
  CADRE_RETURN_IF_ERROR(check_sizes(op, out.size(), in.size(), world_size));
  copy_unless_same(out.data() + static_cast<size_t>(transport_.rank().value) * in.size(), in);
  const Schedule& schedule = schedule_for(
      {.kind = OpKind::kAllGather, .num_bytes = out.size(), .world_size = transport_.world_size()},
      in.size(), 0);
  return run(op, schedule, {.in = in.data(), .out = out.data()}, {.dtype = DType::kUint8});
}

Status NetEngine::reduce_scatter(const OpContext& op, ConstBytes in, Bytes out, DType dtype,
                                 ReduceOp reduce_op) {
  const auto world_size = static_cast<size_t>(transport_.world_size());
  CADRE_RETURN_IF_ERROR(check_reduction(op, dtype, reduce_op));
  CADRE_RETURN_IF_ERROR(check_sizes(op, in.size(), out.size(), world_size));
  CADRE_RETURN_IF_ERROR(check_elements(op, out.size(), dtype));
  if (world_size == 1) {
    copy_unless_same(out.data(), in);
    return {};
  }
  const Schedule& schedule = schedule_for({.kind = OpKind::kReduceScatter,
                                           .dtype = dtype,
                                           .num_bytes = in.size(),
                                           .world_size = transport_.world_size()},
                                          out.size() / size_of(dtype), 0);
  const SlotMemory memory{.in = in.data(), .out = out.data()};
  if (needs_widening(dtype, reduce_op)) {
    return reduce_scatter_widened(op, schedule, memory, {dtype, reduce_op});
  }
  return run(op, schedule, memory, {dtype, reduce_op});
}

Status NetEngine::reduce_scatter_widened(const OpContext& op, const Schedule& schedule,
                                         SlotMemory memory, ReduceKind kind) {
  const uint64_t count = schedule.key.count;
  const uint64_t in_count = count * static_cast<uint64_t>(transport_.world_size());
  std::byte* const wide_in = wide_.bytes((in_count + count) * sizeof(float));
  std::byte* const wide_out = wide_in + in_count * sizeof(float);
  widen(reinterpret_cast<float*>(wide_in), memory.in, in_count, kind.dtype);
  CADRE_RETURN_IF_ERROR(
      run(op, schedule, {.in = wide_in, .out = wide_out}, {DType::kFloat32, kind.op}));
  narrow(memory.out, reinterpret_cast<const float*>(wide_out), count, kind.dtype);
  return {};
}

Status NetEngine::barrier(const OpContext& op) {
  const Schedule& schedule =
      schedule_for({.kind = OpKind::kBarrier, .world_size = transport_.world_size()}, 0, 0);
  return run(op, schedule, {}, {.dtype = DType::kUint8});
}

Status NetEngine::reduce(const OpContext& op, ConstBytes in, Bytes out, DType dtype,
                         ReduceOp reduce_op, Rank root) {
  CADRE_RETURN_IF_ERROR(check_reduction(op, dtype, reduce_op));
  CADRE_RETURN_IF_ERROR(check_elements(op, in.size(), dtype));
  if (transport_.rank() == root) CADRE_RETURN_IF_ERROR(check_sizes(op, out.size(), in.size(), 1));
  if (transport_.world_size() == 1) {
    copy_unless_same(out.data(), in);
    return {};
  }
  const Schedule& schedule = schedule_for({.kind = OpKind::kReduce,
                                           .dtype = dtype,
                                           .num_bytes = in.size(),
                                           .world_size = transport_.world_size()},
                                          in.size() / size_of(dtype), root);
  const SlotMemory memory{.in = in.data(), .out = out.data()};
  if (needs_widening(dtype, reduce_op)) {
    return reduce_widened(op, schedule, memory, {dtype, reduce_op});
  }
  return run(op, schedule, memory, {dtype, reduce_op});
}

// All in float32; the root rounds at the end.
Status NetEngine::reduce_widened(const OpContext& op, const Schedule& schedule, SlotMemory memory,
                                 ReduceKind kind) {
  const uint64_t count = schedule.key.count;
  std::byte* const wide_bytes = wide_.bytes(count * sizeof(float));
  auto* const wide = reinterpret_cast<float*>(wide_bytes);
  widen(wide, memory.in, count, kind.dtype);
  CADRE_RETURN_IF_ERROR(
      run(op, schedule, {.in = wide_bytes, .out = wide_bytes}, {DType::kFloat32, kind.op}));
  if (transport_.rank() == schedule.key.root) narrow(memory.out, wide, count, kind.dtype);
  return {};
}

Status NetEngine::gather(const OpContext& op, ConstBytes in, Bytes out, Rank root) {
  const auto world_size = static_cast<size_t>(transport_.world_size());
  if (transport_.rank() == root) {
    CADRE_RETURN_IF_ERROR(check_sizes(op, out.size(), in.size(), world_size));
    copy_unless_same(out.data() + static_cast<size_t>(root.value) * in.size(), in);
  }
  const Schedule& schedule = schedule_for({.kind = OpKind::kGather,
                                           .num_bytes = in.size() * world_size,
                                           .world_size = transport_.world_size()},
                                          in.size(), root);
  return run(op, schedule, {.in = in.data(), .out = out.data()}, {.dtype = DType::kUint8});
}

Status NetEngine::scatter(const OpContext& op, ConstBytes in, Bytes out, Rank root) {
  const auto world_size = static_cast<size_t>(transport_.world_size());
  if (transport_.rank() == root) {
    CADRE_RETURN_IF_ERROR(check_sizes(op, in.size(), out.size(), world_size));
    copy_unless_same(out.data(),
                     in.subspan(static_cast<size_t>(root.value) * out.size(), out.size()));
  }
  const Schedule& schedule = schedule_for({.kind = OpKind::kScatter,
                                           .num_bytes = out.size() * world_size,
                                           .world_size = transport_.world_size()},
                                          out.size(), root);
  return run(op, schedule, {.in = in.data(), .out = out.data()}, {.dtype = DType::kUint8});
}

Status NetEngine::all_to_all(const OpContext& op, ConstBytes in, Bytes out) {
  const auto world_size = static_cast<size_t>(transport_.world_size());
  const size_t part = in.size() / world_size;
  CADRE_RETURN_IF_ERROR(check_sizes(op, in.size(), part, world_size));
  CADRE_RETURN_IF_ERROR(check_sizes(op, out.size(), part, world_size));
  const size_t own = static_cast<size_t>(transport_.rank().value) * part;
  copy_unless_same(out.data() + own, in.subspan(own, part));
  const Schedule& schedule = schedule_for(
      {.kind = OpKind::kAllToAll, .num_bytes = in.size(), .world_size = transport_.world_size()},
      part, 0);
  return run(op, schedule, {.in = in.data(), .out = out.data()}, {.dtype = DType::kUint8});
}

Status NetEngine::all_to_all_v(const OpContext& op, ConstBytes in, Bytes out,
                               const PartSizes& sizes) {
  const Rank rank = transport_.rank();
  CADRE_RETURN_IF_ERROR(check_parts(op, in.size(), sizes.sent, transport_.world_size()));
  CADRE_RETURN_IF_ERROR(check_parts(op, out.size(), sizes.received, transport_.world_size()));
  PartTable table(transport_.world_size());
  table.set_row(rank, sizes);
  executor_.begin(op, Algorithm::kPairwise);
  CADRE_RETURN_IF_ERROR(exchange_sizes(op, table));
  CADRE_RETURN_IF_ERROR(table.check(op));

  const auto own = static_cast<size_t>(rank.value);
  copy_unless_same(out.data() + sum_of(sizes.received.first(own)),
                   in.subspan(sum_of(sizes.sent.first(own)), sizes.sent[own]));
  const Schedule schedule = make_all_to_all_v_schedule(rank, {sizes.sent, sizes.received});
  return executor_.run(op, {schedule,
                            0,
                            schedule.steps.size(),
                            {.in = in.data(), .out = out.data()},
                            {.dtype = DType::kUint8}});
}

// So all ranks learn of parts that do not fit, and none has moved any data by then.
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
