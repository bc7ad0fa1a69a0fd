#include "cadre/testing/core/fake_peers.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/reduce.h"
#include "cadre/core/collective/scale.h"

namespace cadre::testing {
namespace {

using Buffer = std::vector<std::byte>;

bool is_floating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBfloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

// Returns a copy of the input, because a rank's output may be the same memory. For PREMUL_SUM the
// copy is multiplied by the factor.
Buffer input_of(const Collective& c) {
  Buffer in(c.in.begin(), c.in.end());
  if (c.reduction.factor()) {
    scale(in.data(), in.data(), in.size() / size_of(c.dtype), c.dtype, *c.reduction.factor());
  }
  return in;
}

Buffer reduce_all(const std::vector<Buffer>& inputs, const Collective& c) {
  const ReduceOp op = c.reduction.factor() ? ReduceOp::kSum : c.reduction.op();
  std::vector<const std::byte*> pointers;
  for (const Buffer& input : inputs) pointers.push_back(input.data());
  Buffer result(inputs[0].size());
  reduce(result.data(), pointers, result.size() / size_of(c.dtype), {c.dtype, op});
  return result;
}

Buffer concatenate(const std::vector<Buffer>& inputs) {
  Buffer all;
  for (const Buffer& input : inputs) all.insert(all.end(), input.begin(), input.end());
  return all;
}

void write(Bytes out, ConstBytes from) {
  if (!out.empty()) std::memcpy(out.data(), from.data(), out.size());
}

PartSizes parts_of(const Collective& c, size_t world_size) {
  if (c.kind == OpKind::kAllToAllV) return part_sizes(c);
  const std::vector<uint64_t> equal(world_size, c.in.size() / world_size);
  return {.sent = equal, .received = equal};
}

uint64_t sum_of_first(const std::vector<uint64_t>& sizes, size_t count) {
  return std::accumulate(sizes.begin(), sizes.begin() + static_cast<ptrdiff_t>(count), uint64_t{0});
}

void exchange_parts(std::span<const Collective* const> calls, const std::vector<Buffer>& inputs) {
  for (size_t to = 0; to < calls.size(); ++to) {
    Bytes out = calls[to]->out;
    for (size_t from = 0; from < calls.size(); ++from) {
      const PartSizes parts = parts_of(*calls[from], calls.size());
      const size_t size = parts.sent[to];
      write(out.first(size), ConstBytes(inputs[from]).subspan(sum_of_first(parts.sent, to), size));
      out = out.subspan(size);
    }
  }
}

}  // namespace

void compute_collective(std::span<const Collective* const> calls) {
  const Collective& first = *calls.front();
  const auto root = static_cast<size_t>(first.root.value);
  std::vector<Buffer> inputs;
  for (const Collective* call : calls) inputs.push_back(input_of(*call));
  Buffer result;  // one rank's result, or the results of all ranks concatenated
  bool is_in_parts = false;
  switch (first.kind) {
    case OpKind::kAllToAll:
    case OpKind::kAllToAllV:
      exchange_parts(calls, inputs);
      return;
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      result = reduce_all(inputs, first);
      break;
    case OpKind::kReduceScatter:
    case OpKind::kReduceScatterV:
      result = reduce_all(inputs, first);
      is_in_parts = true;
      break;
    case OpKind::kAllGather:
    case OpKind::kAllGatherV:
    case OpKind::kGather:
      result = concatenate(inputs);
      break;
    case OpKind::kBroadcast:
      result = inputs[root];
      break;
    case OpKind::kScatter:
      result = inputs[root];
      is_in_parts = true;
      break;
    case OpKind::kBarrier:
    case OpKind::kSend:
    case OpKind::kRecv:
    case OpKind::kAllocate:
    case OpKind::kWaitSignal:
      return;
  }
  ConstBytes rest = result;
  for (const Collective* call : calls) {
    write(call->out, rest);  // `rest` is empty if the rank receives nothing
    if (is_in_parts) rest = rest.subspan(call->out.size());
  }
}

Status RanksInProcess::run(const FakeRank& self, const OpContext& op, const Collective& c) {
  const std::unique_ptr<os::Waiter> waiter = self.system.make_waiter();
  const Key key{self.group, op.number};
  const auto own = static_cast<size_t>(self.rank.value);
  PendingCall* pending = nullptr;
  {
    const std::lock_guard lock(mutex_);
    pending = &pending_[key];
    pending->arrivals.resize(static_cast<size_t>(self.world_size));
    pending->arrivals[own] = {&c, op.fingerprint(), waiter.get()};
    arrive(*pending, self);
  }
  Status status = wait(self, op, *pending, *waiter);
  const std::lock_guard lock(mutex_);
  Arrival& arrival = pending->arrivals[own];
  arrival.collective = nullptr;
  arrival.waiter = nullptr;
  if (++pending->num_left == self.world_size) pending_.erase(key);
  return status;
}

// The last rank that calls the collective computes the results of all ranks. The other ranks wait
// in their calls meanwhile, so that their buffers stay valid.
void RanksInProcess::arrive(PendingCall& pending, const FakeRank& self) {
  const Arrival& own = pending.arrivals[static_cast<size_t>(self.rank.value)];
  std::vector<const Collective*> calls;
  for (const Arrival& arrival : pending.arrivals) {
    if (arrival.fingerprint && arrival.fingerprint != own.fingerprint) pending.is_mismatched = true;
    if (arrival.collective != nullptr) calls.push_back(arrival.collective);
  }
  const bool is_full = std::ssize(calls) == self.world_size;
  if (is_full && !pending.is_mismatched) {
    bool fits = true;
    if (own.collective->kind == OpKind::kAllToAllV) {
      pending.parts.emplace(self.world_size);
      for (size_t i = 0; i < calls.size(); ++i) {
        pending.parts->set_row(static_cast<int>(i), part_sizes(*calls[i]));
      }
      OpProgress unused;
      fits = pending.parts
                 ->check({.number = 0,
                          .fingerprints = {&*own.fingerprint, 1},
                          .deadline = Deadline(TimePoint()),
                          .progress = unused})
                 .ok();
    }
    if (fits) compute_collective(calls);
    pending.is_done = true;
  }
  if (!pending.is_done && !pending.is_mismatched) return;
  for (const Arrival& arrival : pending.arrivals) {
    if (arrival.waiter != nullptr) arrival.waiter->unpark();
  }
}

// Returns the Status of a call that has completed, or an error if the ranks' calls mismatch.
Status RanksInProcess::result_of(const PendingCall& pending, const FakeRank& self,
                                 const OpContext& op) {
  if (pending.is_done) return pending.parts ? pending.parts->check(op) : Status();
  for (size_t i = 0; i < pending.arrivals.size(); ++i) {
    const std::optional<Fingerprint>& theirs = pending.arrivals[i].fingerprint;
    if (!theirs || *theirs == op.fingerprint()) continue;
    const Rank peer = static_cast<int>(i);
    op.progress.set_mismatch(peer, op.number, *theirs);
    return Error(ErrorCode::kInvalidArgument,
                 format("fake engine: rank {} called {} as #{}, but rank {} called {}", self.rank,
                        OpDescriptor::from_fingerprint(op.fingerprint()).to_string(), op.number,
                        peer, OpDescriptor::from_fingerprint(*theirs).to_string()));
  }
  return Error(ErrorCode::kInternal,
               "fake engine: the fingerprints mismatch, but no rank's fingerprint differs");
}

Status RanksInProcess::wait(const FakeRank& self, const OpContext& op, const PendingCall& pending,
                            os::Waiter& waiter) {
  while (true) {
    int missing = -1;
    {
      const std::lock_guard lock(mutex_);
      if (pending.is_done || pending.is_mismatched) return result_of(pending, self, op);
      const auto absent = std::ranges::find(pending.arrivals, nullptr,
                                            [](const Arrival& a) { return a.collective; });
      missing = static_cast<int>(absent - pending.arrivals.begin());
    }
    op.progress.set_waiting_for(missing);
    if (self.interrupt != nullptr && self.interrupt->is_raised()) {
      return Error(ErrorCode::kAborted, "fake engine: the group's Interrupt was raised");
    }
    if (op.deadline.has_passed(self.system.now())) {
      return Error(
          ErrorCode::kTimeout,
          format("fake engine: rank {} did not call the collective before the deadline", missing));
    }
    waiter.park(op.deadline.earlier(self.system.deadline_in(os::System::kMaxNap)));
  }
}

void FormulaPeers::restrict(Capabilities& can) const {
  for (const OpKind kind : {OpKind::kAllGatherV, OpKind::kScatter, OpKind::kAllToAllV}) {
    can.kinds.erase(kind);
  }
}

Status FormulaPeers::run(const FakeRank& self, const OpContext&, const Collective& own) {
  const auto world_size = static_cast<size_t>(self.world_size);
  std::vector<Buffer> inputs(world_size);
  std::vector<Buffer> outputs(world_size);
  std::vector<Collective> calls(world_size, own);
  std::vector<const Collective*> pointers;
  for (size_t rank = 0; rank < world_size; ++rank) {
    if (rank > 0) {
      inputs[rank] = input_of(static_cast<int>(rank), own);
      outputs[rank].resize(own.out.size());
      calls[rank].in = inputs[rank];
      calls[rank].out = outputs[rank];
    }
    pointers.push_back(&calls[rank]);
  }
  compute_collective(pointers);
  return {};
}

Buffer FormulaPeers::input_of(Rank peer, const Collective& c) const {
  Buffer in(c.in.begin(), c.in.end());
  if (reduces(c.kind) && is_floating(c.dtype)) {
    scale(in.data(), in.data(), in.size() / size_of(c.dtype), c.dtype, peer.value + 1);
  }
  return in;
}

}  // namespace cadre::testing
