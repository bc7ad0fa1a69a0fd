// A view of another Store in which every key gets a prefix: "k" becomes "round3/k".
//
// Threads, blocking and errors: those of the underlying store. Lifetime: shares the underlying
// store. num_keys() counts the keys of the whole underlying store, as c10d's does; list_keys()
// returns the view's own keys, without the prefix. Source: c10d::PrefixStore, which also joins with
// "/", so that Python and C++ ranks use the same keys.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "cadre/core/store/store.h"

namespace cadre {

class CADRE_EXPORT PrefixStore final : public Store {
 public:
  // Throws kInvalidArgument if `store` is null. After a view was moved from, every verb fails.
  PrefixStore(std::string prefix, std::shared_ptr<Store> store);

  Result<std::unique_ptr<StoreWill>> leave_will(std::string_view key, std::string_view value,
                                                Deadline deadline) override;
  Result<std::shared_ptr<Store>> clone(Deadline deadline) override;

 private:
  Result<wire::StoreResponse> answer(wire::StoreRequest request, Deadline deadline) override;
  std::string join(std::string_view key) const;
  Status check_beneath() const;

  std::string prefix_;
  std::shared_ptr<Store> store_;
};

}  // namespace cadre
