#include "cadre/core/comm/symmetric/one_sided_access.h"

#include <exception>
#include <new>

#include "cadre/core/base/format.h"

namespace cadre {

void OneSidedAccess::add(const std::shared_ptr<Memory>& memory) {
  const std::lock_guard lock(mutex_);
  if (has_ended_.load(std::memory_order_relaxed)) {
    memory->withdraw(failure_ ? failure_->message() : "the group has failed").value_or_throw();
    return;
  }
  std::erase_if(memory_, [](const std::weak_ptr<Memory>& known) { return known.expired(); });
  memory_.push_back(memory);
}

// Withdraws the memory before it copies the failure, because there may be no memory for the copy.
// Each piece is withdrawn separately: if one cannot be withdrawn, the others still are.
void OneSidedAccess::end(const Error& failure) noexcept {
  std::optional<Error> obstacle;
  {
    const std::lock_guard lock(mutex_);
    if (has_ended_.exchange(true, std::memory_order_seq_cst)) return;
    for (const std::weak_ptr<Memory>& known : memory_) {
      try {
        const std::shared_ptr<Memory> memory = known.lock();
        const Status withdrawn = memory == nullptr ? Status() : memory->withdraw(failure.message());
        if (!withdrawn.ok()) obstacle = withdrawn.error();
      } catch (const std::exception& thrown) {
        obstacle = Error(ErrorCode::kUnavailable, thrown.what());
      }
    }
    memory_.clear();
    try {
      failure_ = failure;
    } catch (const std::bad_alloc&) {
      // There is not enough memory for a copy of the failure, so check() throws a general error.
    }
  }
  if (obstacle) log_failed(*obstacle);
}

void OneSidedAccess::log_failed(const Error& error) const noexcept try {
  if (log_ == nullptr) return;
  log_->write(
      LogLevel::kError, "comm",
      format("peers may still write into symmetric memory of this rank after the failure of "
             "the group, do not use its content: {}",
             error.message()));
} catch (const std::exception&) {
  // There is not enough memory for the log line.
}

void OneSidedAccess::check() const {
  if (!has_ended_.load(std::memory_order_seq_cst)) return;
  const std::lock_guard lock(mutex_);
  throw failure_ ? *failure_ : Error(ErrorCode::kAborted, "the group has failed");
}

}  // namespace cadre
