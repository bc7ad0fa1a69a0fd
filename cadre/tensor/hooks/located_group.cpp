#include "cadre/tensor/hooks/located_group.h"

#include <ATen/ops/zeros.h>

#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/queue/work.h"
#include "cadre/core/os/defaults.h"

namespace cadre::wrap {
namespace {

// Returns a tensor over the same memory that autograd does not track. A wrapper needs it to write
// to parameters, which require grad, and to gathered parameters that a graph has saved for
// backward.
at::Tensor written(const at::Tensor& tensor) {
  return tensor.variable_data();
}

}  // namespace

struct LocatedGroup::Location {
  explicit Location(std::optional<Owner> given) : owner(std::move(given)) {}
  ~Location();
  Location(const Location&) = delete;
  Location& operator=(const Location&) = delete;

  void add(const Work& work);

  const std::optional<Owner> owner;
  Place place = {};

 private:
  std::mutex mutex_;
  std::vector<Work> running_;  // some of them may have ended
};

LocatedGroup::Location::~Location() {
  if (running_.empty()) return;
  try {
    const Deadline deadline = running_.back().deadline_in(kDefaultCloseTimeout);
    for (const Work& work : running_) work.wait(deadline);
  } catch (...) {
    // The wait throws if the group has failed or another rank has not called the operation. In the
    // second case the destructor of the group makes the group fail.
  }
}

void LocatedGroup::Location::add(const Work& work) {
  const std::scoped_lock lock(mutex_);
  std::erase_if(running_, [](const Work& earlier) { return earlier.is_completed(); });
  running_.push_back(work);
}

LocatedGroup::LocatedGroup(const ProcessGroup& group)
    : group_(group), location_(std::make_shared<Location>(std::nullopt)) {}

LocatedGroup::LocatedGroup(const ProcessGroup& group, Owner owner)
    : group_(group), location_(std::make_shared<Location>(std::move(owner))) {}

void LocatedGroup::enter(const Place& place) const {
  location_->place = place;
}

LogSink& LocatedGroup::log_sink() const {
  const auto& log = group_.communicator().options().log;
  return log ? *log : null_log_sink();
}

std::string LocatedGroup::rank_text() const {
  const std::vector<int> of_world = group_.global_ranks();
  std::vector<int> own(of_world.size());
  std::iota(own.begin(), own.end(), 0);
  if (of_world == own) return format("rank {}", rank());
  return format("rank {} of group \"{}\" (world rank {})", rank(), group_.name(),
                of_world[static_cast<size_t>(rank())]);
}

template <typename Operation>
auto LocatedGroup::run(Operation operation) const {
  try {
    return operation();
  } catch (const Error& error) {
    // Only an error because the ranks called different operations has a `reporter`. An error for an
    // invalid argument of this rank has none and is passed on unchanged.
    if (!location_->owner || error.code() != ErrorCode::kInvalidArgument ||
        !error.details().reporter) {
      throw;
    }
    const Owner& owner = *location_->owner;
    const Place& place = location_->place;
    throw error.with_context(format(
        "{} of {}, {}, in {}: the ranks are not at the same place "
        "of the same step. One of them has left out or repeated a forward, a backward() "
        "or another call that all ranks make (for example after it caught an exception), or "
        "it alone has written to its shards, so that it gathers them again. Leave out a step "
        "on all ranks or on none. The operations that did not match",
        owner.wrapper, owner.module, rank_text(), format(place.text, place.number)));
  }
}

std::function<void()> LocatedGroup::wait_for(Work work) const {
  location_->add(work);
  return [group = *this, work = std::move(work)] { group.run([&] { work.wait(); }); };
}

at::Tensor LocatedGroup::empty_flat(int64_t numel, at::ScalarType dtype, c10::Device device) const {
  if (numel == 0 || !device.is_cpu()) {
    return at::zeros({numel}, at::TensorOptions().dtype(dtype).device(device));
  }
  return run([&] { return SymmetricTensor::allocate(group_, numel, dtype).local(); });
}

std::optional<SymmetricTensor> LocatedGroup::map_parts(int64_t numel, at::ScalarType dtype) const {
  SymmetricTensor parts =
      run([&] { return SymmetricTensor::allocate(group_, numel, dtype, {.with_whole = true}); });
  if (!parts.has_whole()) return std::nullopt;
  return parts;
}

std::function<void()> LocatedGroup::all_reduce_async(const at::Tensor& tensor, ReduceOp op) const {
  return wait_for(run([&] { return group_.all_reduce_async(written(tensor), {.op = op}); }));
}

void LocatedGroup::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  run([&] { group_.all_reduce(written(tensor), {.op = op}); });
}

void LocatedGroup::broadcast(const at::Tensor& tensor, int root) const {
  run([&] { group_.broadcast(written(tensor), {.root = root}); });
}

void LocatedGroup::all_gather(const at::Tensor& output, const at::Tensor& input) const {
  run([&] { group_.all_gather(written(output), input); });
}

std::function<void()> LocatedGroup::all_gather_async(const at::Tensor& output,
                                                     const at::Tensor& input) const {
  return wait_for(run([&] { return group_.all_gather_async(written(output), input); }));
}

std::function<void()> LocatedGroup::reduce_scatter_async(const at::Tensor& output,
                                                         const at::Tensor& input,
                                                         ReduceOp op) const {
  return wait_for(
      run([&] { return group_.reduce_scatter_async(written(output), input, {.op = op}); }));
}

}  // namespace cadre::wrap
