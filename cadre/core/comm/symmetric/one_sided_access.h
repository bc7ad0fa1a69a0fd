// Controls whether the symmetric memory of a group may be accessed outside of operations: by
// pointers to the pieces of peers, by views and by signals. The first failure of the group ends
// this access.
//
// Threads: any. Blocking: end(), while pages to which peers may write are copied, and check() and
// add() during that. Lifetime: shared by the group, its monitor and its buffers, which outlive
// both. Errors: check() throws the first failure of the group.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/log.h"

namespace cadre {

class OneSidedAccess {
 public:
  // Memory of this rank that peers of the group can access.
  class Memory {
   public:
    virtual ~Memory() = default;
    // Makes the memory private, so that later writes of peers do not change it. Called at most
    // once.
    virtual Status withdraw(std::string_view reason) = 0;
  };

  // `log` gets an error if end() cannot withdraw memory; the group uses it, too. If null, the error
  // is not logged.
  explicit OneSidedAccess(std::shared_ptr<LogSink> log) : log_(std::move(log)) {}

  // Adds memory. It is withdrawn at once if the group has failed.
  void add(const std::shared_ptr<Memory>& memory);
  // Called when the group has failed. Withdraws all memory before any call throws the failure. So
  // the program, which may use its memory as private memory from then on, never sees a late write
  // of a peer. Later calls do nothing.
  void end(const Error& failure) noexcept;
  void check() const;

 private:
  void log_failed(const Error& error) const noexcept;

  const std::shared_ptr<LogSink> log_;
  mutable std::mutex mutex_;
  std::atomic<bool> has_ended_{false};
  std::optional<Error> failure_;
  std::vector<std::weak_ptr<Memory>> memory_;  // the buffers own the memory
};

}  // namespace cadre
