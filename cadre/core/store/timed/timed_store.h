// A Store as programs call it: each verb takes a time and throws cadre::Error.
//
// Threads: any, also several at once. Blocking: each call for its time at most (see store.h).
// Lifetime: a cheap value that shares the Store; the System outlives it. Errors: those of the Store
// (store.h), thrown. The verbs are those of store.h, which says what each does.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/file/file_store.h"
#include "cadre/core/store/store.h"
#include "cadre/core/store/tcp/tcp_store.h"

namespace cadre {

class CADRE_EXPORT TimedStore {
 public:
  // Timeout of one call; nullopt: that of the TimedStore. Not above 0: the call does not wait.
  using Timeout = std::optional<Duration>;

  // Throws kInvalidArgument if `store` is null, as membership().store of a group of one may be.
  TimedStore(os::System& system, std::shared_ptr<Store> store, Duration timeout);
  // Connects within `timeout`, which is also that of the calls.
  static TimedStore connect(os::System& system, const TcpStoreOptions& options, Duration timeout);
  // Opens or creates the file.
  static TimedStore open(os::System& system, const FileStoreOptions& options, Duration timeout);
  // The same store, each key of which begins with `prefix` and a slash.
  TimedStore with_prefix(std::string prefix) const;

  const std::shared_ptr<Store>& store() const { return store_; }

  void set(std::string_view key, std::string_view value, Timeout timeout = {}) const;
  std::string get(std::string_view key, Timeout timeout = {}) const;
  int64_t add(std::string_view key, int64_t amount, Timeout timeout = {}) const;
  void wait(std::span<const std::string> keys, Timeout timeout = {}) const;
  bool check(std::span<const std::string> keys, Timeout timeout = {}) const;
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Timeout timeout = {}) const;
  bool erase(std::string_view key, Timeout timeout = {}) const;
  int64_t num_keys(Timeout timeout = {}) const;
  void append(std::string_view key, std::string_view value, Timeout timeout = {}) const;
  std::vector<std::string> multi_get(std::span<const std::string> keys, Timeout timeout = {}) const;
  void multi_set(std::span<const std::string> keys, std::span<const std::string> values,
                 Timeout timeout = {}) const;
  std::vector<std::string> list_keys(Timeout timeout = {}) const;
  void queue_push(std::string_view queue, std::string_view value, Timeout timeout = {}) const;
  std::string queue_pop(std::string_view queue, Timeout timeout = {}) const;
  std::optional<std::string> try_queue_pop(std::string_view queue, Timeout timeout = {}) const;
  int64_t queue_length(std::string_view queue, Timeout timeout = {}) const;
  void barrier(std::string_view key, int64_t num_arrivals, Timeout timeout = {}) const;

 private:
  Deadline deadline(Timeout timeout) const {
    return system_->deadline_in(timeout.value_or(timeout_));
  }

  os::System* system_;
  std::shared_ptr<Store> store_;
  Duration timeout_;
};

}  // namespace cadre
