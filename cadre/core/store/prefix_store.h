// A view of another Store in which every key gets a prefix: "round 3" + "/" + key.
//
// Threads, blocking and errors: those of the store beneath. Lifetime: shares the store beneath.
// num_keys() counts the keys of the whole store beneath, as c10d's does; list_keys() gives the
// view's own, without the prefix. Source: c10d::PrefixStore, whose join with "/" it keeps, so that
// Python and C++ ranks agree.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "cadre/core/store/store.h"

namespace cadre {

class CADRE_EXPORT PrefixStore final : public Store {
 public:
  // Throws kInvalidArgument without a store. A view that was moved from refuses every verb.
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
