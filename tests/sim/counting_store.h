// A Store that counts the requests to an underlying store, for tests that compare these numbers.
//
// Threads, blocking and errors: those of the underlying store. Lifetime: shares that store and the
// counts.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "cadre/core/store/store.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre::testing {

struct StoreCounts {
  std::atomic<int64_t> requests = 0;
  std::atomic<int64_t> bytes_in = 0;   // the bytes of keys and values that are sent to the store
  std::atomic<int64_t> bytes_out = 0;  // the bytes of values that the store returns
};

class CountingStore final : public Store {
 public:
  CountingStore(std::shared_ptr<Store> inner, std::shared_ptr<StoreCounts> counts)
      : Store(inner->system()), inner_(std::move(inner)), counts_(std::move(counts)) {}

  Result<std::shared_ptr<Store>> clone(Deadline deadline) override {
    return inner_->clone(deadline);
  }

 private:
  Result<wire::StoreResponse> answer(wire::StoreRequest request, Deadline deadline) override {
    ++counts_->requests;
    const bool has_amount = request.verb == wire::StoreVerb::kAdd;
    counts_->bytes_in += bytes_of(request.keys) + bytes_of(request.values) +
                         (has_amount ? static_cast<int64_t>(sizeof(request.amount)) : 0);
    auto response = inner_->call(std::move(request), deadline);
    if (response.ok()) counts_->bytes_out += bytes_of(response->values);
    return response;
  }
  static int64_t bytes_of(std::span<const std::string> texts) {
    size_t size = 0;
    for (const std::string& text : texts) size += text.size();
    return static_cast<int64_t>(size);
  }

  std::shared_ptr<Store> inner_;
  std::shared_ptr<StoreCounts> counts_;
};

}  // namespace cadre::testing
