#include "cadre/parallel/shard/shard_fence.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/step_agreement.h"
#include "cadre/tensor/hooks/shard_mark.h"
#include "cadre/tensor/optim/optimizer_options.h"

namespace cadre::shard {
namespace {

constexpr uint32_t kWritten = 0;  // the signal to the other ranks at the end of an update
constexpr uint32_t kOwn = 1;      // a signal that a rank sends to itself
constexpr int64_t kWordsOfPage =
    SymmetricTensor::kPageBytes / static_cast<int64_t>(sizeof(uint64_t));

}  // namespace

bool ShardFence::prepare(const wrap::LocatedGroup& group) {
  if (is_writing_) {
    throw Error(ErrorCode::kInvalidArgument, format("{}: parameters cannot be sharded during an "
                                                    "update; shard them before the update begins",
                                                    where()));
  }
  if (group_ && (group_->world_size() != group.world_size() || group_->rank() != group.rank())) {
    throw Error(ErrorCode::kInvalidArgument,
                format("ShardFence: one update cannot write parameters of two groups, rank {} of "
                       "{} and rank {} of {}; use a fence for each group",
                       group_->rank(), group_->world_size(), group.rank(), group.world_size()));
  }
  if (group_) return true;
  versions_ = group.map_parts(kWordsOfPage, at::kLong);
  if (!versions_) return false;
  group_ = group;
  pages_ = versions_->whole();
  return true;
}

void ShardFence::add(FlatParameters& unit) {
  // This barrier ensures that all ranks have written the first values of their shards.
  if (unit.is_mapped()) meet(std::nullopt);
  units_.push_back(&unit);
  had_units_ = true;
}

void ShardFence::remove(const FlatParameters& unit) {
  std::erase(units_, &unit);
}

std::string ShardFence::where() const {
  return group_ ? format("updating mapped shards, {}", group_->rank_text()) : "updating shards";
}

std::string ShardFence::names() const {
  if (units_.empty()) return "parameters that are gone";
  if (units_.size() == 1) return format("parameters {}", units_[0]->name());
  return format("parameters {} and those of {} more units", units_[0]->name(), units_.size() - 1);
}

uint64_t ShardFence::version_of(int rank) const {
  auto* const words = static_cast<uint64_t*>(pages_.mutable_data_ptr());
  return std::atomic_ref(words[rank * kWordsOfPage]).load(std::memory_order_acquire);
}

void ShardFence::publish_version(uint64_t version) {
  auto* const words = static_cast<uint64_t*>(versions_->local().mutable_data_ptr());
  std::atomic_ref(words[0]).store(version, std::memory_order_release);
}

// Waits until all ranks have called this function. If one of them passes a problem, throws on all
// ranks.
void ShardFence::meet(const std::optional<Error>& problem) {
  const at::Tensor first =
      at::tensor({problem ? static_cast<int64_t>(group_->rank()) : -1}, at::kLong);
  communicate([&] {
    try {
      group_->all_reduce(first, ReduceOp::kMax);
    } catch (const Error& error) {
      throw error.with_context(format("{}: waiting until all ranks write their shards", where()));
    }
  });
  if (problem) throw *problem;
  const int64_t rank = first.const_data_ptr<int64_t>()[0];
  if (rank < 0) return;
  throw Error(ErrorCode::kAborted,
              format("{}: rank {} cannot take part; look at its error", where(), rank))
      .with_culprit(static_cast<int>(rank));
}

// Marks all parameters as stale, so that this rank does not read the shards of other ranks any
// more.
void ShardFence::withdraw() {
  for (FlatParameters* const unit : units_) unit->mark_stale();
}

const ProcessGroup* ShardFence::stepping_ranks() const {
  if (ranks_) return &*ranks_;
  return units_.empty() ? nullptr : &units_[0]->group().process_group();
}

void ShardFence::check_on_all(const char* call, const std::function<void()>& check) const {
  const ProcessGroup* const ranks = stepping_ranks();
  if (ranks == nullptr) return check();
  check_on_all_ranks(*ranks, call, check);
}

void ShardFence::agree_on_step(const Step& step) {
  const ProcessGroup* const ranks = stepping_ranks();
  // If all units were destroyed, begin_update() throws.
  if (ranks == nullptr || units_.empty()) return;
  const auto check = [&] {
    if (failure_) throw *failure_;
    for (const FlatParameters* const unit : units_) unit->check_in_place();
    for (const torch::optim::OptimizerParamGroup& group : step.groups) {
      for (const at::Tensor& parameter : group.params()) {
        const wrap::ShardMark* const mark = wrap::shard_mark_of(parameter);
        if (mark == nullptr || mark->fence == nullptr) continue;
        if (mark->fence != this) {
          throw Error(
              ErrorCode::kInvalidArgument,
              format("cadre::ShardedOptimizer: the shard of \"{}\", {}, belongs to another wrapper "
                     "than the one with which the optimizer was made, so the ranks cannot compare "
                     "its gradient and state before a step; make one optimizer for each wrapper",
                     mark->parameter, mark->owner));
        }
        check_gradient(parameter);
      }
    }
  };
  const optim_state::GroupTerms terms{
      .groups = step.groups,
      .defaults = nullptr,
      .name_of =
          [this](const at::Tensor& parameter) {
            const wrap::ShardMark* const mark = wrap::shard_mark_of(parameter);
            return mark != nullptr && mark->fence == this ? mark->parameter : std::string();
          },
      .state_mark_of = step.state_mark_of};
  const wrap::LocatedGroup located(*ranks,
                                   {.wrapper = "ShardedOptimizer", .module = step.optimizer});
  located.enter({"its step {}", step.number});
  shard::agree_on_step(located,
                       {.subject = "cadre::ShardedOptimizer",
                        .check = check,
                        .digest = [&] { return digest_of(terms); },
                        .fields =
                            [&] {
                              std::vector<AgreedField> fields;
                              add_fields_of(terms, fields);
                              return fields;
                            },
                        .remedy = "give all ranks the same groups with the same options, load "
                                  "the same state on all of them, and call step() on all or none"});
  if (located.rank() == 0) uncompared_options_.warn(located.log_sink(), "shard", terms);
}

void ShardFence::begin_update() {
  if (failure_) throw *failure_;
  if (is_writing_) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: an update was begun inside of another update; end the outer one first",
                       where()));
  }
  if (units_.empty() && had_units_) {
    throw Error(
        ErrorCode::kInvalidArgument,
        format("{}: the wrapper and its parameters were destroyed, so nothing would read the "
               "shards that the optimizer writes; keep the wrapper as long as its optimizer steps",
               where()));
  }
  if (!versions_) {
    withdraw();
    is_writing_ = true;
    return;
  }
  // Receives the signals of the last update first, so that they are not taken for signals of the
  // new one. If this throws, it throws on all ranks.
  if (is_awaiting_) wait_for_owners();
  std::optional<Error> problem;
  try {
    withdraw();
  } catch (const Error& error) {
    problem = error;
  }
  meet(problem);
  publish_version(2 * num_updates_ + 1);
  is_writing_ = true;
  for (FlatParameters* const unit : units_) unit->allow_writes();
}

void ShardFence::end_update() {
  if (!is_writing_) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: end_update() without begin_update()", where()));
  }
  if (versions_) {
    const at::NoGradGuard no_grad;
    for (FlatParameters* const unit : units_) unit->end_writes();
  }
  is_writing_ = false;
  ++num_updates_;
  if (!versions_) return;
  publish_version(2 * num_updates_);
  is_awaiting_ = true;
  communicate([&] { versions_->signal_peers(kWritten); });
}

void ShardFence::abandon_update(const std::string& reason) noexcept {
  if (!is_writing_) return;
  is_writing_ = false;
  if (!versions_) return;
  failure_ = Error(ErrorCode::kCorruption,
                   format("{}: the step ended by an exception while it wrote {}, which may be half "
                          "written: {}. Resume from the last snapshot",
                          where(), names(), reason));
  try {
    for (FlatParameters* const unit : units_) unit->guard_writes();
    // The version stays odd, so that the other ranks recognize half-written shards.
    versions_->signal_peers(kWritten);
  } catch (...) {
    // The group has failed. Its failure is reported to all ranks, so the signals are not needed.
  }
}

void ShardFence::wait_for_owners() {
  if (failure_) throw *failure_;
  if (is_writing_) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: {} are used during an update; end the update first", where(), names()));
  }
  communicate([&] {
    if (is_awaiting_) {
      versions_->wait_for_peers(kWritten);
    } else {
      // There is no update to wait for. Waiting for a signal that this rank sends to itself returns
      // at once, but throws if the group has failed, as a gather would: the shards are then
      // undefined.
      versions_->signal(group_->rank(), kOwn);
      versions_->wait_signal(group_->rank(), kOwn);
    }
  });
  is_awaiting_ = false;
  check_versions();
}

void ShardFence::check_versions() {
  for (int rank = 0; rank < group_->world_size(); ++rank) {
    const uint64_t version = version_of(rank);
    if (version == 2 * num_updates_) continue;
    failure_ = Error(ErrorCode::kCorruption,
                     format("{}: the step of rank {} ended by an exception while it wrote its "
                            "shards of {}, which may be half written (version {}, expected {}). "
                            "Look at its error, and resume from the last snapshot",
                            where(), rank, names(), version, 2 * num_updates_))
                   .with_culprit(rank);
    throw *failure_;
  }
}

// Runs `call`, which communicates in group_. All communication of mapped shards must run here,
// because any call may be the first one that finds a rank lost in its write.
void ShardFence::communicate(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    throw with_half_written(error);
  }
}

// Returns kCorruption if a lost rank has an odd version, because it was writing its shards and will
// not complete them; otherwise returns `error`.
Error ShardFence::with_half_written(const Error& error) {
  const auto known = group_->process_group().communicator().lost_ranks();
  std::vector<int> lost(known.begin(), known.end());
  if (error.code() == ErrorCode::kPeerLost && error.details().culprit) {
    lost.push_back(*error.details().culprit);
  }
  for (const int rank : lost) {
    const uint64_t version = version_of(rank);
    if (version % 2 == 0) continue;
    failure_ = Error(ErrorCode::kCorruption,
                     format("{}: rank {} was lost while it wrote its shards of {}, which may be "
                            "half written (version {}). Resume from the last snapshot. {}",
                            where(), rank, names(), version, error.message()))
                   .with_details(error.details())
                   .with_culprit(rank);
    return *failure_;
  }
  return error;
}

FencedUpdate::FencedUpdate(const std::shared_ptr<ShardFence>& fence)
    : FencedUpdate(std::span(&fence, 1)) {}

FencedUpdate::FencedUpdate(std::span<const std::shared_ptr<ShardFence>> fences) {
  try {
    for (const auto& fence : fences) {
      if (!fence || std::ranges::count(fences_, fence) != 0) continue;
      fence->begin_update();
      fences_.push_back(fence);
    }
  } catch (...) {
    abandon();
    throw;
  }
}

FencedUpdate::~FencedUpdate() {
  abandon();
}

void FencedUpdate::abandon() noexcept {
  for (const auto& fence : fences_) {
    fence->abandon_update("an exception was thrown, or ShardUpdate::finish() was not called");
  }
}

void FencedUpdate::finish() {
  for (const auto& fence : fences_) fence->end_update();
  fences_.clear();
}

}  // namespace cadre::shard
