#include "cadre/wrap/located_replicas.h"

#include "cadre/base/error.h"
#include "cadre/base/format.h"

namespace cadre {

template <typename Operation>
auto LocatedReplicas::run(Operation operation) const {
  try {
    return operation();
  } catch (const Error& error) {
    // The error has a reporter if the ranks called different operations, and none if this rank
    // refused its own arguments.
    if (error.code() != ErrorCode::kInvalidArgument || !error.details().reporter) throw;
    throw error.with_context(
        format("{} of {}, rank {}, in {}: the ranks are not at the same place "
               "of the same step. One of them left out a forward, a backward() or another call "
               "that all ranks make (an exception that was caught, a step on some ranks only), or "
               "made one more. Leave out a step on all ranks or on none. The operations that met",
               owner_.wrapper, owner_.module, rank(), format(place_.text, place_.number)));
  }
}

template <typename Start>
std::function<void()> LocatedReplicas::run_async(Start start) const {
  return run([&]() -> std::function<void()> { return [this, wait = start()] { run(wait); }; });
}

at::Tensor LocatedReplicas::empty_flat(int64_t numel, at::ScalarType dtype) {
  return run([&] { return group_->empty_flat(numel, dtype); });
}

std::optional<MappedParts> LocatedReplicas::map_parts(int64_t numel, at::ScalarType dtype) {
  return run([&] { return group_->map_parts(numel, dtype); });
}

std::function<void()> LocatedReplicas::all_reduce_async(const at::Tensor& tensor, ReduceOp op) {
  return run_async([&] { return group_->all_reduce_async(tensor, op); });
}

void LocatedReplicas::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  run([&] { group_->all_reduce(tensor, op); });
}

void LocatedReplicas::broadcast(const at::Tensor& tensor, Rank root) {
  run([&] { group_->broadcast(tensor, root); });
}

void LocatedReplicas::all_gather(const at::Tensor& output, const at::Tensor& input) {
  run([&] { group_->all_gather(output, input); });
}

std::function<void()> LocatedReplicas::all_gather_async(const at::Tensor& output,
                                                        const at::Tensor& input) {
  return run_async([&] { return group_->all_gather_async(output, input); });
}

std::function<void()> LocatedReplicas::reduce_scatter_async(const at::Tensor& output,
                                                            const at::Tensor& input, ReduceOp op) {
  return run_async([&] { return group_->reduce_scatter_async(output, input, op); });
}

}  // namespace cadre
