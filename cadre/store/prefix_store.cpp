#include "cadre/store/prefix_store.h"

namespace cadre {

std::string PrefixStore::join(std::string_view key) const {
  std::string joined;
  joined.reserve(prefix_.size() + 1 + key.size());
  joined.append(prefix_).append("/").append(key);
  return joined;
}

std::vector<std::string> PrefixStore::join(std::span<const std::string> keys) const {
  std::vector<std::string> joined;
  joined.reserve(keys.size());
  for (const std::string& key : keys) joined.push_back(join(key));
  return joined;
}

Status PrefixStore::set(std::string_view key, std::string_view value, Deadline deadline) {
  return store_->set(join(key), value, deadline);
}

Result<std::string> PrefixStore::get(std::string_view key, Deadline deadline) {
  return store_->get(join(key), deadline);
}

Result<int64_t> PrefixStore::add(std::string_view key, int64_t amount, Deadline deadline) {
  return store_->add(join(key), amount, deadline);
}

Status PrefixStore::wait(std::span<const std::string> keys, Deadline deadline) {
  return store_->wait(join(keys), deadline);
}

Result<bool> PrefixStore::check(std::span<const std::string> keys, Deadline deadline) {
  return store_->check(join(keys), deadline);
}

Result<std::string> PrefixStore::compare_set(std::string_view key, std::string_view expected,
                                             std::string_view desired, Deadline deadline) {
  return store_->compare_set(join(key), expected, desired, deadline);
}

Result<bool> PrefixStore::erase(std::string_view key, Deadline deadline) {
  return store_->erase(join(key), deadline);
}

Result<int64_t> PrefixStore::num_keys(Deadline deadline) {
  return store_->num_keys(deadline);
}

Status PrefixStore::append(std::string_view key, std::string_view value, Deadline deadline) {
  return store_->append(join(key), value, deadline);
}

Result<std::vector<std::string>> PrefixStore::multi_get(std::span<const std::string> keys,
                                                        Deadline deadline) {
  return store_->multi_get(join(keys), deadline);
}

Status PrefixStore::multi_set(std::span<const std::string> keys,
                              std::span<const std::string> values, Deadline deadline) {
  return store_->multi_set(join(keys), values, deadline);
}

Result<std::vector<std::string>> PrefixStore::list_keys(Deadline deadline) {
  Result<std::vector<std::string>> all = store_->list_keys(deadline);
  if (!all.ok()) return all.error();
  const std::string begin = join("");
  std::vector<std::string> own;
  for (const std::string& key : *all) {
    if (key.starts_with(begin)) own.push_back(key.substr(begin.size()));
  }
  return own;
}

Status PrefixStore::queue_push(std::string_view queue, std::string_view value, Deadline deadline) {
  return store_->queue_push(join(queue), value, deadline);
}

Result<std::string> PrefixStore::queue_pop(std::string_view queue, Deadline deadline) {
  return store_->queue_pop(join(queue), deadline);
}

Result<std::optional<std::string>> PrefixStore::try_queue_pop(std::string_view queue,
                                                              Deadline deadline) {
  return store_->try_queue_pop(join(queue), deadline);
}

Result<int64_t> PrefixStore::queue_length(std::string_view queue, Deadline deadline) {
  return store_->queue_length(join(queue), deadline);
}

Status PrefixStore::barrier(std::string_view key, int64_t num_arrivals, Deadline deadline) {
  return store_->barrier(join(key), num_arrivals, deadline);
}

Result<std::unique_ptr<StoreWill>> PrefixStore::leave_will(std::string_view key,
                                                           std::string_view value,
                                                           Deadline deadline) {
  return store_->leave_will(join(key), value, deadline);
}

Result<std::shared_ptr<Store>> PrefixStore::clone(Deadline deadline) {
  Result<std::shared_ptr<Store>> beneath = store_->clone(deadline);
  if (!beneath.ok()) return beneath.error();
  return std::shared_ptr<Store>(std::make_shared<PrefixStore>(prefix_, std::move(beneath).value()));
}

}  // namespace cadre
