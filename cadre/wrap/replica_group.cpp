#include "cadre/wrap/replica_group.h"

namespace cadre {

namespace {

// The same values without autograd: a wrapper exchanges the values of parameters, which require
// grad, and fills again the memory of gathered parameters whose values a graph has saved.
at::Tensor written(const at::Tensor& tensor) {
  return tensor.variable_data();
}

class ProcessGroupReplicas final : public ReplicaGroup {
 public:
  explicit ProcessGroupReplicas(const ProcessGroup& group) : group_(group) {}

  Rank rank() const override { return group_.rank(); }
  int world_size() const override { return group_.world_size(); }
  uint64_t num_operations() const override { return group_.communicator().num_collectives(); }
  at::Tensor empty_flat(int64_t numel, at::ScalarType dtype) override {
    return group_.empty_symmetric(numel, dtype);
  }
  std::optional<MappedParts> map_parts(int64_t numel, at::ScalarType dtype) override {
    return group_.map_parts(numel, dtype);
  }
  std::function<void()> all_reduce_async(const at::Tensor& tensor, ReduceOp op) override {
    return [work = group_.all_reduce_async(written(tensor), {.op = op})] { work.wait(); };
  }
  void all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    group_.all_reduce(written(tensor), {.op = op});
  }
  void broadcast(const at::Tensor& tensor, Rank root) override {
    group_.broadcast(written(tensor), {.root = root});
  }
  void all_gather(const at::Tensor& output, const at::Tensor& input) override {
    group_.all_gather_into_tensor(written(output), input);
  }
  std::function<void()> all_gather_async(const at::Tensor& output,
                                         const at::Tensor& input) override {
    return [work = group_.all_gather_into_tensor_async(written(output), input)] { work.wait(); };
  }
  std::function<void()> reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                                             ReduceOp op) override {
    return [work = group_.reduce_scatter_tensor_async(written(output), input, {.op = op})] {
      work.wait();
    };
  }
  const ProcessGroup* process_group() const override { return &group_; }
  LogSink& log_sink() override {
    const auto& log = group_.communicator().options().log;
    return log ? *log : null_log_sink();
  }

 private:
  ProcessGroup group_;
};

}  // namespace

std::shared_ptr<ReplicaGroup> make_replica_group(const ProcessGroup& group) {
  return std::make_shared<ProcessGroupReplicas>(group);
}

}  // namespace cadre
