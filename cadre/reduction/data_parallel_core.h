// What the wrappers that reduce gradients over replicas have in common and what does not depend on
// the module's type: DistributedDataParallel and FullyShardedDataParallel.
//
// Threads: forward, backward and every method from one thread.
// Blocking: the constructor and, with buffers to broadcast, before_forward() are collective.
// Lifetime: keeps the module and the group alive. Errors: cadre::Error.
// With a world of one it holds no hooks and no buckets, and copies nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/base/export.h"
#include "cadre/buckets/bucket_layout.h"
#include "cadre/reduction/agreement/wrapper.h"
#include "cadre/reduction/options.h"
#include "cadre/wrap/named_tensors.h"
#include "cadre/wrap/replica_group.h"

namespace torch::nn {
class Module;
}

namespace cadre {

class LocatedReplicas;
class ParameterWatch;
class Reducer;

struct WrapperName {
  std::string name;       // with which its errors begin: "DistributedDataParallel"
  std::string component;  // of its log lines: "ddp"
};

class CADRE_EXPORT DataParallelCore {
 public:
  // Checks that the replicas match, then copies rank 0's parameters and buffers to all. Parameters
  // registered under two names count once. Throws kInvalidArgument for a null module or group, and
  // for a parameter that another wrapper reduces.
  DataParallelCore(const std::shared_ptr<const torch::nn::Module>& module,
                   std::shared_ptr<ReplicaGroup> group, const WrapperName& name,
                   const DataParallelOptions& options);
  ~DataParallelCore();
  DataParallelCore(const DataParallelCore&) = delete;
  DataParallelCore& operator=(const DataParallelCore&) = delete;

  // `num_rows`: of the first tensor that the forward is given; 1 where there is none; nothing where
  // that cannot be told.
  void before_forward(bool is_training, std::optional<int64_t> num_rows);
  // `outputs`: the tensors that the forward returned.
  void after_forward(std::span<const at::Tensor> outputs);

  void set_num_samples(int64_t count);
  void enter_no_sync();
  void leave_no_sync();
  void reduce_gradients();
  double mean_over_ranks(double value);
  std::optional<BucketLayout> learned_layout() const;

 private:
  void broadcast_buffers();
  void check_unchanged() const;
  int64_t last_num_samples() const;
  void check_not_wrapped(std::span<const NamedTensor> parameters) const;

  std::shared_ptr<LocatedReplicas> group_;
  Wrapper wrapper_;
  DataParallelOptions options_;
  // In a world of one there are none of these.
  // What rank 0 sends with a forward: the wrapper's number, then the buffers; or nothing.
  std::vector<NamedTensor> sent_buffers_;
  std::unique_ptr<ParameterWatch> watch_;
  std::unique_ptr<Reducer> reducer_;
  int64_t num_forwards_ = 0;                     // synchronized ones, with grad
  int num_no_sync_ = 0;                          // guards that live
  std::optional<int64_t> num_samples_;           // said for the forward to come
  std::optional<int64_t> last_num_samples_ = 0;  // of the last forward
};

}  // namespace cadre
