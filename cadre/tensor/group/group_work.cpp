#include "cadre/tensor/group/group_work.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "cadre/tensor/device/stream_point.h"

namespace cadre {
namespace {

void wait_until(const Work& work, std::optional<Deadline> deadline) {
  deadline ? work.wait(*deadline) : work.wait();
}

class FinishedAfter final : public Work::State, public std::enable_shared_from_this<FinishedAfter> {
 public:
  FinishedAfter(Work operation, std::function<void()> finish, c10::Device device)
      : operation_(std::move(operation)), finish_(std::move(finish)), device_(device) {
    if (!device_.is_cpu()) issued_ = device::StreamPoint::on_current_stream(device_);
  }
  // The memory of the temporary tensors goes back to the stream of the call, which may use it again
  // only behind what `finish` has enqueued on another stream.
  ~FinishedAfter() override {
    if (!finished_) return;
    try {
      finished_->block(issued_->stream());
    } catch (const c10::Error&) {
      // The driver has failed, and every later call on the device reports that.
    }
  }

  void wait(std::optional<Deadline> deadline) override {
    wait_until(operation_, deadline);
    finish();
    if (finished_) finished_->order_current_stream().value_or_throw();
  }
  bool is_completed() const override { return operation_.is_completed(); }
  std::optional<Error> error() const override { return operation_.error(); }
  void on_completed(Work::Callback callback) override {
    operation_.on_completed([self = shared_from_this(),
                             callback = std::move(callback)](const std::optional<Error>& error) {
      if (!error) self->finish();
      callback(error);
    });
  }
  Deadline deadline_in(Duration timeout) const override { return operation_.deadline_in(timeout); }

 private:
  void finish() {
    std::call_once(is_finished_, [this] {
      finish_();
      if (!device_.is_cpu()) finished_ = device::StreamPoint::on_current_stream(device_);
    });
  }

  const Work operation_;
  const std::function<void()> finish_;
  const c10::Device device_;
  std::once_flag is_finished_;
  std::optional<device::StreamPoint> issued_;    // its stream is that of the call; null for the CPU
  std::optional<device::StreamPoint> finished_;  // its stream is that of the call of finish_
};

class AllOf final : public Work::State, public std::enable_shared_from_this<AllOf> {
 public:
  explicit AllOf(std::vector<Work> works) : works_(std::move(works)) {}

  void wait(std::optional<Deadline> deadline) override {
    for (const Work& work : works_) wait_until(work, deadline);
  }
  bool is_completed() const override {
    return std::all_of(works_.begin(), works_.end(),
                       [](const Work& work) { return work.is_completed(); });
  }
  std::optional<Error> error() const override {
    for (const Work& work : works_) {
      if (std::optional<Error> error = work.error()) return error;
    }
    return std::nullopt;
  }
  void on_completed(Work::Callback callback) override {
    if (works_.empty()) return callback(std::nullopt);
    const auto num_left = std::make_shared<std::atomic<size_t>>(works_.size());
    for (const Work& work : works_) {
      work.on_completed(
          [self = shared_from_this(), num_left, callback](const std::optional<Error>&) {
            if (num_left->fetch_sub(1, std::memory_order_acq_rel) == 1) callback(self->error());
          });
    }
  }
  Deadline deadline_in(Duration timeout) const override {
    // If there are no operations, the deadline is not used.
    return works_.empty() ? Deadline(TimePoint()) : works_.front().deadline_in(timeout);
  }

 private:
  const std::vector<Work> works_;
};

}  // namespace

Work finish_after(Work operation, std::function<void()> finish, c10::Device device) {
  return Work(std::make_shared<FinishedAfter>(std::move(operation), std::move(finish), device));
}

Work all_of(std::vector<Work> works) {
  return Work(std::make_shared<AllOf>(std::move(works)));
}

}  // namespace cadre
