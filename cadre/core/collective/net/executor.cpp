#include "cadre/core/collective/net/executor.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/net/elementwise.h"

namespace cadre {
namespace {

// The size of the buffer through which received bytes pass before they are added. It is half of a
// usual second-level cache.
constexpr size_t kStagingBytes = 256 << 10;
// The time after which a wait also polls peers from which no data is expected: a rank that runs a
// different operation may be the reason why this operation makes no progress.
constexpr Duration kUnsuspicious = std::chrono::milliseconds(5);

const char* phase_of(const ScheduleRun& run, size_t step) {
  if (run.phase != nullptr) return run.phase;
  switch (run.schedule.key.kind) {
    case OpKind::kBroadcast:
      return "copy";
    case OpKind::kBarrier:
      return "meet";
    case OpKind::kScatter:
      return "scatter";
    case OpKind::kAllToAll:
    case OpKind::kAllToAllV:
      return "exchange";
    case OpKind::kAllGatherV:
      return "gather";
    default:
      return step < run.schedule.num_reduce_steps ? "reduce" : "gather";
  }
}

ConstBytes bytes_of(const ScheduleRun& run, const Block& block) {
  const size_t size = size_of(run.kind.dtype);
  const std::byte* slot = block.slot == Slot::kInput    ? run.memory.in
                          : block.slot == Slot::kOutput ? run.memory.out
                                                        : run.memory.scratch;
  // An empty block may have a null address.
  return block.count == 0 ? ConstBytes()
                          : ConstBytes(slot + block.begin * size, block.count * size);
}

Bytes writable_bytes_of(const ScheduleRun& run, const Block& block) {
  const size_t size = size_of(run.kind.dtype);
  std::byte* slot = block.slot == Slot::kOutput ? run.memory.out : run.memory.scratch;
  return block.count == 0 ? Bytes() : Bytes(slot + block.begin * size, block.count * size);
}

// The memory for the elements that a step receives.
struct IncomingPlace {
  Combine combine = Combine::kStore;
  Bytes target;
  const std::byte* local = nullptr;  // is null for kStore
  ReduceKind kind;                   // kStore does not use it
  int divisor = 1;                   // the divisor of complete sums; 1 means no division
  // The step also sends the old content of the target, which must not be overwritten before it is
  // sent.
  bool target_is_sent = false;
};

// The receiving half of one step: stores received bytes at their position, or adds them piece by
// piece. Bytes to be added pass through a small staging buffer, which stays in the core's cache:
// each piece is added while it is in the cache and the rest is still being received. An Incoming
// exists for one step and borrows all memory; its errors are those of the Link.
class Incoming {
 public:
  Incoming(const IncomingPlace& place, Bytes staging) : place_(place), staging_(staging) {}

  // Receives and adds as much as possible. Returns more than 0 if there was any progress.
  // `num_sent` is the number of bytes of this step's send that have been sent.
  Result<size_t> advance(Link& from, const OperationHeader& operation, size_t num_sent);
  bool is_done(const Link& from) const {
    return from.has_header() && num_done_ == place_.target.size();
  }
  // Returns whether more bytes can be received now: false while the staging buffer is full.
  bool wants_bytes() const {
    return place_.combine == Combine::kStore || num_staged_ < staging_.size();
  }

 private:
  Result<size_t> store(Link& from, const OperationHeader& operation);
  size_t add_staged(size_t num_sent);

  IncomingPlace place_;
  Bytes staging_;
  size_t num_done_ = 0;    // the number of bytes of the target that are final
  size_t num_staged_ = 0;  // the number of bytes after the final ones that are in staging
};

Result<size_t> Incoming::advance(Link& from, const OperationHeader& operation, size_t num_sent) {
  if (place_.combine == Combine::kStore) return store(from, operation);
  const size_t missing = place_.target.size() - num_done_ - num_staged_;
  const size_t room = std::min(staging_.size() - num_staged_, missing);
  size_t received = 0;
  if (room > 0 || !from.has_header()) {
    const auto result = from.receive(operation, staging_.subspan(num_staged_, room));
    if (!result.ok()) return result;
    received = *result;
    num_staged_ += received;
  }
  return received + add_staged(num_sent);
}

Result<size_t> Incoming::store(Link& from, const OperationHeader& operation) {
  const auto received = from.receive(operation, place_.target.subspan(num_done_));
  if (received.ok()) num_done_ += *received;
  return received;
}

size_t Incoming::add_staged(size_t num_sent) {
  size_t size = num_staged_;
  if (place_.target_is_sent) size = std::min(size, num_sent - num_done_);
  size -= size % size_of(place_.kind.dtype);
  if (size == 0) return 0;
  std::byte* target = place_.target.data() + num_done_;
  std::array<const std::byte*, 2> operands = {staging_.data(), place_.local + num_done_};
  if (place_.combine == Combine::kLocalFirst) std::swap(operands[0], operands[1]);
  const size_t count = size / size_of(place_.kind.dtype);
  reduce(target, operands, count, place_.kind);
  if (place_.divisor != 1) divide(target, count, place_.kind.dtype, place_.divisor);
  num_done_ += size;
  num_staged_ -= size;
  if (num_staged_ > 0) std::memmove(staging_.data(), staging_.data() + size, num_staged_);
  return size;
}

IncomingPlace place_of(const ScheduleRun& run, const Step& step) {
  IncomingPlace place{
      .combine = step.combine, .target = writable_bytes_of(run, step.recv), .kind = run.kind};
  if (step.combine == Combine::kStore) return place;
  place.local = bytes_of(run, step.local).data();
  if (run.kind.op == ReduceOp::kAvg) {
    // The sum is divided once, when all ranks have contributed.
    place.kind.op = ReduceOp::kSum;
    if (step.completes) place.divisor = run.schedule.key.world_size;
  }
  place.target_is_sent =
      step.send_to != kNobody && bytes_of(run, step.send).data() == place.target.data();
  return place;
}

std::vector<Rank> all_ranks(int world_size) {
  std::vector<Rank> ranks;
  for (int rank = 0; rank < world_size; ++rank) ranks.emplace_back(rank);
  return ranks;
}

}  // namespace

// The ranks at distances 1, 2, 4, ... on both sides. A rank that waits announces its operation to
// them and to those that it waits for, and reads their announcements, so two of them that wait in
// different operations detect the mismatch. Any two ranks that wait are connected by a path of such
// pairs, since distance 1 alone connects all ranks. If the two ranks run different operations, so
// do two neighbours on the path. Ranks on the path that do not wait yet announce their operation
// when they do; the longer distances bypass ranks that never wait. A rank that finds a mismatch, or
// receives a refusal, sends a refusal of its operation to its own peers.
std::vector<Rank> watched_in(std::span<const Rank> ring, int index) {
  const auto size = static_cast<int>(ring.size());
  std::vector<Rank> ranks;
  for (int distance = 1; distance < size; distance *= 2) {
    for (const int at : {(index + distance) % size, (index - distance + size) % size}) {
      const Rank peer = ring[static_cast<size_t>(at)];
      if (std::ranges::find(ranks, peer) == ranks.end()) ranks.push_back(peer);
    }
  }
  return ranks;
}

Status run_once(IdleWork& work) {
  if (!work) return {};
  const IdleWork taken = std::exchange(work, nullptr);
  return taken();
}

Executor::Executor(os::System& system, Transport& transport)
    : system_(system),
      transport_(transport),
      links_(static_cast<size_t>(transport.world_size())),
      watched_(watched_in(all_ranks(transport.world_size()), transport.rank())),
      staging_(std::make_unique_for_overwrite<std::byte[]>(kStagingBytes)) {}

Link& Executor::link(Rank peer) {
  std::unique_ptr<Link>& link = links_[static_cast<size_t>(peer.value)];
  if (link == nullptr) {
    link = std::make_unique<Link>(transport_.channel(peer), history_);
    link->begin_operation();
  }
  return *link;
}

void Executor::begin(const OpContext& op, Algorithm algorithm) {
  header_ = {.algorithm = algorithm, .number = op.number, .fingerprint = op.fingerprint()};
  history_.add(header_);
  for (auto& peer : links_) {
    if (peer) peer->begin_operation();
  }
}

void Executor::watch(std::span<const Rank> ranks) {
  told_.insert(told_.end(), ranks.begin(), ranks.end());
  for (const Rank rank : ranks) {
    if (std::ranges::find(watched_, rank) == watched_.end()) watched_.push_back(rank);
  }
}

Status Executor::run(const OpContext& op, const ScheduleRun& run) {
  if (run.watched == nullptr && run.begin == 0) {
    for (const Rank peer : told_) link(peer).announce(header_);
  }
  for (size_t i = run.begin; i < run.end; ++i) {
    op.progress.set_phase(phase_of(run, i));
    CADRE_RETURN_IF_ERROR(run_step(op, run, run.schedule.steps[i]));
  }
  op.progress.set_waiting_for(kNobody);
  return {};
}

Status Executor::run_step(const OpContext& op, const ScheduleRun& run, const Step& step) {
  Link* to = step.send_to == kNobody ? nullptr : &link(step.send_to);
  Link* from = step.recv_from == kNobody ? nullptr : &link(step.recv_from);
  Incoming incoming(place_of(run, step), Bytes(staging_.get(), kStagingBytes));
  if (to) to->start_send(header_, bytes_of(run, step.send));
  for (;;) {
    size_t moved = 0;
    if (to && !to->is_send_done()) {
      const auto sent = to->advance_send();
      if (!sent.ok()) return fail(op, step.send_to, sent.error());
      moved += *sent;
    }
    if (from && !incoming.is_done(*from)) {
      const auto received = incoming.advance(*from, header_, to ? to->num_sent() : 0);
      if (!received.ok()) return fail(op, step.recv_from, received.error());
      CADRE_RETURN_IF_ERROR(check(op, step.recv_from));
      moved += *received;
    }
    const bool is_sending = to && !to->is_send_done();
    const bool is_receiving = from && !incoming.is_done(*from);
    if (!is_sending && !is_receiving) {
      if (from) from->end_message();
      return {};
    }
    if (moved > 0) continue;
    if (run.idle != nullptr && *run.idle) {
      CADRE_RETURN_IF_ERROR(run_once(*run.idle));
      op.progress.set_phase(phase_of(run, static_cast<size_t>(&step - run.schedule.steps.data())));
      continue;
    }
    std::array<ChannelInterest, 2> interests;
    size_t num_interests = 0;
    // The receive comes first: wait() records the peer of the first interest as the one that this
    // rank waits for, and error messages name that peer.
    if (is_receiving && incoming.wants_bytes()) {
      interests[num_interests++] = {.peer = step.recv_from, .want_recv = true};
    }
    if (is_sending) interests[num_interests++] = {.peer = step.send_to, .want_send = true};
    CADRE_RETURN_IF_ERROR(wait(op, run, std::span(interests.data(), num_interests)));
  }
}

Status Executor::wait(const OpContext& op, const ScheduleRun& run,
                      std::span<const ChannelInterest> interests) {
  op.progress.set_waiting_for(interests.front().peer);
  const Deadline suspicious = system_.deadline_in(kUnsuspicious);
  if (op.deadline <= suspicious) return transport_.wait(interests, op.deadline);
  const auto status = transport_.wait(interests, suspicious);
  if (status.ok() || status.error().code() != ErrorCode::kTimeout) return status;
  return wait_watching(op, run, interests);
}

Status Executor::wait_watching(const OpContext& op, const ScheduleRun& run,
                               std::span<const ChannelInterest> interests) {
  interests_.assign(interests.begin(), interests.end());
  for (const ChannelInterest& awaited : interests) link(awaited.peer).announce(header_);
  for (const Rank peer : run.watched == nullptr ? watched_ : *run.watched) {
    link(peer).announce(header_);
    const bool is_awaited =
        std::ranges::find(interests, peer, &ChannelInterest::peer) != interests.end();
    // The interest in sending stays until the peer has the announcement, because its connection may
    // not be open yet.
    const ChannelInterest interest{.peer = peer,
                                   .want_send = !is_awaited && !link(peer).is_send_done(),
                                   .want_recv = link(peer).wants_peek(),
                                   .is_optional = true};
    if (interest.want_send || interest.want_recv) interests_.push_back(interest);
  }
  CADRE_RETURN_IF_ERROR(transport_.wait(interests_, op.deadline));
  for (const ChannelInterest& watched : std::span(interests_).subspan(interests.size())) {
    Link& peer = link(watched.peer);
    if (watched.want_send) peer.advance_announcement();
    if (watched.want_recv) CADRE_RETURN_IF_ERROR(peer.peek(header_));
    // A peer that sends no data in this operation may have completed it and begun a later one,
    // which is no mismatch.
    if (!peer.is_ahead_of(header_)) CADRE_RETURN_IF_ERROR(check(op, watched.peer));
  }
  return {};
}

// Compares the announcement of the peer, if there is one, with this rank's operation.
Status Executor::check(const OpContext& op, Rank peer) {
  const auto theirs = link(peer).difference(header_);
  if (!theirs) return {};
  op.progress.set_waiting_for(peer);
  const auto text = [](const Fingerprint& fingerprint) {
    return OpDescriptor::from_fingerprint(fingerprint).to_string();
  };
  // The operation that this rank called with the peer's number, if this rank has completed it.
  const auto called = history_.find(theirs->number, header_);
  const bool is_running =
      theirs->number == header_.number && theirs->fingerprint == header_.fingerprint;
  const bool is_agreed = is_running || (called && *called == theirs->fingerprint);
  const std::string which = format("net engine: {} #{}", text(theirs->fingerprint), theirs->number);
  if (is_agreed && theirs->kind == OperationHeader::Kind::kRefusal) {
    // The refusal keeps the number of the operation that has failed, because a rank that is still
    // in that operation ignores the refusal of a later operation.
    refuse(*theirs);
    return Error(ErrorCode::kAborted,
                 format("{}: rank {} has ended this operation with an error, because another rank "
                        "called a different operation; look at the first failure",
                        which, peer));
  }
  if (is_running) {
    return Error(ErrorCode::kInternal,
                 format("{}: rank {} chose {} and rank {} chose {}; all ranks need the same "
                        "crossover table",
                        which, transport_.rank(), to_string(header_.algorithm), peer,
                        to_string(theirs->algorithm)));
  }
  op.progress.set_mismatch(peer, theirs->number, theirs->fingerprint);
  OperationHeader refused = header_;
  if (called && !is_agreed) {
    op.progress.set_own_call(theirs->number, *called);
    refused.number = theirs->number;
    refused.fingerprint = *called;
  }
  refuse(refused);
  return Error(ErrorCode::kInvalidArgument,
               format("net engine: rank {} called {} as #{}, but rank {} called {} as #{}",
                      transport_.rank(), text(op.fingerprint()), op.number, peer,
                      text(theirs->fingerprint), theirs->number));
}

// Sends the refusal to all ranks, because ranks that have left the operation do not forward it. No
// message is in progress on a channel that has no link, so the header can be sent on it directly.
void Executor::refuse(const OperationHeader& refused) {
  for (int peer = 0; peer < transport_.world_size(); ++peer) {
    if (peer == transport_.rank()) continue;
    const auto& link = links_[static_cast<size_t>(peer)];
    link != nullptr ? link->refuse(refused) : Link::refuse(transport_.channel(peer), refused);
  }
}

Error Executor::fail(const OpContext& op, Rank peer, const Error& error) const {
  op.progress.set_waiting_for(peer);
  return error;
}

}  // namespace cadre
