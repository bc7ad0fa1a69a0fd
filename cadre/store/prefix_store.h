// A view of another Store in which every key gets a prefix: "round 3" + "/" + key.
//
// Threads, blocking and errors: those of the store beneath. Lifetime: shares the store beneath.
// num_keys() counts the keys of the whole store beneath, as c10d's does; list_keys() gives the
// view's own, without the prefix. Source: c10d::PrefixStore, whose join with "/" it keeps, so that
// Python and C++ ranks agree.
#pragma once

#include <memory>

#include "cadre/store/store.h"

namespace cadre {

class CADRE_EXPORT PrefixStore final : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store)
      : prefix_(std::move(prefix)), store_(std::move(store)) {}

  Status set(std::string_view key, std::string_view value, Deadline deadline) override;
  Result<std::string> get(std::string_view key, Deadline deadline) override;
  Result<int64_t> add(std::string_view key, int64_t amount, Deadline deadline) override;
  Status wait(std::span<const std::string> keys, Deadline deadline) override;
  Result<bool> check(std::span<const std::string> keys, Deadline deadline) override;
  Result<std::string> compare_set(std::string_view key, std::string_view expected,
                                  std::string_view desired, Deadline deadline) override;
  Result<bool> erase(std::string_view key, Deadline deadline) override;
  Result<int64_t> num_keys(Deadline deadline) override;
  Status append(std::string_view key, std::string_view value, Deadline deadline) override;
  Result<std::vector<std::string>> multi_get(std::span<const std::string> keys,
                                             Deadline deadline) override;
  Status multi_set(std::span<const std::string> keys, std::span<const std::string> values,
                   Deadline deadline) override;
  Result<std::vector<std::string>> list_keys(Deadline deadline) override;
  Status queue_push(std::string_view queue, std::string_view value, Deadline deadline) override;
  Result<std::string> queue_pop(std::string_view queue, Deadline deadline) override;
  Result<std::optional<std::string>> try_queue_pop(std::string_view queue,
                                                   Deadline deadline) override;
  Result<int64_t> queue_length(std::string_view queue, Deadline deadline) override;
  Status barrier(std::string_view key, int64_t num_arrivals, Deadline deadline) override;
  Result<std::unique_ptr<StoreWill>> leave_will(std::string_view key, std::string_view value,
                                                Deadline deadline) override;
  Result<std::shared_ptr<Store>> clone(Deadline deadline) override;

 private:
  std::string join(std::string_view key) const;
  std::vector<std::string> join(std::span<const std::string> keys) const;

  std::string prefix_;
  std::shared_ptr<Store> store_;
};

}  // namespace cadre
