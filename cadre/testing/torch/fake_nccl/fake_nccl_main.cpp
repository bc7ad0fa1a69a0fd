// The library libcadre_fake_nccl.so: NCCL's functions on the streams of the late device. Ranks are
// threads of one process. What a communicator of NCCL may be used for is checked at each call.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cadre/tensor/backends/nccl/nccl_api.h"
#include "cadre/testing/torch/fake_nccl/fake_nccl_control.h"
#include "cadre/testing/torch/fake_nccl/number_types.h"

namespace cadre::nccl {

// The communicator of one rank.
struct Comm;

}  // namespace cadre::nccl

namespace cadre::testing::fake_nccl {
namespace {

using nccl::Code;
using nccl::Comm;
using nccl::DataType;
using nccl::RedOp;
using Clock = std::chrono::steady_clock;

constexpr int kFirstMadeOp = 100;
constexpr std::chrono::milliseconds kFailureTime{30};
constexpr int kVersion = 22'000;

size_t size_of(DataType type) {
  switch (type) {
    case DataType::kInt8:
    case DataType::kUint8:
      return 1;
    case DataType::kFloat16:
    case DataType::kBfloat16:
      return 2;
    case DataType::kInt32:
    case DataType::kUint32:
    case DataType::kFloat32:
      return 4;
    default:
      return 8;
  }
}

enum class Kind { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kSend, kRecv };

struct Op {
  Kind kind = Kind::kAllReduce;
  const void* in = nullptr;
  void* out = nullptr;
  size_t count = 0;
  DataType type = DataType::kInt8;
  RedOp op = RedOp::kSum;
  int rank = 0;
  double factor = 1;   // the factor of this rank's input
  bool fails = false;  // reports an error when it has run for kFailureTime

  bool is_message() const { return kind == Kind::kSend || kind == Kind::kRecv; }
  // Whether both can be parts of one collective.
  bool matches(const Op& other) const {
    return kind == other.kind && count == other.count && type == other.type && rank == other.rank &&
           (op == other.op || (int(op) >= kFirstMadeOp && int(other.op) >= kFirstMadeOp));
  }
};

struct Message {
  const void* data = nullptr;
  size_t num_bytes = 0;
  bool is_taken = false;
};

// One collective of all ranks.
struct Slot {
  std::vector<std::optional<Op>> ops;
  size_t num_computed = 0;
  size_t num_left = 0;
};

// All ranks that have made a communicator with one id.
struct Clique {
  explicit Clique(int size) : num_ranks(size) {}

  const int num_ranks;
  std::mutex mutex;
  std::condition_variable changed;
  int num_joined = 0;
  bool is_broken = false;  // a rank has failed to join
  std::map<uint64_t, Slot> slots;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> messages;
};

// What the kernels of a communicator use, also after it was destroyed.
struct RankState {
  std::shared_ptr<Clique> clique;
  int rank = 0;
  std::atomic<bool> is_aborted{false};
  std::atomic<Code> error{Code::kSuccess};
  std::atomic<int> num_running{0};
  uint64_t num_collectives = 0;  // used by the stream only
};

// The state of the process, which the functions of NCCL use without an argument.
struct Process {
  std::mutex mutex;
  DeviceFunctions device;
  Faults faults;
  Counts counts;
  std::string misuse;
  std::map<std::string, std::shared_ptr<Clique>> cliques;
  std::set<const Comm*> comms;
  uint64_t num_ids = 0;
};

Process& process() {
  static Process state;
  return state;
}

Code misused(const std::string& sentence) {
  const std::lock_guard lock(process().mutex);
  if (process().counts.misuses++ == 0) process().misuse = sentence;
  return Code::kInvalidUsage;
}

}  // namespace
}  // namespace cadre::testing::fake_nccl

struct cadre::nccl::Comm {
  std::shared_ptr<cadre::testing::fake_nccl::RankState> state;
  int device_rank = 0;
  std::atomic<bool> is_in_use{false};
  // What is to happen when the progress has ended.
  std::mutex mutex;
  bool is_joining = true;
  bool is_finalizing = false;
  std::optional<std::chrono::steady_clock::time_point> in_progress_until;
  std::deque<std::pair<void*, std::vector<cadre::testing::fake_nccl::Op>>> launches;
  bool is_first_group = true;
  std::optional<std::chrono::steady_clock::time_point> launched_at;  // the first group
  std::map<int, double> operations;
  int next_operation = 100;
  cadre::testing::fake_nccl::Faults faults;
};

namespace cadre::testing::fake_nccl {
namespace {

// Runs the operations of one group in the stream.
class Kernel {
 public:
  Kernel(std::shared_ptr<RankState> state, std::vector<Op> ops)
      : state_(std::move(state)), clique_(*state_->clique), ops_(std::move(ops)) {}

  static void run(void* argument) {
    const std::unique_ptr<Kernel> kernel(static_cast<Kernel*>(argument));
    ++kernel->state_->num_running;
    kernel->run_all();
    const std::lock_guard lock(kernel->clique_.mutex);
    --kernel->state_->num_running;
    kernel->clique_.changed.notify_all();
  }

 private:
  static const std::byte* in_of(const Op& op) {
    return static_cast<const std::byte*>(process().device.host_address(op.in));
  }
  static std::byte* out_of(const Op& op) {
    return static_cast<std::byte*>(process().device.host_address(op.out));
  }

  // Returns false if the communicator is aborted before `is_met` holds.
  template <typename Condition>
  bool wait(std::unique_lock<std::mutex>& lock, const Condition& is_met) {
    clique_.changed.wait(lock, [&] { return state_->is_aborted || is_met(); });
    return !state_->is_aborted;
  }

  void run_all() {
    std::vector<std::shared_ptr<Message>> sent;
    std::unique_lock lock(clique_.mutex);
    for (const Op& op : ops_) {
      if (op.kind != Kind::kSend || state_->is_aborted) continue;
      sent.push_back(std::make_shared<Message>(Message{in_of(op), op.count * size_of(op.type)}));
      clique_.messages[{state_->rank, op.rank}].push_back(sent.back());
    }
    clique_.changed.notify_all();
    for (const Op& op : ops_) {
      if (!op.is_message() && !run_collective(lock, op)) return;
    }
    for (const Op& op : ops_) {
      if (op.kind == Kind::kRecv && !receive(lock, op)) return;
    }
    static_cast<void>(wait(lock, [&] {
      return std::ranges::all_of(sent, [](const auto& message) { return message->is_taken; });
    }));
  }

  bool receive(std::unique_lock<std::mutex>& lock, const Op& op) {
    auto& queue = clique_.messages[{op.rank, state_->rank}];
    if (op.fails) {
      clique_.changed.wait_for(lock, kFailureTime, [&] { return state_->is_aborted.load(); });
      state_->error = Code::kInternalError;
    }
    if (!wait(lock, [&] { return !queue.empty(); })) return false;
    const std::shared_ptr<Message> message = queue.front();
    // NCCL hangs or overwrites memory if the sizes differ.
    if (message->num_bytes != op.count * size_of(op.type)) {
      return wait(lock, [] { return false; });
    }
    queue.pop_front();
    std::memmove(out_of(op), message->data, message->num_bytes);
    message->is_taken = true;
    clique_.changed.notify_all();
    return true;
  }

  // Every rank computes its own result, and writes it when all ranks have read the inputs.
  bool run_collective(std::unique_lock<std::mutex>& lock, const Op& op) {
    const uint64_t number = state_->num_collectives++;
    const auto num_ranks = static_cast<size_t>(clique_.num_ranks);
    Slot& slot = clique_.slots[number];
    slot.ops.resize(num_ranks);
    slot.ops[static_cast<size_t>(state_->rank)] = op;
    clique_.changed.notify_all();
    // NCCL does not find a mismatch: it hangs, among other things.
    const auto all_match = [&] {
      return std::ranges::all_of(slot.ops,
                                 [&](const auto& other) { return other && other->matches(op); });
    };
    if (!wait(lock, all_match)) return false;
    const std::vector<std::byte> result = computed(slot, op);
    ++slot.num_computed;
    clique_.changed.notify_all();
    if (!wait(lock, [&] { return slot.num_computed == num_ranks; })) return false;
    if (!result.empty()) std::memcpy(out_of(op), result.data(), result.size());
    if (++slot.num_left == num_ranks) clique_.slots.erase(number);
    return true;
  }

  std::vector<std::byte> computed(const Slot& slot, const Op& op) const {
    const size_t num_bytes = op.count * size_of(op.type);
    const auto rank = static_cast<size_t>(state_->rank);
    std::vector<std::byte> result;
    const auto append = [&](const Op& from) {
      result.insert(result.end(), in_of(from), in_of(from) + num_bytes);
    };
    switch (op.kind) {
      case Kind::kBroadcast:
        append(*slot.ops[static_cast<size_t>(op.rank)]);
        return result;
      case Kind::kAllGather:
        for (const auto& from : slot.ops) append(*from);
        return result;
      case Kind::kReduce:
        if (op.rank != state_->rank) return result;
        return reduced(slot, op, 0);
      case Kind::kReduceScatter:
        return reduced(slot, op, rank * num_bytes);
      default:
        return reduced(slot, op, 0);
    }
  }

  std::vector<std::byte> reduced(const Slot& slot, const Op& op, size_t offset) const {
    switch (op.type) {
      case DataType::kInt8:
        return reduced_as<int8_t>(slot, op, offset);
      case DataType::kUint8:
        return reduced_as<uint8_t>(slot, op, offset);
      case DataType::kInt32:
        return reduced_as<int32_t>(slot, op, offset);
      case DataType::kUint32:
        return reduced_as<uint32_t>(slot, op, offset);
      case DataType::kInt64:
        return reduced_as<int64_t>(slot, op, offset);
      case DataType::kUint64:
        return reduced_as<uint64_t>(slot, op, offset);
      case DataType::kFloat16:
        return reduced_as<Float16>(slot, op, offset);
      case DataType::kFloat32:
        return reduced_as<float>(slot, op, offset);
      case DataType::kFloat64:
        return reduced_as<double>(slot, op, offset);
      case DataType::kBfloat16:
        break;
    }
    return reduced_as<Bfloat16>(slot, op, offset);
  }

  static Operation operation_of(RedOp op) {
    switch (op) {
      case RedOp::kProduct:
        return Operation::kProduct;
      case RedOp::kMax:
        return Operation::kMax;
      case RedOp::kMin:
        return Operation::kMin;
      default:
        return Operation::kSum;
    }
  }

  template <typename T>
  std::vector<std::byte> reduced_as(const Slot& slot, const Op& op, size_t offset) const {
    std::vector<std::byte> result(op.count * sizeof(T));
    for (size_t i = 0; i < op.count; ++i) {
      std::optional<T> sum;
      for (const auto& from : slot.ops) {
        T value;
        std::memcpy(static_cast<void*>(&value), in_of(*from) + offset + i * sizeof(T), sizeof(T));
        if (op.op == RedOp::kAvg) value = multiplied(value, 1.0 / clique_.num_ranks);
        if (int(op.op) >= kFirstMadeOp) value = multiplied(value, from->factor);
        sum = sum ? combined(operation_of(op.op), *sum, value) : value;
      }
      std::memcpy(result.data() + i * sizeof(T), static_cast<const void*>(&*sum), sizeof(T));
    }
    return result;
  }

  const std::shared_ptr<RankState> state_;
  Clique& clique_;
  const std::vector<Op> ops_;
};

// Records that a thread uses the communicator. NCCL allows one thread at a time.
class Use {
 public:
  Use(Comm* comm, const char* function) : comm_(comm) {
    {
      const std::lock_guard lock(process().mutex);
      if (!process().comms.contains(comm)) comm_ = nullptr;
    }
    if (comm_ == nullptr) {
      code_ = misused(std::string(function) + ": the communicator does not exist");
    } else if (comm_->is_in_use.exchange(true)) {
      comm_ = nullptr;
      code_ = misused(std::string(function) + ": another thread uses the communicator");
    }
  }
  ~Use() {
    if (comm_ != nullptr) comm_->is_in_use = false;
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

  // Reports a call that is not allowed while the communicator is in progress.
  Code check_settled(const char* function) {
    if (code_ != Code::kSuccess) return code_;
    const std::lock_guard lock(comm_->mutex);
    if (!comm_->in_progress_until) return Code::kSuccess;
    return misused(std::string(function) + ": the communicator is in progress");
  }
  Code code() const { return code_; }

 private:
  Comm* comm_;
  Code code_ = Code::kSuccess;
};

// Begins a time in which the communicator is "in progress"; REQUIRES: comm.mutex is locked.
Code begin_progress(Comm& comm) {
  comm.in_progress_until = Clock::now() + std::chrono::microseconds(comm.faults.progress_us);
  return Code::kInProgress;
}

void launch(Comm& comm, void* stream, std::vector<Op> ops) {
  const bool is_first = std::exchange(comm.is_first_group, false);
  if (is_first) comm.launched_at = Clock::now();
  const RankState& state = *comm.state;
  const bool fails = comm.faults.call_fails_on == state.rank;
  const bool hangs = comm.faults.call_hangs_on == state.rank || fails;
  // A kernel that hangs waits for a message that is never sent.
  if (is_first && hangs) {
    ops.clear();
    ops.push_back({.kind = Kind::kRecv, .rank = -1, .fails = fails});
  }
  auto kernel = std::make_unique<Kernel>(comm.state, std::move(ops));
  process().device.enqueue(stream, &Kernel::run, kernel.release());
}

// Does what the time of progress delayed. REQUIRES: comm.mutex is locked.
Code progressed(Comm& comm) {
  if (!comm.in_progress_until) return comm.state->error;
  if (Clock::now() < *comm.in_progress_until) return Code::kInProgress;
  Clique& clique = *comm.state->clique;
  if (comm.is_joining) {
    const std::lock_guard lock(clique.mutex);
    if (clique.is_broken && comm.faults.init_fails_on == comm.state->rank) {
      return Code::kSystemError;
    }
    const bool is_complete = clique.num_joined == clique.num_ranks || comm.faults.is_alone;
    if (clique.is_broken || !is_complete) return Code::kInProgress;
    comm.is_joining = false;
  }
  comm.in_progress_until.reset();
  for (auto& [stream, ops] : std::exchange(comm.launches, {})) launch(comm, stream, std::move(ops));
  return comm.state->error;
}

struct Group {
  int depth = 0;
  std::map<Comm*, std::pair<void*, std::vector<Op>>> ops;
  Code error = Code::kSuccess;
};

Group& group() {
  thread_local Group of_thread;
  return of_thread;
}

Code end_group() {
  Group ended = std::exchange(group(), {});
  {
    const std::lock_guard lock(process().mutex);
    ++process().counts.groups;
  }
  if (ended.error != Code::kSuccess) return ended.error;
  for (auto& [comm, call] : ended.ops) {
    const std::lock_guard lock(comm->mutex);
    if (comm->is_first_group && comm->faults.group_is_refused_on == comm->state->rank) {
      return Code::kUnhandledCudaError;
    }
    comm->launches.push_back(std::move(call));
    begin_progress(*comm);
  }
  return ended.ops.empty() ? Code::kSuccess : Code::kInProgress;
}

Code add(Comm* comm, Op op, void* stream, const char* function) {
  Use use(comm, function);
  Code code = use.check_settled(function);
  if (code == Code::kSuccess && (op.rank < 0 || op.rank >= comm->state->clique->num_ranks)) {
    code = misused(std::string(function) + ": the rank does not exist");
  }
  if (code == Code::kSuccess && int(op.op) >= kFirstMadeOp) {
    const auto made = comm->operations.find(int(op.op));
    if (made == comm->operations.end()) {
      code = misused(std::string(function) + ": the operation does not exist");
    } else {
      op.factor = made->second;
    }
  }
  if (code == Code::kSuccess && comm->faults.call_is_refused_on == comm->state->rank) {
    code = Code::kInvalidArgument;
  }
  if (code != Code::kSuccess) {
    if (group().depth > 0) group().error = code;
    return code;
  }
  {
    const std::lock_guard lock(process().mutex);
    Counts& counts = process().counts;
    ++(op.kind == Kind::kSend   ? counts.sends
       : op.kind == Kind::kRecv ? counts.recvs
                                : counts.collectives);
  }
  auto& [of_group, ops] = group().ops[comm];
  of_group = stream;
  ops.push_back(op);
  return group().depth > 0 ? Code::kSuccess : end_group();
}

}  // namespace

// The functions of NCCL and those of fake_nccl_control.h. Their names and arguments are given.
// NOLINTBEGIN(readability-identifier-naming, bugprone-easily-swappable-parameters)
extern "C" {

__attribute__((visibility("default"))) void fakeNcclAttach(const DeviceFunctions* functions) {
  process().device = *functions;
}

__attribute__((visibility("default"))) void fakeNcclSetFaults(const Faults* faults) {
  const std::lock_guard lock(process().mutex);
  process().faults = *faults;
}

__attribute__((visibility("default"))) void fakeNcclGetCounts(Counts* counts) {
  const std::lock_guard lock(process().mutex);
  *counts = process().counts;
}

__attribute__((visibility("default"))) const char* fakeNcclFirstMisuse() {
  return process().misuse.c_str();
}

__attribute__((visibility("default"))) Code ncclGetVersion(int* version) {
  *version = kVersion;
  return Code::kSuccess;
}

__attribute__((visibility("default"))) Code ncclGetUniqueId(nccl::UniqueId* id) {
  const std::lock_guard lock(process().mutex);
  std::memset(id->bytes, 0, sizeof(id->bytes));
  const std::string text = "fake " + std::to_string(++process().num_ids);
  std::memcpy(id->bytes, text.data(), text.size());
  return Code::kSuccess;
}

__attribute__((visibility("default"))) Code ncclCommInitRankConfig(Comm** comm, int num_ranks,
                                                                   nccl::UniqueId id, int rank,
                                                                   nccl::Config* config) {
  if (config->size < sizeof(nccl::Config) || config->magic != 0xcafebeef || config->blocking != 0) {
    return misused("ncclCommInitRankConfig: the configuration is not that of a nonblocking one");
  }
  auto made = std::make_unique<Comm>();
  made->state = std::make_shared<RankState>();
  made->state->rank = rank;
  const std::lock_guard lock(process().mutex);
  made->faults = process().faults;
  std::shared_ptr<Clique>& clique = process().cliques[std::string(id.bytes, sizeof(id.bytes))];
  if (clique == nullptr) clique = std::make_shared<Clique>(num_ranks);
  made->state->clique = clique;
  {
    const std::lock_guard in_clique(clique->mutex);
    ++clique->num_joined;
    if (made->faults.init_fails_on == rank) clique->is_broken = true;
  }
  begin_progress(*made);
  ++process().counts.communicators;
  process().comms.insert(made.get());
  *comm = made.release();
  return Code::kInProgress;
}

__attribute__((visibility("default"))) Code ncclCommGetAsyncError(Comm* comm, Code* state) {
  {
    const std::lock_guard lock(process().mutex);
    if (!process().comms.contains(comm)) return Code::kInvalidArgument;
  }
  const std::lock_guard lock(comm->mutex);
  *state = progressed(*comm);
  const bool throws = comm->faults.state_throws_on == comm->state->rank && comm->launched_at &&
                      Clock::now() > *comm->launched_at + kFailureTime;
  if (throws) throw std::runtime_error("the test wants an exception");
  return Code::kSuccess;
}

__attribute__((visibility("default"))) Code ncclCommFinalize(Comm* comm) {
  Use use(comm, "ncclCommFinalize");
  const Code code = use.check_settled("ncclCommFinalize");
  if (code != Code::kSuccess) return code;
  const std::lock_guard lock(comm->mutex);
  comm->is_finalizing = true;
  return begin_progress(*comm);
}

// Waits as long as the faults of the process are those with which the communicator was made.
static void hang_at_end(const Comm& comm) {
  const int rank = comm.state->rank;
  const auto hangs = [&] {
    const std::lock_guard lock(process().mutex);
    return comm.faults.end_hangs_on == rank && process().faults.end_hangs_on == rank;
  };
  while (hangs()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Removes the communicator. Kernels that have not begun do nothing then.
static Code remove(Comm* comm, bool is_abort) {
  hang_at_end(*comm);
  {
    const std::lock_guard lock(process().mutex);
    if (process().comms.erase(comm) == 0) return Code::kInvalidArgument;
    --process().counts.communicators;
    if (is_abort) ++process().counts.aborts;
  }
  const std::unique_ptr<Comm> owned(comm);
  Clique& clique = *owned->state->clique;
  std::unique_lock lock(clique.mutex);
  owned->state->is_aborted = true;
  clique.changed.notify_all();
  clique.changed.wait(lock, [&] { return owned->state->num_running == 0; });
  return Code::kSuccess;
}

__attribute__((visibility("default"))) Code ncclCommDestroy(Comm* comm) {
  if (!comm->is_finalizing) return misused("ncclCommDestroy: the communicator is not finalized");
  return remove(comm, false);
}

__attribute__((visibility("default"))) Code ncclCommAbort(Comm* comm) {
  return remove(comm, true);
}

__attribute__((visibility("default"))) const char* ncclGetErrorString(Code code) {
  switch (code) {
    case Code::kSuccess:
      return "no error";
    case Code::kSystemError:
      return "unhandled system error";
    case Code::kInternalError:
      return "internal error";
    default:
      return "another error";
  }
}

__attribute__((visibility("default"))) const char* ncclGetLastError(Comm* /*comm*/) {
  return "the test wants it";
}

__attribute__((visibility("default"))) Code ncclAllReduce(const void* in, void* out, size_t count,
                                                          DataType type, RedOp op, Comm* comm,
                                                          void* stream) {
  return add(comm, {Kind::kAllReduce, in, out, count, type, op}, stream, "ncclAllReduce");
}

__attribute__((visibility("default"))) Code ncclBroadcast(const void* in, void* out, size_t count,
                                                          DataType type, int root, Comm* comm,
                                                          void* stream) {
  return add(comm, {Kind::kBroadcast, in, out, count, type, RedOp::kSum, root}, stream,
             "ncclBroadcast");
}

__attribute__((visibility("default"))) Code ncclReduce(const void* in, void* out, size_t count,
                                                       DataType type, RedOp op, int root,
                                                       Comm* comm, void* stream) {
  return add(comm, {Kind::kReduce, in, out, count, type, op, root}, stream, "ncclReduce");
}

__attribute__((visibility("default"))) Code ncclAllGather(const void* in, void* out, size_t count,
                                                          DataType type, Comm* comm, void* stream) {
  return add(comm, {Kind::kAllGather, in, out, count, type}, stream, "ncclAllGather");
}

__attribute__((visibility("default"))) Code ncclReduceScatter(const void* in, void* out,
                                                              size_t count, DataType type, RedOp op,
                                                              Comm* comm, void* stream) {
  return add(comm, {Kind::kReduceScatter, in, out, count, type, op}, stream, "ncclReduceScatter");
}

__attribute__((visibility("default"))) Code ncclSend(const void* in, size_t count, DataType type,
                                                     int peer, Comm* comm, void* stream) {
  return add(comm, {Kind::kSend, in, nullptr, count, type, RedOp::kSum, peer}, stream, "ncclSend");
}

__attribute__((visibility("default"))) Code ncclRecv(void* out, size_t count, DataType type,
                                                     int peer, Comm* comm, void* stream) {
  return add(comm, {Kind::kRecv, nullptr, out, count, type, RedOp::kSum, peer}, stream, "ncclRecv");
}

__attribute__((visibility("default"))) Code ncclGroupStart() {
  ++group().depth;
  const std::lock_guard lock(process().mutex);
  ++process().counts.open_groups;
  return Code::kSuccess;
}

__attribute__((visibility("default"))) Code ncclGroupEnd() {
  if (group().depth == 0) return misused("ncclGroupEnd: no group was begun in this thread");
  {
    const std::lock_guard lock(process().mutex);
    --process().counts.open_groups;
  }
  return --group().depth > 0 ? Code::kSuccess : end_group();
}

__attribute__((visibility("default"))) Code ncclRedOpCreatePreMulSum(
    RedOp* op, void* scalar, DataType type, nccl::ScalarResidence residence, Comm* comm) {
  Use use(comm, "ncclRedOpCreatePreMulSum");
  const Code code = use.check_settled("ncclRedOpCreatePreMulSum");
  if (code != Code::kSuccess) return code;
  const bool is_known = residence == nccl::ScalarResidence::kHostImmediate &&
                        (type == DataType::kFloat32 || type == DataType::kFloat64);
  if (!is_known) return misused("ncclRedOpCreatePreMulSum: the fake has no such scalar");
  *op = static_cast<RedOp>(comm->next_operation++);
  comm->operations[int(*op)] = type == DataType::kFloat64
                                   ? *static_cast<const double*>(scalar)
                                   : double{*static_cast<const float*>(scalar)};
  const std::lock_guard lock(process().mutex);
  ++process().counts.operations;
  return Code::kSuccess;
}

__attribute__((visibility("default"))) Code ncclRedOpDestroy(RedOp op, Comm* comm) {
  Use use(comm, "ncclRedOpDestroy");
  const Code code = use.check_settled("ncclRedOpDestroy");
  if (code != Code::kSuccess) return code;
  if (comm->operations.erase(int(op)) == 0) return misused("ncclRedOpDestroy: no such operation");
  const std::lock_guard lock(process().mutex);
  --process().counts.operations;
  return Code::kSuccess;
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming, bugprone-easily-swappable-parameters)

}  // namespace cadre::testing::fake_nccl
