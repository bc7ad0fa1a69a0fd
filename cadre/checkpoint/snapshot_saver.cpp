#include "cadre/checkpoint/snapshot_saver.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <exception>
#include <map>
#include <string>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/checkpoint/rank_agreement.h"
#include "cadre/os/system.h"

namespace cadre {
namespace {

constexpr const char* kThreadName = "cadre-snapshot";

// Copies of tensors, in memory that the next copy of the same sizes reuses.
class Staging {
 public:
  SnapshotParts copy(const SnapshotParts& parts) {
    const at::NoGradGuard no_grad;
    SnapshotParts copied = without_copies(parts);
    for (auto* tensors : {&copied.parameters, &copied.buffers}) {
      for (SnapshotTensor& tensor : *tensors) {
        tensor.values = staged("model." + tensor.name, tensor.values);
        tensor.flat.reset();
      }
    }
    for (ParameterState& state : copied.optimizer) {
      for (auto* tensors : {&state.tensors, &state.scalars}) {
        for (auto& [key, tensor] : *tensors) {
          tensor = staged(cadre::format("state.{}.{}", state.parameter, key), tensor);
        }
      }
    }
    return copied;
  }

 private:
  at::Tensor staged(const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;  // saving refuses it
    at::Tensor& memory = memory_[name];
    if (!memory.defined() || memory.sizes() != tensor.sizes() ||
        memory.scalar_type() != tensor.scalar_type()) {
      memory = at::empty(tensor.sizes(), tensor.scalar_type());
    }
    return memory.copy_(tensor.detach());
  }

  std::map<std::string, at::Tensor> memory_;
};

}  // namespace

class SnapshotSaver::Impl {
 public:
  Impl(SnapshotFolder folder, std::optional<ProcessGroup> group, SaveOptions options)
      : folder_(std::move(folder)),
        options_(std::move(options)),
        group_(std::move(group)),
        ranks_(group_ ? RankAgreement(*group_, options_.timeout) : RankAgreement()) {}

  ~Impl() {
    if (thread_ && group_) group_->abort("the saver of snapshots is destroyed while it saves");
    join();
  }

  Status save(int64_t step, const SnapshotParts& parts) {
    join();
    Status earlier = std::exchange(outcome_, Status());
    staged_ = staging_.copy(parts);
    thread_ = system_->spawn(kThreadName, [this, step] { outcome_ = write(step); });
    return earlier;
  }

  Status finish() {
    join();
    return std::exchange(outcome_, Status());
  }

  Status close() {
    Status status = finish();
    try {
      if (group_) group_->close();
    } catch (const Error& error) {
      if (status.ok()) status = error;
    }
    return status;
  }

 private:
  void join() {
    if (!thread_) return;
    thread_->join();
    thread_.reset();
  }

  Status write(int64_t step) {
    try {
      save_sharded(folder_, step, staged_, ranks_, options_);
      return {};
    } catch (const Error& error) {
      return error.with_context("saved in the background");
    } catch (const std::exception& error) {
      return Error(
          ErrorCode::kInternal,
          cadre::format("snapshot of step {}, saved in the background: {}", step, error.what()));
    }
  }

  SnapshotFolder folder_;
  const SaveOptions options_;
  std::optional<ProcessGroup> group_;
  RankAgreement ranks_;
  Staging staging_;
  SnapshotParts staged_;
  std::unique_ptr<os::System> system_ = os::make_native_system();
  // Written by the thread, read after it was joined.
  Status outcome_;
  std::unique_ptr<os::Thread> thread_;
};

SnapshotSaver::SnapshotSaver(SnapshotFolder folder, const ProcessGroup& group,
                             SaveOptions options) {
  std::vector<int> everyone;
  for (int rank = 0; rank < group.world_size(); ++rank) everyone.push_back(rank);
  std::optional<ProcessGroup> own;
  if (group.world_size() > 1) own = group.new_group(everyone);
  impl_ = std::make_unique<Impl>(std::move(folder), std::move(own), std::move(options));
}

SnapshotSaver::SnapshotSaver(SnapshotFolder folder, SaveOptions options)
    : impl_(std::make_unique<Impl>(std::move(folder), std::nullopt, std::move(options))) {}

SnapshotSaver::~SnapshotSaver() = default;

void SnapshotSaver::save(int64_t step, const SnapshotParts& parts) {
  impl_->save(step, parts).value_or_throw();
}
void SnapshotSaver::finish() {
  impl_->finish().value_or_throw();
}
void SnapshotSaver::close() {
  impl_->close().value_or_throw();
}

}  // namespace cadre
