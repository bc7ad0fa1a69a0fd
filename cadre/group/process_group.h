// A group of ranks that exchange tensors: checks, the dtype map, and lifetime over a Communicator.
//
// Threads: as Communicator; it has no thread, socket or lock of its own.
// Blocking: the operations without `_async`. Lifetime: a cheap value over shared state; a Work
// keeps its tensors alive. Errors: cadre::Error, kInvalidArgument for an unsupported tensor, or for
// shapes or dtypes that differ between ranks. Tensors: CPU, dense; every dtype of base/types.h; any
// shape, also 0-dim and empty. Which operations a dtype supports, and what they compute:
// docs/guide/reductions.md. Ranks are group ranks. Source: c10d::ProcessGroup, and of the
// comparison its TORCH_DISTRIBUTED_DEBUG=DETAIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/deadline.h"
#include "cadre/base/export.h"
#include "cadre/base/types.h"
#include "cadre/collective/collective.h"
#include "cadre/comm/communicator.h"
#include "cadre/comm/groups/split.h"
#include "cadre/comm/work.h"

namespace cadre {

// op: a ReduceOp, or Reduction::premul_sum(factor).
struct AllReduceOptions {
  Reduction op = ReduceOp::kSum;
  std::optional<Deadline> deadline = {};
};
struct BroadcastOptions {
  Rank root = 0;
  std::optional<Deadline> deadline = {};
};
struct ReduceScatterOptions {
  Reduction op = ReduceOp::kSum;
  std::optional<Deadline> deadline = {};
};
struct AllGatherOptions {
  std::optional<Deadline> deadline = {};
};
struct BarrierOptions {
  std::optional<Deadline> deadline = {};
};
struct ReduceOptions {
  Rank root = 0;
  Reduction op = ReduceOp::kSum;
  std::optional<Deadline> deadline = {};
};
struct GatherOptions {
  Rank root = 0;
  std::optional<Deadline> deadline = {};
};
struct ScatterOptions {
  Rank root = 0;
  std::optional<Deadline> deadline = {};
};
// Sizes along dimension 0, one for each rank. Empty: even. Either all ranks give splits or none.
struct AllToAllOptions {
  std::vector<int64_t> output_split_sizes = {};  // what comes from each rank
  std::vector<int64_t> input_split_sizes = {};   // what goes to each rank
  std::optional<Deadline> deadline = {};
};
struct SendOptions {
  int tag = 0;
  std::optional<Deadline> deadline = {};
};

class MappedParts;

class CADRE_EXPORT ProcessGroup {
 public:
  explicit ProcessGroup(std::shared_ptr<Communicator> communicator);

  // An int, so that it goes where a number goes: torch::full(), std::max(), printf().
  int rank() const;
  int world_size() const;
  const std::string& name() const;
  Communicator& communicator() const;

  // In place, on the values, as `.data` in PyTorch: a leaf that requires grad is allowed, and no
  // version counter moves, so autograd does not notice when a tensor that it saved has changed.
  // tensor: any shape. The blocking calls pack a non-contiguous tensor and copy it back; the
  // asynchronous ones refuse it, because they could not copy it back. The memory of an asynchronous
  // call is kept until it is done, even if the tensor is resized or gets other memory meanwhile.
  void all_reduce(const at::Tensor& tensor, const AllReduceOptions& options = {}) const;
  Work all_reduce_async(const at::Tensor& tensor, const AllReduceOptions& options = {}) const;
  void broadcast(const at::Tensor& tensor, const BroadcastOptions& options = {}) const;
  Work broadcast_async(const at::Tensor& tensor, const BroadcastOptions& options = {}) const;
  // output: (world_size * n, ...) or (world_size, n, ...) for input (n, ...); output.numel() ==
  // world_size * input.numel(); both contiguous.
  void all_gather(const at::Tensor& output, const at::Tensor& input,
                  const AllGatherOptions& options = {}) const;
  Work all_gather_async(const at::Tensor& output, const at::Tensor& input,
                        const AllGatherOptions& options = {}) const;
  // input.numel() == world_size * output.numel(); both contiguous.
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                      const ReduceScatterOptions& options = {}) const;
  Work reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                            const ReduceScatterOptions& options = {}) const;
  // The root's tensor, of any shape, becomes the reduction, with the bits of all_reduce; the
  // others' keep their content. Contiguity as for all_reduce.
  void reduce(const at::Tensor& tensor, const ReduceOptions& options = {}) const;
  Work reduce_async(const at::Tensor& tensor, const ReduceOptions& options = {}) const;
  // On the root output: (world_size * n, ...) or (world_size, n, ...) for input (n, ...), as in
  // all_gather. Elsewhere output is ignored; pass an undefined tensor. Both contiguous.
  void gather(const at::Tensor& output, const at::Tensor& input,
              const GatherOptions& options = {}) const;
  Work gather_async(const at::Tensor& output, const at::Tensor& input,
                    const GatherOptions& options = {}) const;
  // On the root input.numel() == world_size * output.numel(). Elsewhere input is ignored; pass an
  // undefined tensor. Both contiguous.
  void scatter(const at::Tensor& output, const at::Tensor& input,
               const ScatterOptions& options = {}) const;
  Work scatter_async(const at::Tensor& output, const at::Tensor& input,
                     const ScatterOptions& options = {}) const;
  // Sends rows of input, (n, ...), to the ranks in their order and receives rows of output, (m,
  // ...), from them. The splits are the numbers of rows and add up to n and m; without splits n and
  // m are divided evenly. The number of elements that one rank sends must be the number that the
  // other expects; otherwise all ranks throw an error that names both. Both contiguous and not
  // overlapping.
  void all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                         const AllToAllOptions& options = {}) const;
  Work all_to_all_single_async(const at::Tensor& output, const at::Tensor& input,
                               const AllToAllOptions& options = {}) const;
  void barrier(const BarrierOptions& options = {}) const;
  void send(const at::Tensor& tensor, Rank destination, const SendOptions& options = {}) const;
  Work send_async(const at::Tensor& tensor, Rank destination,
                  const SendOptions& options = {}) const;
  void recv(const at::Tensor& tensor, Rank source, const SendOptions& options = {}) const;
  Work recv_async(const at::Tensor& tensor, Rank source, const SendOptions& options = {}) const;

  // (numel) of `dtype` in memory that the ranks of a host share; collective, same arguments on all
  // ranks. Zeroed. The tensor keeps the memory alive, also after the group is closed.
  at::Tensor empty_symmetric(int64_t numel, at::ScalarType dtype) const;
  // Memory of which every rank owns `numel` elements and reads those of all: mapped_parts.h.
  // Collective. Nothing, on all ranks alike, where the ranks share no memory.
  std::optional<MappedParts> map_parts(int64_t numel, at::ScalarType dtype) const;

  // Create subgroups; every rank of this group calls them in the order of its operations. A rank
  // that is in no subgroup gets nullopt. See comm/groups/split.h.
  std::optional<ProcessGroup> split(const SplitOptions& options) const;
  std::optional<ProcessGroup> new_group(const std::vector<int>& ranks) const;
  // A subgroup that only its members create; the other ranks do not call it.
  ProcessGroup new_group_over_store(const std::vector<int>& ranks,
                                    const StoreGroupOptions& options) const;
  // The ranks of this group in the world, by rank of this group; one of them; and the reverse,
  // nullopt for a rank of the world that is not in this group. c10d's get_process_group_ranks,
  // get_global_rank and get_group_rank.
  std::vector<int> global_ranks() const;
  int global_rank(int group_rank) const;
  std::optional<int> group_rank(int global_rank) const;

  void abort(const std::string& reason) const;
  // As Communicator::close().
  void close() const;

 private:
  Collective exchange_of(std::string_view call, const at::Tensor& output, const at::Tensor& input,
                         const AllToAllOptions& options) const;
  std::optional<ProcessGroup> child(std::unique_ptr<Communicator> communicator) const;

  std::shared_ptr<Communicator> communicator_;
};

struct InitOptions {
  Duration timeout = kDefaultOperationTimeout;
  Duration connect_timeout = kDefaultConnectTimeout;
  TransportChoice transport = TransportChoice::kAuto;
};

// Joins the job that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as set
// by `cadre run` or torchrun); without it, a world of one.
CADRE_EXPORT ProcessGroup init_process_group(const InitOptions& options = {});

}  // namespace cadre
