// The group of one wrapper: the collectives of a ProcessGroup on values, without autograd, whose
// errors say where in the wrapper's step this rank was.
//
// Threads: as ProcessGroup; enter() is called between operations. Blocking: all functions except
// the _async calls and the accessors, until the group's deadline. The destructor of the last copy
// waits up to kDefaultCloseTimeout for _async operations that an exception may have left behind: a
// group that is destroyed with pending operations fails on all ranks, and with it every group of
// the job. Lifetime: a handle; copies share the group and the place, and keep the group alive, even
// when the wrapper is gone. Errors: those of the group. If the ranks called different operations,
// and there is an owner, the message begins with the wrapper, its module, this rank, and the part
// of the step to which the operation belongs, because the program has called none of these
// operations by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/core/base/export.h"
#include "cadre/core/base/log.h"
#include "cadre/core/base/types.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/group/symmetric_tensor.h"

namespace cadre::wrap {

class CADRE_EXPORT LocatedGroup {
 public:
  struct Owner {
    std::string wrapper;  // "DistributedDataParallel"
    std::string module;   // "Net"
  };
  // A part of the wrapper's step, in words for messages: "the backward() after its forward {}",
  // where `number` replaces {}. The text is not copied, so it must be a literal.
  struct Place {
    std::string_view text = "its construction";
    int64_t number = 0;
  };

  // Without an owner, errors are those of the group.
  LocatedGroup(const ProcessGroup& group);  // NOLINT(google-explicit-constructor): adds nothing yet
  LocatedGroup(const ProcessGroup& group, Owner owner);

  // Sets the part of the step to which the operations of all copies belong from now on. REQUIRES:
  // an owner.
  void enter(const Place& place) const;

  const ProcessGroup& process_group() const { return group_; }
  int rank() const { return group_.rank(); }
  int world_size() const { return group_.world_size(); }
  // Returns the log to which the wrapper writes its notes. It lives as long as the group.
  LogSink& log_sink() const;

  // Returns a zeroed tensor (numel) in memory that is cheap to reduce. Collective, with the same
  // arguments on all ranks.
  at::Tensor empty_flat(int64_t numel, at::ScalarType dtype) const;
  // Returns a tensor of which every rank owns a part and reads the whole, symmetric_tensor.h;
  // nullopt on all ranks if the ranks share no memory. Collective.
  std::optional<SymmetricTensor> map_parts(int64_t numel, at::ScalarType dtype) const;
  // Reduces a contiguous tensor in place. The returned function waits for the result and throws its
  // error; the operation runs whether or not the function is called.
  std::function<void()> all_reduce_async(const at::Tensor& tensor, ReduceOp op) const;
  // Reduces in place. Runs on the calling thread if that avoids waking another thread.
  void all_reduce(const at::Tensor& tensor, ReduceOp op) const;
  void broadcast(const at::Tensor& tensor, int root) const;
  // output: (world_size * n) for input (n), both contiguous. The input may be this rank's part of
  // the output, elements [rank * n, (rank + 1) * n), and may not share memory with it otherwise.
  void all_gather(const at::Tensor& output, const at::Tensor& input) const;
  // Does the same; the returned function is like that of all_reduce_async().
  std::function<void()> all_gather_async(const at::Tensor& output, const at::Tensor& input) const;
  // output: (n) for input (world_size * n), both contiguous. The output may be this rank's part of
  // the input, and may not share memory with it otherwise; the rest of the input does not change.
  // The returned function is like that of all_reduce_async().
  std::function<void()> reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                                             ReduceOp op) const;

 private:
  struct Location;
  template <typename Operation>
  auto run(Operation operation) const;
  std::function<void()> wait_for(Work work) const;

  ProcessGroup group_;
  // Declared after the group, so that the last copy waits before it releases the group.
  std::shared_ptr<Location> location_;
};

}  // namespace cadre::wrap
