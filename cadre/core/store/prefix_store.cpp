#include "cadre/core/store/prefix_store.h"

#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre {

namespace {

os::System& system_of(const std::string& prefix, const Store* store) {
  if (store != nullptr) return store->system();
  throw Error(
      ErrorCode::kInvalidArgument,
      format("PrefixStore \"{}\": the underlying store is null; a group of one rank that was "
             "made without a launcher has no store, so check membership().store first, or "
             "pass a store of your own",
             prefix));
}

}  // namespace

PrefixStore::PrefixStore(std::string prefix, std::shared_ptr<Store> store)
    : Store(system_of(prefix, store.get())), prefix_(std::move(prefix)), store_(std::move(store)) {}

Status PrefixStore::check_beneath() const {
  if (store_ != nullptr) return {};
  return Error(ErrorCode::kInvalidArgument,
               "this PrefixStore was moved from and has no store; use the one that it was moved "
               "to");
}

std::string PrefixStore::join(std::string_view key) const {
  std::string joined;
  joined.reserve(prefix_.size() + 1 + key.size());
  joined.append(prefix_).append("/").append(key);
  return joined;
}

Result<wire::StoreResponse> PrefixStore::answer(wire::StoreRequest request, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_beneath());
  for (std::string& key : request.keys) key = join(key);
  const bool lists = request.verb == wire::StoreVerb::kListKeys;
  Result<wire::StoreResponse> response = store_->call(std::move(request), deadline);
  if (!lists || !response.ok()) return response;
  const std::string begin = join("");
  wire::StoreResponse own;
  for (const std::string& key : response->values) {
    if (key.starts_with(begin)) own.values.push_back(key.substr(begin.size()));
  }
  return own;
}

Result<std::unique_ptr<StoreWill>> PrefixStore::leave_will(std::string_view key,
                                                           std::string_view value,
                                                           Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_beneath());
  return store_->leave_will(join(key), value, deadline);
}

Result<std::shared_ptr<Store>> PrefixStore::clone(Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_beneath());
  Result<std::shared_ptr<Store>> beneath = store_->clone(deadline);
  if (!beneath.ok()) return beneath.error();
  return std::shared_ptr<Store>(std::make_shared<PrefixStore>(prefix_, std::move(beneath).value()));
}

}  // namespace cadre
