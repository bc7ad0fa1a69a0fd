// The collectives that the wrappers of a model need, cut out of ProcessGroup so that a test can
// replace the other ranks by a formula, or inject a fault.
//
// Threads: one thread at a time. Blocking: all but the _async calls and the accessors, until the
// group's deadline. Lifetime: an implementation keeps the memory of its tensors until an operation
// is done.
// Errors: cadre::Error, as ProcessGroup.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "cadre/base/export.h"
#include "cadre/base/log.h"
#include "cadre/base/types.h"
#include "cadre/group/mapped_parts.h"
#include "cadre/group/process_group.h"

namespace cadre {

class CADRE_EXPORT ReplicaGroup {
 public:
  virtual ~ReplicaGroup() = default;

  virtual Rank rank() const = 0;
  virtual int world_size() const = 0;
  // Collectives issued so far; between operations equal on all ranks.
  virtual uint64_t num_operations() const { return 0; }
  // (numel), zeroed, in memory that is cheap to reduce. Collective: same arguments on all ranks.
  virtual at::Tensor empty_flat(int64_t numel, at::ScalarType dtype) = 0;
  // Memory of which every rank owns `numel` elements and reads those of all. Collective. Nothing,
  // on all ranks alike, where the ranks share no memory.
  virtual std::optional<MappedParts> map_parts(int64_t numel, at::ScalarType dtype) = 0;
  // In place on a contiguous tensor. The returned function waits for the result and throws its
  // error; the operation runs whether or not it is called.
  virtual std::function<void()> all_reduce_async(const at::Tensor& tensor, ReduceOp op) = 0;
  // In place; on the calling thread, where that saves waking another one.
  virtual void all_reduce(const at::Tensor& tensor, ReduceOp op) = 0;
  virtual void broadcast(const at::Tensor& tensor, Rank root) = 0;
  // output: (world_size * n) for input (n), both contiguous. The input may be this rank's part of
  // the output, elements [rank * n, (rank + 1) * n), and may not share memory with it otherwise.
  virtual void all_gather(const at::Tensor& output, const at::Tensor& input) = 0;
  // The same, waited for as all_reduce_async.
  virtual std::function<void()> all_gather_async(const at::Tensor& output,
                                                 const at::Tensor& input) = 0;
  // output: (n) for input (world_size * n), both contiguous. The output may be this rank's part of
  // the input, and may not share memory with it otherwise; the input is not changed elsewhere.
  // Waited for as all_reduce_async.
  virtual std::function<void()> reduce_scatter_async(const at::Tensor& output,
                                                     const at::Tensor& input, ReduceOp op) = 0;
  // The group behind it; null where there is none, as in a test.
  virtual const ProcessGroup* process_group() const { return nullptr; }
  // Where the wrapper says what its user should know. It lives as long as this.
  virtual LogSink& log_sink() { return null_log_sink(); }
};

// The real one. The handle is shared because output hooks may outlive the wrapper.
CADRE_EXPORT std::shared_ptr<ReplicaGroup> make_replica_group(const ProcessGroup& group);

}  // namespace cadre
