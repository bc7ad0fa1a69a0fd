// A group of ranks that exchange tensors. It adds to a Communicator, which exchanges bytes, the
// checks of tensors, the mapping of dtypes and the lifetime of tensor memory.
//
// Threads: as Communicator; it has no thread, socket or lock of its own. Blocking: the operations
// without `_async`. Lifetime: a cheap value over shared state; a Work keeps its tensors alive.
// Errors: cadre::Error. An invalid argument on this rank (kInvalidArgument: an unsupported tensor,
// a timeout that is not positive) leaves the group usable on all ranks, because nothing has been
// issued: repeat the call with valid arguments. A failure makes the group unusable. Shapes or
// dtypes that differ between ranks are a failure, too (kInvalidArgument on all of them). error()
// returns nullopt after an invalid argument and the error after a failure. Every call on a
// moved-from handle throws. Tensors: dense, on the CPU or on this rank's device in the
// group (InitOptions::device); every dtype of core/base/types.h; any
// shape, also 0-dim and empty. docs/guide/reference/reductions.md says which operations a dtype
// supports, and what they compute. Ranks are group ranks. Autograd does not record these
// operations; those of backward/differentiable.h it does. But a tensor to which a call writes
// counts as changed in place: the call increments its version counter, so that a backward that
// needs the earlier values throws. While gradients are recorded, a leaf that requires grad, or a
// view of one, is refused, as by torch's in-place operations. Source: c10d::ProcessGroup, and its
// TORCH_DISTRIBUTED_DEBUG=DETAIL for the comparison of the ranks' calls. Guide:
// docs/guide/reference/groups-and-messages.md and errors.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/collective.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/queue/work.h"
#include "cadre/core/os/defaults.h"
#include "cadre/tensor/backends/device_engine.h"

namespace cadre {

// Options of the operations. timeout: positive, counted from the call; by default the timeout of
// the group (InitOptions::timeout), counted from the start of the operation. op: a ReduceOp, or
// Reduction::premul_sum(factor).
struct AllReduceOptions {
  Reduction op = ReduceOp::kSum;
  std::optional<Duration> timeout = {};
};
struct BroadcastOptions {
  int root = 0;
  std::optional<Duration> timeout = {};
};
struct ReduceScatterOptions {
  Reduction op = ReduceOp::kSum;
  std::optional<Duration> timeout = {};
};
struct AllGatherOptions {
  std::optional<Duration> timeout = {};
};
struct BarrierOptions {
  std::optional<Duration> timeout = {};
};
struct ReduceOptions {
  int root = 0;
  Reduction op = ReduceOp::kSum;
  std::optional<Duration> timeout = {};
};
struct GatherOptions {
  int root = 0;
  std::optional<Duration> timeout = {};
};
struct ScatterOptions {
  int root = 0;
  std::optional<Duration> timeout = {};
};
// Sizes along dimension 0, one for each rank; an empty list divides the rows evenly. A list of
// splits is given on all ranks or on no rank.
struct AllToAllOptions {
  std::vector<int64_t> output_split_sizes = {};  // the number of rows that come from each rank
  std::vector<int64_t> input_split_sizes = {};   // the number of rows that go to each rank
  std::optional<Duration> timeout = {};
};
// There are no split sizes, because the tensors of the lists give them.
struct AllToAllListOptions {
  std::optional<Duration> timeout = {};
};
struct MessageOptions {
  int tag = 0;
  std::optional<Duration> timeout = {};
};

// One message of batch_send_recv(). Source: c10d's P2POp.
struct P2POp {
  enum class Kind : uint8_t { kSend, kRecv };

  static P2POp send(at::Tensor tensor, int destination, int tag = 0) {
    return {Kind::kSend, std::move(tensor), destination, tag};
  }
  static P2POp recv(at::Tensor tensor, int source, int tag = 0) {
    return {Kind::kRecv, std::move(tensor), source, tag};
  }

  Kind kind = Kind::kSend;
  at::Tensor tensor = {};
  int peer = 0;
  int tag = 0;
};
struct BatchOptions {
  std::optional<Duration> timeout = {};  // the limit of each message
};

// The fields mean the same as in SplitOptions and StoreGroupOptions of core/comm/groups/split.h.
// The name of new_group() is the same on all ranks of the parent. timeout: the time limit within
// which all ranks that must make the call have to make it.
struct SplitGroupOptions {
  std::optional<int> color = {};
  int key = 0;
  std::string name = {};
  Duration timeout = kDefaultConnectTimeout;
};
struct NewGroupOptions {
  std::string name = {};
  Duration timeout = kDefaultConnectTimeout;
};
struct NewGroupOverStoreOptions {
  std::shared_ptr<Store> store = {};
  std::string id = {};
  std::string name = {};
  Duration timeout = kDefaultConnectTimeout;
};

struct RejoinOptions {
  // How long to wait for ranks that are not known to be lost. The group continues without the ranks
  // that have not joined by then.
  Duration timeout = kDefaultConnectTimeout;
  Duration connect_timeout = kDefaultConnectTimeout;
};

class CADRE_EXPORT ProcessGroup {
 public:
  explicit ProcessGroup(std::shared_ptr<Communicator> communicator);

  // Returns an int, so that it can be passed to functions that take numbers: torch::full(),
  // std::max(), printf().
  int rank() const;
  int world_size() const;
  // These functions say where the ranks of this group run. A host is a running kernel in one
  // network namespace, so that containers with networks of their own are different hosts.
  // local_rank() counts the ranks of this group on this rank's host, node_rank() the hosts of this
  // group in the order of their lowest ranks. The functions do not read LOCAL_RANK and the like, so
  // they are right without a launcher, too.
  int local_rank() const;
  int local_world_size() const;
  int node_rank() const;
  int num_nodes() const;
  // Returns the name of this rank's host, as it appears in error messages.
  std::string host() const;
  const std::string& name() const;
  Communicator& communicator() const;
  // Returns the device of this rank on whose memory the group works, beside memory of the CPU;
  // nullopt if it works on memory of the CPU only.
  std::optional<c10::Device> device() const;
  // Returns the first failure of the group, which every later call throws; nullopt while the group
  // is usable. Same as Communicator::error().
  std::optional<Error> error() const;

  // The operations below work in place. tensor: any shape. The blocking calls pack a non-contiguous
  // tensor and copy it back; the asynchronous ones throw for it, because they could not copy it
  // back. The memory of an asynchronous call is kept until it is done, even if the tensor is
  // resized or gets other memory meanwhile; on a device it must not be resized. A call on memory of
  // the device may wait for the asynchronous calls on memory of the CPU that were issued to this
  // group before it, because calls of several groups on one device are enqueued in the order of the
  // program.
  void all_reduce(const at::Tensor& tensor, const AllReduceOptions& options = {}) const;
  Work all_reduce_async(const at::Tensor& tensor, const AllReduceOptions& options = {}) const;
  void broadcast(const at::Tensor& tensor, const BroadcastOptions& options = {}) const;
  Work broadcast_async(const at::Tensor& tensor, const BroadcastOptions& options = {}) const;
  // The result is stored in the root's tensor and is bitwise equal to that of all_reduce. The
  // tensors of the other ranks do not change.
  void reduce(const at::Tensor& tensor, const ReduceOptions& options = {}) const;
  Work reduce_async(const at::Tensor& tensor, const ReduceOptions& options = {}) const;

  // Each operation has one name for its flat form (one tensor) and its list form. c10d has other
  // names for the flat forms: all_gather_into_tensor, reduce_scatter_tensor and all_to_all_single.
  //
  // Flat forms: one tensor contains the parts of all ranks in rank order. Both tensors are
  // contiguous; the smaller one may be this rank's part of the larger one.
  //
  // output: (world_size * n, ...) or (world_size, n, ...) for input (n, ...); output.numel() ==
  // world_size * input.numel().
  void all_gather(const at::Tensor& output, const at::Tensor& input,
                  const AllGatherOptions& options = {}) const;
  Work all_gather_async(const at::Tensor& output, const at::Tensor& input,
                        const AllGatherOptions& options = {}) const;
  // input.numel() == world_size * output.numel().
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                      const ReduceScatterOptions& options = {}) const;
  Work reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                            const ReduceScatterOptions& options = {}) const;
  // Stores the inputs of all ranks in the root's output, with the shapes of all_gather. Other ranks
  // ignore output; pass an undefined tensor there.
  void gather(const at::Tensor& output, const at::Tensor& input,
              const GatherOptions& options = {}) const;
  Work gather_async(const at::Tensor& output, const at::Tensor& input,
                    const GatherOptions& options = {}) const;
  // Gives each rank its part of the root's input. On the root input.numel() == world_size *
  // output.numel(). Other ranks ignore input; pass an undefined tensor there.
  void scatter(const at::Tensor& output, const at::Tensor& input,
               const ScatterOptions& options = {}) const;
  Work scatter_async(const at::Tensor& output, const at::Tensor& input,
                     const ScatterOptions& options = {}) const;
  // Sends rows of input, (n, ...), to the ranks in their order and receives rows of output, (m,
  // ...), from them. The splits are the numbers of rows and add up to n and m; without splits n and
  // m are divided evenly. The number of elements that one rank sends must be the number that the
  // other expects; otherwise all ranks throw an error that names both. The tensors do not overlap.
  void all_to_all(const at::Tensor& output, const at::Tensor& input,
                  const AllToAllOptions& options = {}) const;
  Work all_to_all_async(const at::Tensor& output, const at::Tensor& input,
                        const AllToAllOptions& options = {}) const;

  // List forms: one tensor for each rank, in rank order, of one dtype, contiguous or not. The data
  // is copied once more than by the flat forms. The outputs of an asynchronous call hold the result
  // when wait() has returned, not before.
  //
  // The inputs of two ranks may differ in size: outputs[r] must have as many elements as the input
  // of rank r, in any shape. So each rank knows the sizes of all inputs; if the ranks' lists differ
  // in them, the call fails on all ranks. The outputs do not overlap.
  void all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                  const AllGatherOptions& options = {}) const;
  Work all_gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                        const AllGatherOptions& options = {}) const;
  // Rank r gets the reduction of the ranks' inputs[r], which may differ in shape from inputs[s].
  void reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                      const ReduceScatterOptions& options = {}) const;
  Work reduce_scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                            const ReduceScatterOptions& options = {}) const;
  // Each rank sends equally many elements. Ranks other than the root ignore outputs; pass an empty
  // list there.
  void gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
              const GatherOptions& options = {}) const;
  Work gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                    const GatherOptions& options = {}) const;
  // Each rank receives equally many elements. Ranks other than the root ignore inputs; pass an
  // empty list there.
  void scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
               const ScatterOptions& options = {}) const;
  Work scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                     const ScatterOptions& options = {}) const;
  // Sends inputs[r] to rank r and receives outputs[r] from it. The sizes may differ between ranks.
  // As in the flat form, the call fails on all ranks if a sender and its receiver expect different
  // sizes.
  void all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                  const AllToAllListOptions& options = {}) const;
  Work all_to_all_async(const std::vector<at::Tensor>& outputs,
                        const std::vector<at::Tensor>& inputs,
                        const AllToAllListOptions& options = {}) const;

  // These run several operations in one call with one Work. The operations run in the order of the
  // list, which must be the same on all ranks. If the lists differ in length, the call fails with
  // kInvalidArgument on all ranks before any data is moved. All tensors are checked before the
  // first operation is issued. The tensors follow the rules of the operation's asynchronous form.
  // dtypes may differ between entries, tensors of different entries must not overlap, and the list
  // must not be empty. The Work's error is that of the first entry that failed.
  void all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                            const AllReduceOptions& options = {}) const;
  Work all_reduce_coalesced_async(const std::vector<at::Tensor>& tensors,
                                  const AllReduceOptions& options = {}) const;
  void all_gather_coalesced(const std::vector<at::Tensor>& outputs,
                            const std::vector<at::Tensor>& inputs,
                            const AllGatherOptions& options = {}) const;
  Work all_gather_coalesced_async(const std::vector<at::Tensor>& outputs,
                                  const std::vector<at::Tensor>& inputs,
                                  const AllGatherOptions& options = {}) const;
  void reduce_scatter_coalesced(const std::vector<at::Tensor>& outputs,
                                const std::vector<at::Tensor>& inputs,
                                const ReduceScatterOptions& options = {}) const;
  Work reduce_scatter_coalesced_async(const std::vector<at::Tensor>& outputs,
                                      const std::vector<at::Tensor>& inputs,
                                      const ReduceScatterOptions& options = {}) const;

  // If a rank does not call barrier(), the timeout error of the other ranks names that rank, as in
  // c10d's monitored_barrier.
  void barrier(const BarrierOptions& options = {}) const;
  Work barrier_async(const BarrierOptions& options = {}) const;

  // Point-to-point messages. A tensor to send may have any layout; a tensor to receive into follows
  // the rules of all_reduce. Tensors on a device go through pinned memory of the host. send()
  // blocks until the device has copied the tensor there and the message is sent; send_async() and
  // batch_send_recv_async() do not block. recv() and Work::wait() block the host until the message
  // has arrived, and then enqueue the copy to the device on the current stream, behind the work
  // that the stream of the call had. Until then the tensor has its earlier values, even if
  // is_completed() is true. So the message is lost if the Work of recv_async() or
  // batch_send_recv_async() is dropped without a wait().
  void send(const at::Tensor& tensor, int destination, const MessageOptions& options = {}) const;
  Work send_async(const at::Tensor& tensor, int destination,
                  const MessageOptions& options = {}) const;
  void recv(const at::Tensor& tensor, int source, const MessageOptions& options = {}) const;
  Work recv_async(const at::Tensor& tensor, int source, const MessageOptions& options = {}) const;
  // Receives from the rank that sends first with this tag, and returns that rank. Source: c10d's
  // recv without a source.
  int recv_from_any(const at::Tensor& tensor, const MessageOptions& options = {}) const;
  // Starts all messages at once, so that no order of sends and receives in the list can deadlock.
  // All messages are checked before the first one is issued; tensors to receive into must be
  // contiguous. An empty list succeeds at once, so that a rank without a neighbour needs no special
  // case. Source: c10d's batch_isend_irecv.
  void batch_send_recv(const std::vector<P2POp>& ops, const BatchOptions& options = {}) const;
  Work batch_send_recv_async(const std::vector<P2POp>& ops, const BatchOptions& options = {}) const;

  // These create subgroups. They are collectives: every rank of this group calls them, in the same
  // order as its other operations. A rank that is in no subgroup (in split: no color or a negative
  // one) gets nullopt. See core/comm/groups/split.h.
  std::optional<ProcessGroup> split(const SplitGroupOptions& options) const;
  std::optional<ProcessGroup> new_group(const std::vector<int>& ranks,
                                        const NewGroupOptions& options = {}) const;
  // Creates a subgroup; only its members make this call.
  ProcessGroup new_group_over_store(const std::vector<int>& ranks,
                                    const NewGroupOverStoreOptions& options) const;
  // Closes this group and connects a new group of the remaining ranks, which must all make this
  // call and keep their order. If this group has not failed yet, it fails now on all ranks. An
  // operation that has ended on this rank, even a barrier, may still run on another rank. It may
  // throw kAborted there, and that rank then calls rejoin() as after any failure. Does the same as
  // rejoin_group() in core/comm/groups/rejoin_group.h.
  ProcessGroup rejoin(const RejoinOptions& options = {}) const;
  // These convert between ranks of this group and ranks of the world: global_ranks() returns the
  // global ranks of all members in group order, global_rank() that of one member, and group_rank()
  // the rank in this group, or nullopt for a global rank that is not a member. Source: c10d's
  // get_process_group_ranks, get_global_rank and get_group_rank.
  std::vector<int> global_ranks() const;
  int global_rank(int group_rank) const;
  std::optional<int> group_rank(int global_rank) const;

  // Fails this group on all ranks: pending and later operations throw kAborted with `reason`. Never
  // blocks, and may be called from any thread, for example by a thread of the program that watches
  // for failures. Does the same as Communicator::abort().
  void abort(const std::string& reason) const;
  // Waits up to `timeout` for pending operations, then leaves the group. Operations that are still
  // pending then are aborted: their Work::wait() throws kAborted on all ranks, but close() itself
  // does not. close() throws kInvalidArgument for a timeout that is not positive, or if the last
  // collectives of the ranks differed. Does the same as Communicator::close().
  void close(Duration timeout = kDefaultCloseTimeout) const;

 private:
  std::optional<ProcessGroup> child(std::unique_ptr<Communicator> communicator) const;

  std::shared_ptr<Communicator> communicator_;
};

// The options of init_process_group(). A field that is not set is taken from the environment or has
// its default. Both timeouts must be positive.
struct InitOptions {
  // The rank of this process and the number of processes: give both, or neither.
  std::optional<int> rank = {};
  std::optional<int> world_size = {};
  // The address at which the processes find each other: "tcp://HOST:PORT" of rank 0, "file:///PATH"
  // on one host, or "env://", which is the default: MASTER_ADDR and MASTER_PORT.
  std::string init_method = {};
  // The backend that moves and reduces data. "host" is shared memory, or an error if a rank is on
  // another host; "net" is TCP, also on one host. An empty text and "gloo" (PyTorch's name for
  // collectives on CPUs) mean "host" between ranks of one host and "net" between hosts. Other names
  // are an error. All ranks pass the same.
  std::string backend = {};
  // The device of this process on whose memory the group works beside memory of the CPU; a tensor
  // on another one is refused. A device without an index is the current one of its type. The ranks
  // may have different indices, but all have devices of one type, or none has. By default it is
  // local_device(), which is the CPU without CUDA devices; and the CPU if a call before this one
  // has kept libtorch from finding them (local_device.h). The device becomes the current one of
  // this thread.
  std::optional<c10::Device> device = {};
  // The engine for memory of that device, and of groups that are split from the world: NCCL where
  // every rank has a CUDA device of its own, else one that copies to the host and back
  // (backends/device_engine.h). All ranks pass the same.
  DeviceEngineChoice device_engine = DeviceEngineChoice::kAuto;
  // The default timeout of an operation, counted from its start: of collectives, messages and waits
  // for signals, in the world and in groups that are split from it. The timeouts of the ranks may
  // differ, and the first to pass fails the group on all ranks.
  Duration timeout = kDefaultOperationTimeout;
  // The limit of init_process_group(): all ranks must have joined and connected by then. split(),
  // new_group() and rejoin() have timeouts of their own.
  Duration connect_timeout = kDefaultConnectTimeout;
  // The file of `cadre tune` with the sizes at which collectives change their algorithms; by
  // default CADRE_TUNING_FILE. Only rank 0 reads its file; all ranks use what it has.
  std::string tuning_file = {};
};

// Joins the job that the options and the environment describe: RANK, WORLD_SIZE, MASTER_ADDR,
// MASTER_PORT and CADRE_JOB_TOKEN, as `cadre run` or torchrun sets them. Without a rank and a world
// size it makes a world of one. CADRE_LOG, CADRE_FLIGHT_RECORDS, CADRE_TUNING_FILE and
// CADRE_NCCL_LIBRARY apply in both cases.
// core/rendezvous/job_environment.h lists all variables. Throws kInvalidArgument for an option or a
// variable with an invalid value, kTimeout with the ranks that are missing, and the errors of
// Communicator::connect().
CADRE_EXPORT ProcessGroup init_process_group(const InitOptions& options = {});

}  // namespace cadre
