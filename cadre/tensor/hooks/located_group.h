// The group that a wrapper (such as DistributedDataParallel) uses: collectives of a ProcessGroup
// without autograd, whose errors say where in the wrapper's training step this rank was.
//
// Threads: as ProcessGroup; enter() is called between operations. Blocking: all functions except
// the _async calls and the accessors, until the group's deadline. The destructor of the last copy
// waits up to kDefaultCloseTimeout for _async operations that an exception may have left behind: a
// group that is destroyed with pending operations fails on all ranks, and with it every group of
// the job. Lifetime: a handle; copies share the group and the Place, and keep the group alive even
// after the wrapper is destroyed. Errors: those of the group. If the ranks called different
// operations, and there is an owner, the message begins with the wrapper, its module, this rank,
// and the part of the step to which the operation belongs, because the program has not called these
// operations itself and would not recognize their names.
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
  // A part of the wrapper's step, as text for error messages: "the backward() after its forward
  // {}", where `number` replaces {}. The text is not copied, so it must be a literal.
  struct Place {
    std::string_view text = "its construction";
    int64_t number = 0;
  };

  // Errors of the group are passed on unchanged if there is no owner.
  LocatedGroup(const ProcessGroup& group);  // NOLINT(google-explicit-constructor): adds nothing yet
  LocatedGroup(const ProcessGroup& group, Owner owner);

  // Sets the part of the step that errors name for all following operations on this handle and its
  // copies. REQUIRES: an owner.
  void enter(const Place& place) const;

  const ProcessGroup& process_group() const { return group_; }
  int rank() const { return group_.rank(); }
  int world_size() const { return group_.world_size(); }
  // Returns how errors name this rank: "rank 1", or, if the ranks of the group have other numbers
  // in the world, "rank 1 of group "dp" (world rank 3)".
  std::string rank_text() const;
  // Returns the log to which the wrapper writes its notes. It lives as long as the group.
  LogSink& log_sink() const;

  // Returns a zeroed 1-dim tensor in memory that collectives use without a copy. Collective, with
  // the same arguments on all ranks.
  // On a device other than the CPU it is memory of the device.
  at::Tensor empty_flat(int64_t numel, at::ScalarType dtype,
                        c10::Device device = c10::Device(c10::DeviceType::CPU)) const;
  // Returns a symmetric tensor (symmetric_tensor.h) with whole(): every rank writes its own part
  // and reads all parts. Returns nullopt on all ranks if the ranks share no memory. Collective.
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
  // Starts an all_gather. The returned function waits for the result and throws its error; the
  // operation runs whether or not it is called.
  std::function<void()> all_gather_async(const at::Tensor& output, const at::Tensor& input) const;
  // output: (n) for input (world_size * n), both contiguous. The output may be this rank's part of
  // the input, and may not share memory with it otherwise; the rest of the input does not change.
  // The returned function waits for the result and throws its error.
  std::function<void()> reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                                             ReduceOp op) const;

 private:
  struct Location;
  template <typename Operation>
  auto run(Operation operation) const;
  std::function<void()> wait_for(Work work) const;

  ProcessGroup group_;
  // Declared after the group, so that it is destroyed first: the last copy waits for its operations
  // before it releases the group.
  std::shared_ptr<Location> location_;
};

}  // namespace cadre::wrap
