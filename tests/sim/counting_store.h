// A Store that counts what is asked of the one beneath, for figures in tests.
//
// Threads, blocking, errors: those of the store beneath. Lifetime: shares it and the counts.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "cadre/store/store.h"

namespace cadre::testing {

struct StoreCounts {
  std::atomic<int64_t> requests = 0;
  std::atomic<int64_t> bytes_in = 0;   // keys and values that are sent to the store
  std::atomic<int64_t> bytes_out = 0;  // values that it gives
};

class CountingStore final : public Store {
 public:
  CountingStore(std::shared_ptr<Store> inner, std::shared_ptr<StoreCounts> counts)
      : inner_(std::move(inner)), counts_(std::move(counts)) {}

  Status set(std::string_view key, std::string_view value, Deadline deadline) override {
    count(key.size() + value.size());
    return inner_->set(key, value, deadline);
  }
  Result<std::string> get(std::string_view key, Deadline deadline) override {
    count(key.size());
    return given(inner_->get(key, deadline));
  }
  Result<int64_t> add(std::string_view key, int64_t amount, Deadline deadline) override {
    count(key.size() + sizeof(amount));
    return inner_->add(key, amount, deadline);
  }
  Status wait(std::span<const std::string> keys, Deadline deadline) override {
    count(bytes_of(keys));
    return inner_->wait(keys, deadline);
  }
  Result<bool> check(std::span<const std::string> keys, Deadline deadline) override {
    count(bytes_of(keys));
    return inner_->check(keys, deadline);
  }
  Result<std::string> compare_set(std::string_view key, std::string_view expected,
                                  std::string_view desired, Deadline deadline) override {
    count(key.size() + expected.size() + desired.size());
    return given(inner_->compare_set(key, expected, desired, deadline));
  }
  Result<bool> erase(std::string_view key, Deadline deadline) override {
    count(key.size());
    return inner_->erase(key, deadline);
  }
  Result<int64_t> num_keys(Deadline deadline) override {
    count(0);
    return inner_->num_keys(deadline);
  }
  Status append(std::string_view key, std::string_view value, Deadline deadline) override {
    count(key.size() + value.size());
    return inner_->append(key, value, deadline);
  }
  Result<std::vector<std::string>> multi_get(std::span<const std::string> keys,
                                             Deadline deadline) override {
    count(bytes_of(keys));
    auto values = inner_->multi_get(keys, deadline);
    if (values.ok()) counts_->bytes_out += static_cast<int64_t>(bytes_of(*values));
    return values;
  }
  Status multi_set(std::span<const std::string> keys, std::span<const std::string> values,
                   Deadline deadline) override {
    count(bytes_of(keys) + bytes_of(values));
    return inner_->multi_set(keys, values, deadline);
  }
  Result<std::vector<std::string>> list_keys(Deadline deadline) override {
    count(0);
    return inner_->list_keys(deadline);
  }
  Status queue_push(std::string_view queue, std::string_view value, Deadline deadline) override {
    count(queue.size() + value.size());
    return inner_->queue_push(queue, value, deadline);
  }
  Result<std::string> queue_pop(std::string_view queue, Deadline deadline) override {
    count(queue.size());
    return given(inner_->queue_pop(queue, deadline));
  }
  Result<std::optional<std::string>> try_queue_pop(std::string_view queue,
                                                   Deadline deadline) override {
    count(queue.size());
    return inner_->try_queue_pop(queue, deadline);
  }
  Result<int64_t> queue_length(std::string_view queue, Deadline deadline) override {
    count(queue.size());
    return inner_->queue_length(queue, deadline);
  }
  Status barrier(std::string_view key, int64_t num_arrivals, Deadline deadline) override {
    count(key.size());
    return inner_->barrier(key, num_arrivals, deadline);
  }
  Result<std::shared_ptr<Store>> clone(Deadline deadline) override {
    return inner_->clone(deadline);
  }

 private:
  static size_t bytes_of(std::span<const std::string> texts) {
    size_t size = 0;
    for (const std::string& text : texts) size += text.size();
    return size;
  }
  void count(size_t num_bytes) {
    ++counts_->requests;
    counts_->bytes_in += static_cast<int64_t>(num_bytes);
  }
  Result<std::string> given(Result<std::string> value) {
    if (value.ok()) counts_->bytes_out += static_cast<int64_t>(value->size());
    return value;
  }

  std::shared_ptr<Store> inner_;
  std::shared_ptr<StoreCounts> counts_;
};

}  // namespace cadre::testing
