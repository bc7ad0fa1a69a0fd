#include "cadre/train/checkpoint/snapshot_saver.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/fabric/flight/flight_record.h"
#include "cadre/core/os/host/stderr_log.h"
#include "cadre/core/os/system.h"
#include "cadre/tensor/device/stream_point.h"
#include "cadre/tensor/group/caught_error.h"
#include "cadre/train/checkpoint/rank_agreement.h"

namespace cadre {
namespace {

constexpr const char* kThreadName = "cadre-snapshot";
// The longest wait of the destructor for a save while an exception unwinds the stack.
constexpr Duration kUnwindingTimeout = std::chrono::seconds(5);
// The interval at which the wait for copies from a device looks whether the saver gives up.
constexpr Duration kLookTime = std::chrono::milliseconds(5);

// Returns the entry of a tensor that the save skips because another rank writes it. The entry keeps
// its name, because the save compares the names on all ranks, but has no elements.
SnapshotTensor name_of_copy(const SnapshotTensor& tensor) {
  const c10::InferenceMode mode(false);
  return {.name = tensor.name,
          .sizes = tensor.sizes,
          .boxes = {},
          .values = at::empty({0}, tensor.values.options()),
          .is_copy = true};
}

Error late_copy(const device::StreamPoint& end, Duration waited) {
  return Error(
      ErrorCode::kTimeout,
      cadre::format("{} has not copied the tensors to the host after {} ms, because the work that "
                    "was on stream {} has not ended; raise the timeout of the options, or look for "
                    "what the stream waits for",
                    end.stream().device().str(),
                    std::chrono::duration_cast<std::chrono::milliseconds>(waited).count(),
                    end.stream().id()));
}

// Copies tensors into memory that is reused by the next copy of the same sizes. The memory of a
// tensor on a device is pinned: the copy is enqueued on the caller's current stream of that device,
// behind what has changed the tensor and ahead of what will, and the host does not wait for it.
class Staging {
 public:
  // REQUIRES: the copies of the last call have ended, or forget() was called since.
  SnapshotParts copy(const SnapshotParts& parts) {
    const at::NoGradGuard no_grad;
    enqueued_on_.clear();
    SnapshotParts copied = without_copies(parts);
    for (auto* tensors : {&copied.parameters, &copied.buffers}) {
      for (SnapshotTensor& tensor : *tensors) {
        tensor.values = staged({"", tensor.name}, tensor.values);
        tensor.memory = {};
      }
    }
    for (ParameterState& state : copied.optimizer) {
      for (auto* tensors : {&state.tensors, &state.scalars}) {
        for (auto& [key, tensor] : *tensors) {
          tensor = staged({key, state.parameter}, tensor);
        }
      }
    }
    for (const SnapshotTensor& tensor : parts.parameters) {
      if (tensor.is_copy) copied.parameters.push_back(name_of_copy(tensor));
    }
    return copied;
  }

  // Returns the points at which all copies of the last copy() have ended.
  std::vector<device::StreamPoint> ends_of_copies() const {
    std::vector<device::StreamPoint> ends;
    for (const c10::Device& device : enqueued_on_) {
      ends.push_back(device::StreamPoint::on_current_stream(device));
    }
    return ends;
  }

  // Gives up the memory. The allocator of pinned memory keeps it until the copies have ended.
  void forget() { memory_.clear(); }

 private:
  // Identifies a tensor. The first text is the name of the optimizer's state, or empty for a tensor
  // of the model; the second is the name of the tensor.
  using Key = std::pair<std::string, std::string>;

  at::Tensor staged(const Key& key, const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;  // the save itself throws for an undefined tensor
    Memory& memory = memory_[key];
    const c10::Device device = tensor.device();
    if (!memory.tensor.defined() || memory.tensor.sizes() != tensor.sizes() ||
        memory.tensor.scalar_type() != tensor.scalar_type() || memory.device != device) {
      // Memory that is made in inference mode could not be changed outside of that mode.
      const c10::InferenceMode mode(false);
      memory = {.tensor = at::empty(
                    tensor.sizes(),
                    at::TensorOptions(tensor.scalar_type()).pinned_memory(is_copied_late(tensor))),
                .device = device};
    }
    if (is_copied_late(tensor)) enqueued_on_.insert(device);
    // A lazy sign or conjugate would be resolved on the host, before the copy has ended.
    const at::Tensor values = tensor.detach().resolve_conj().resolve_neg();
    return memory.tensor.copy_(values, /*non_blocking=*/is_copied_late(tensor));
  }

  static bool is_copied_late(const at::Tensor& tensor) {
    return !tensor.is_cpu() && !tensor.is_meta();
  }

  struct ByNumber {
    bool operator()(const c10::Device& a, const c10::Device& b) const {
      return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
    }
  };
  struct Memory {
    at::Tensor tensor;
    c10::Device device = at::kCPU;  // that of the tensor which is copied into it
  };

  std::map<Key, Memory> memory_;
  std::set<c10::Device, ByNumber> enqueued_on_;
};

// A group whose collectives may have written the tensors of a save.
struct Writer {
  ProcessGroup group;
  uint64_t num_issued = 0;  // the number of its collectives before the save
};

// Returns whether a collective on a device that was issued before the save has not ended. Its
// stream may have passed it nevertheless, if it has failed.
bool has_pending(const Writer& writer) {
  const FlightRecord record = writer.group.communicator().flight_record();
  return std::ranges::any_of(record.entries, [&](const FlightEntry& entry) {
    return entry.state == wire::ActivityState::kRunning && entry.number <= writer.num_issued &&
           OpDescriptor::from_fingerprint(entry.fingerprint).on_device;
  });
}

Error late_collective(const ProcessGroup& group, Duration waited) {
  return Error(
      ErrorCode::kTimeout,
      cadre::format(
          "a collective of group \"{}\" that writes tensors of the snapshot has not ended "
          "after {} ms, although its device has passed it; raise the timeout of the "
          "options, or look for why the group waits",
          group.name(), std::chrono::duration_cast<std::chrono::milliseconds>(waited).count()));
}

}  // namespace

class SnapshotSaver::Impl {
 public:
  // `training`: the group of the ranks whose tensors are saved; nullopt for a single process.
  Impl(const SnapshotFolder& folder, std::optional<ProcessGroup> group,
       const std::optional<ProcessGroup>& training, SaveOptions options)
      : folder_(folder),
        options_(std::move(options)),
        group_(std::move(group)),
        ranks_(group_ ? RankAgreement(*group_, options_.timeout) : RankAgreement()) {
    if (training) writers_.push_back({*training});
    for (const ProcessGroup& other : options_.groups) writers_.push_back({other});
  }

  ~Impl() {
    try {
      end();
    } catch (...) {
      report(caught_error());
    }
  }

  Status save(int64_t step, const SnapshotParts& parts) {
    join();
    Status earlier = std::exchange(outcome_, Status());
    try {
      staged_ = staging_.copy(parts);
      ends_of_copies_ = staging_.ends_of_copies();
      for (Writer& writer : writers_) {
        writer.num_issued = writer.group.communicator().num_collectives();
      }
    } catch (...) {
      // The error is passed to the save instead of thrown: the other ranks have begun this save and
      // wait for this rank.
      lose_staged(caught_error());
    }
    step_ = step;
    is_done_ = false;
    thread_ = system_->spawn(kThreadName, [this, step] {
      outcome_ = write(step);
      is_done_ = true;
      end_of_save_->unpark();
    });
    return earlier;
  }

  Status finish() {
    join();
    return std::exchange(outcome_, Status());
  }

  Status close(Duration timeout) {
    const Deadline deadline = system_->deadline_in(timeout);
    end_waits_at(deadline, [&] {
      return cadre::format(
          "rank {} closes the saver, but the snapshot of step {} was not saved within {} ms",
          ranks_.rank(), step_,
          std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count());
    });
    Status status = finish();
    try {
      if (group_) group_->communicator().close(deadline);
    } catch (const Error& error) {
      if (status.ok()) status = error;
    }
    return status;
  }

 private:
  // If the save has not ended by the deadline, aborts the group, so that the save fails on all
  // ranks.
  void end_waits_at(Deadline deadline, const std::function<std::string()>& reason) {
    if (!thread_) return;
    while (!is_done_ && end_of_save_->park(deadline)) continue;
    if (is_done_) return;
    gives_up_ = true;
    if (group_) group_->abort(reason());
  }

  void join() {
    if (!thread_) return;
    thread_->join();
    thread_.reset();
  }

  void lose_staged(Error error) {
    staged_ = std::move(error);
    staging_.forget();
    ends_of_copies_.clear();
  }

  // Waits until the copies from devices have ended. Their failure becomes that of the save, of
  // which all ranks learn.
  void await_copies() {
    const TimePoint begin = system_->now();
    // The other ranks wait for this one as long as the timeout, and must get the reason before.
    const Deadline deadline =
        system_->deadline_in(group_ ? options_.timeout / 2 : options_.timeout);
    try {
      for (const device::StreamPoint& end : ends_of_copies_) {
        while (!end.wait(*system_, deadline.earlier(system_->deadline_in(kLookTime))).ok()) {
          if (!gives_up_ && !deadline.has_passed(system_->now())) continue;
          return lose_staged(late_copy(end, system_->now() - begin));
        }
      }
      if (!ends_of_copies_.empty()) check_writers(begin, deadline);
    } catch (...) {
      lose_staged(caught_error());
    }
  }

  // Throws if the copies may have wrong values, because a collective that wrote them has failed.
  void check_writers(TimePoint begin, Deadline deadline) {
    const std::unique_ptr<os::Waiter> waiter = system_->make_waiter();
    for (const Writer& writer : writers_) {
      std::optional<Error> error;
      while (!(error = writer.group.error()) && has_pending(writer)) {
        if (gives_up_ || deadline.has_passed(system_->now())) {
          throw late_collective(writer.group, system_->now() - begin);
        }
        waiter->park(system_->deadline_in(kLookTime));
      }
      if (error) throw *error;
    }
  }

  Status write(int64_t step) {
    await_copies();
    try {
      save_sharded(folder_, step, staged_, ranks_, options_);
      return {};
    } catch (...) {
      return caught_error().with_context("saved in the background");
    }
  }

  // Waits for the last save and reports its error, unless a call has thrown it already.
  void end() {
    const bool is_unwinding = std::uncaught_exceptions() > num_exceptions_;
    if (is_unwinding) {
      end_waits_at(system_->deadline_in(std::min(options_.timeout, kUnwindingTimeout)), [&] {
        return cadre::format(
            "rank {} leaves by an exception while the snapshot of step {} is saved", ranks_.rank(),
            step_);
      });
    }
    join();
    if (!outcome_.ok()) report(outcome_.error());
  }

  void report(const Error& error) const noexcept {
    try {
      os::StderrLog(LogLevel::kError, Rank(ranks_.rank()))
          .write(LogLevel::kError, "checkpoint",
                 cadre::format("the snapshot of step {} is lost folder={} error=\"{}\"", step_,
                               folder_.run_folder(), error.message()));
    } catch (...) {
      // This runs in the destructor, so there is no caller to throw to.
      return;
    }
  }

  SnapshotFolder folder_;
  const SaveOptions options_;
  std::optional<ProcessGroup> group_;
  RankAgreement ranks_;
  Staging staging_;
  Result<SnapshotParts> staged_ = SnapshotParts();
  std::vector<device::StreamPoint> ends_of_copies_;
  std::vector<Writer> writers_;
  int64_t step_ = 0;
  const int num_exceptions_ = std::uncaught_exceptions();
  std::unique_ptr<os::System> system_ = os::make_native_system();
  std::unique_ptr<os::Waiter> end_of_save_ = system_->make_waiter();
  std::atomic<bool> is_done_ = true;
  std::atomic<bool> gives_up_ = false;  // no wait of the thread may go on
  // Written by the thread; read only after the thread was joined.
  Status outcome_;
  std::unique_ptr<os::Thread> thread_;
};

SnapshotSaver::SnapshotSaver(SnapshotFolder folder, const ProcessGroup& group,
                             SaveOptions options) {
  std::vector<int> everyone;
  for (int rank = 0; rank < group.world_size(); ++rank) everyone.push_back(rank);
  std::optional<ProcessGroup> own;
  if (group.world_size() > 1) own = group.new_group(everyone);
  impl_ = std::make_unique<Impl>(std::move(folder), std::move(own), group, std::move(options));
}

SnapshotSaver::SnapshotSaver(SnapshotFolder folder, SaveOptions options)
    : impl_(std::make_unique<Impl>(std::move(folder), std::nullopt, std::nullopt,
                                   std::move(options))) {}

SnapshotSaver::~SnapshotSaver() = default;

void SnapshotSaver::save(int64_t step, const SnapshotParts& parts) {
  impl_->save(step, parts).value_or_throw();
}
void SnapshotSaver::finish() {
  impl_->finish().value_or_throw();
}
void SnapshotSaver::close(Duration timeout) {
  if (timeout <= Duration(0)) {
    throw Error(ErrorCode::kInvalidArgument,
                "SnapshotSaver::close: the timeout is not positive; pass a positive one");
  }
  impl_->close(timeout).value_or_throw();
}

}  // namespace cadre
