#include "cadre/core/store/timed/timed_store.h"

#include <utility>

#include "cadre/core/store/prefix_store.h"

namespace cadre {

TimedStore::TimedStore(os::System& system, std::shared_ptr<Store> store, Duration timeout)
    : system_(&system), store_(std::move(store)), timeout_(timeout) {
  if (store_ != nullptr) return;
  throw Error(ErrorCode::kInvalidArgument,
              "TimedStore: the store is null: a group of one rank that was made without a launcher "
              "has none, so look at membership().store first, or open a store of your own");
}

TimedStore TimedStore::connect(os::System& system, const TcpStoreOptions& options,
                               Duration timeout) {
  auto store = TcpStore::connect(system, options, system.deadline_in(timeout)).value_or_throw();
  return {system, std::move(store), timeout};
}

TimedStore TimedStore::open(os::System& system, const FileStoreOptions& options, Duration timeout) {
  auto store = FileStore::open(system, options, system.deadline_in(timeout)).value_or_throw();
  return {system, std::move(store), timeout};
}

TimedStore TimedStore::with_prefix(std::string prefix) const {
  return {*system_, std::make_shared<PrefixStore>(std::move(prefix), store_), timeout_};
}

void TimedStore::set(std::string_view key, std::string_view value, Timeout timeout) const {
  store_->set(key, value, deadline(timeout)).value_or_throw();
}

std::string TimedStore::get(std::string_view key, Timeout timeout) const {
  return store_->get(key, deadline(timeout)).value_or_throw();
}

int64_t TimedStore::add(std::string_view key, int64_t amount, Timeout timeout) const {
  return store_->add(key, amount, deadline(timeout)).value_or_throw();
}

void TimedStore::wait(std::span<const std::string> keys, Timeout timeout) const {
  store_->wait(keys, deadline(timeout)).value_or_throw();
}

bool TimedStore::check(std::span<const std::string> keys, Timeout timeout) const {
  return store_->check(keys, deadline(timeout)).value_or_throw();
}

std::string TimedStore::compare_set(std::string_view key, std::string_view expected,
                                    std::string_view desired, Timeout timeout) const {
  return store_->compare_set(key, expected, desired, deadline(timeout)).value_or_throw();
}

bool TimedStore::erase(std::string_view key, Timeout timeout) const {
  return store_->erase(key, deadline(timeout)).value_or_throw();
}

int64_t TimedStore::num_keys(Timeout timeout) const {
  return store_->num_keys(deadline(timeout)).value_or_throw();
}

void TimedStore::append(std::string_view key, std::string_view value, Timeout timeout) const {
  store_->append(key, value, deadline(timeout)).value_or_throw();
}

std::vector<std::string> TimedStore::multi_get(std::span<const std::string> keys,
                                               Timeout timeout) const {
  return store_->multi_get(keys, deadline(timeout)).value_or_throw();
}

void TimedStore::multi_set(std::span<const std::string> keys, std::span<const std::string> values,
                           Timeout timeout) const {
  store_->multi_set(keys, values, deadline(timeout)).value_or_throw();
}

std::vector<std::string> TimedStore::list_keys(Timeout timeout) const {
  return store_->list_keys(deadline(timeout)).value_or_throw();
}

void TimedStore::queue_push(std::string_view queue, std::string_view value, Timeout timeout) const {
  store_->queue_push(queue, value, deadline(timeout)).value_or_throw();
}

std::string TimedStore::queue_pop(std::string_view queue, Timeout timeout) const {
  return store_->queue_pop(queue, deadline(timeout)).value_or_throw();
}

std::optional<std::string> TimedStore::try_queue_pop(std::string_view queue,
                                                     Timeout timeout) const {
  return store_->try_queue_pop(queue, deadline(timeout)).value_or_throw();
}

int64_t TimedStore::queue_length(std::string_view queue, Timeout timeout) const {
  return store_->queue_length(queue, deadline(timeout)).value_or_throw();
}

void TimedStore::barrier(std::string_view key, int64_t num_arrivals, Timeout timeout) const {
  store_->barrier(key, num_arrivals, deadline(timeout)).value_or_throw();
}

}  // namespace cadre
