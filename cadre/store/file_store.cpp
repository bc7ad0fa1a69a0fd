#include "cadre/store/file_store.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/store/checks.h"
#include "cadre/store/file/journal.h"

namespace cadre {

using store::Journal;
using wire::StoreRecord;
using wire::StoreRecordVerb;

namespace {

// The last to leave waits so long for the lock; then the file stays.
constexpr Duration kLeaveTimeout = std::chrono::milliseconds(500);

// Naps that grow from 1 to 20 ms, until a deadline.
class Nap {
 public:
  Nap(os::System& system, Deadline deadline)
      : system_(system), waiter_(system.make_waiter()), deadline_(deadline) {}

  // False once the deadline has passed; the caller looks one last time after the last nap.
  bool take() {
    if (deadline_.has_passed(system_.now())) return false;
    waiter_->park(deadline_.earlier(system_.deadline_in(pause_)));
    pause_ = std::min<Duration>(2 * pause_, std::chrono::milliseconds(20));
    return true;
  }

 private:
  os::System& system_;
  std::unique_ptr<os::Waiter> waiter_;
  const Deadline deadline_;
  Duration pause_ = std::chrono::milliseconds(1);
};

class Unlock {
 public:
  explicit Unlock(Journal& journal) : journal_(journal) {}
  ~Unlock() { journal_.unlock(); }
  Unlock(const Unlock&) = delete;
  Unlock& operator=(const Unlock&) = delete;

 private:
  Journal& journal_;
};

Error never_locked(const std::string& path) {
  return Error(ErrorCode::kTimeout,
               format("file store {}: other processes held its lock until the deadline", path));
}

Status commit_one(Journal& journal, StoreRecord record) {
  return journal.commit(std::span(&record, 1));
}

// The value of a counter; 0 when it is absent or no number.
int64_t count_of(KeyTable& table, const std::string& key) {
  const std::string* text = table.find(key);
  int64_t count = 0;
  if (text) std::from_chars(text->data(), text->data() + text->size(), count);
  return count;
}

}  // namespace

Result<std::unique_ptr<FileStore>> FileStore::open(os::System& system,
                                                   const FileStoreOptions& options,
                                                   Deadline deadline) {
  return open_as(system, options, /*joins=*/true, deadline);
}

Result<std::unique_ptr<FileStore>> FileStore::open_as(os::System& system,
                                                      const FileStoreOptions& options, bool joins,
                                                      Deadline deadline) {
  Nap nap(system, deadline);
  do {
    auto file = os::LockedFile::open(options.path);
    if (!file.ok()) return file.error().with_context("file store");
    auto journal =
        std::make_unique<Journal>(std::move(file).value(), options.path, options.max_bytes);
    const Result<bool> locked = journal->try_lock();
    if (!locked.ok()) return locked.error();
    if (!*locked) continue;
    const Unlock unlock(*journal);
    // The last of another job removed it between our opening and locking it: open the next one.
    if (!journal->is_named()) continue;
    CADRE_RETURN_IF_ERROR(journal->enter(options.num_ranks));
    if (joins) CADRE_RETURN_IF_ERROR(commit_one(*journal, {.verb = StoreRecordVerb::kJoin}));
    return std::make_unique<FileStore>(system, options, std::move(journal));
  } while (nap.take());
  return never_locked(options.path);
}

FileStore::FileStore(os::System& system, const FileStoreOptions& options,
                     std::unique_ptr<Journal> journal)
    : system_(system), options_(options), journal_(std::move(journal)) {}

FileStore::~FileStore() {
  Nap nap(system_, system_.deadline_in(kLeaveTimeout));
  do {
    const Result<bool> locked = journal_->try_lock();
    if (!locked.ok()) return;
    if (!*locked) continue;
    const Unlock unlock(*journal_);
    // A file that cannot be read or removed stays; nobody is left who could be told.
    (void)journal_->leave(options_.num_ranks);
    return;
  } while (nap.take());
}

Status FileStore::change(std::string_view verb, std::span<const std::string> keys,
                         Deadline deadline, const std::function<Status(Journal&)>& body) {
  Nap nap(system_, deadline);
  do {
    const std::lock_guard guard(mutex_);
    const Result<bool> locked = journal_->try_lock();
    if (!locked.ok()) return locked.error();
    if (!*locked) continue;
    const Unlock unlock(*journal_);
    CADRE_RETURN_IF_ERROR(journal_->refresh_for_change());
    const Status status = body(*journal_);
    // What the table did before the error is in no record.
    if (!status.ok()) journal_->forget();
    return status;
  } while (nap.take());
  const std::string key = keys.empty() ? std::string() : format(" \"{}\"", keys.front());
  return never_locked(options_.path).with_context(format("store {}{}", verb, key));
}

Status FileStore::look_until(std::string_view verb, std::span<const std::string> keys,
                             Deadline deadline, const std::function<bool(Journal&)>& is_done) {
  Nap nap(system_, deadline);
  std::string missing;
  do {
    const std::lock_guard guard(mutex_);
    CADRE_RETURN_IF_ERROR(journal_->refresh());
    if (is_done(*journal_)) return {};
    const std::string* first = journal_->table().first_missing(keys);
    missing = first ? *first : keys.front();
  } while (nap.take());
  return store_timeout(verb, std::span(&missing, 1));
}

Status FileStore::set(std::string_view key, std::string_view value, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(key, value));
  const std::string name(key);
  return change("set", std::span(&name, 1), deadline, [&](Journal& journal) -> Status {
    CADRE_RETURN_IF_ERROR(journal.table().set(name, std::string(value)));
    return commit_one(journal, {StoreRecordVerb::kSet, name, std::string(value)});
  });
}

Result<std::string> FileStore::get(std::string_view key, Deadline deadline) {
  const std::string name(key);
  auto values = multi_get(std::span(&name, 1), deadline);
  if (!values.ok()) return values.error();
  return std::move(values->front());
}

Result<int64_t> FileStore::add(std::string_view key, int64_t amount, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(key));
  const std::string name(key);
  int64_t result = 0;
  CADRE_RETURN_IF_ERROR(
      change("add", std::span(&name, 1), deadline, [&](Journal& journal) -> Status {
        const Result<int64_t> sum = journal.table().add(name, amount);
        if (!sum.ok()) return sum.error();
        result = *sum;
        return commit_one(journal, {StoreRecordVerb::kSet, name, std::to_string(*sum)});
      }));
  return result;
}

Status FileStore::wait(std::span<const std::string> keys, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_keys(keys));
  return look_until("wait", keys, deadline,
                    [&](Journal& journal) { return journal.table().has_all(keys); });
}

Result<bool> FileStore::check(std::span<const std::string> keys, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_keys(keys));
  const std::lock_guard guard(mutex_);
  CADRE_RETURN_IF_ERROR(journal_->refresh());
  return journal_->table().has_all(keys);
}

Result<std::string> FileStore::compare_set(std::string_view key, std::string_view expected,
                                           std::string_view desired, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(key, expected));
  CADRE_RETURN_IF_ERROR(check_store_entry(key, desired));
  const std::string name(key);
  std::string result;
  CADRE_RETURN_IF_ERROR(
      change("compare_set", std::span(&name, 1), deadline, [&](Journal& journal) -> Status {
        KeyTable& table = journal.table();
        const Result<std::string> value =
            table.compare_set(name, std::string(expected), std::string(desired));
        if (!value.ok()) return value.error();
        result = *value;
        const std::string* now = table.find(name);
        if (now == nullptr || *now != desired) return {};
        return commit_one(journal, {StoreRecordVerb::kSet, name, std::string(desired)});
      }));
  return result;
}

Result<bool> FileStore::erase(std::string_view key, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(key));
  const std::string name(key);
  bool was_there = false;
  CADRE_RETURN_IF_ERROR(
      change("erase", std::span(&name, 1), deadline, [&](Journal& journal) -> Status {
        was_there = journal.table().erase(name);
        return was_there ? commit_one(journal, {StoreRecordVerb::kErase, name, ""}) : Status();
      }));
  return was_there;
}

Result<int64_t> FileStore::num_keys(Deadline) {
  const std::lock_guard guard(mutex_);
  CADRE_RETURN_IF_ERROR(journal_->refresh());
  return journal_->table().num_keys();
}

Status FileStore::append(std::string_view key, std::string_view value, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(key, value));
  const std::string name(key);
  return change("append", std::span(&name, 1), deadline, [&](Journal& journal) -> Status {
    CADRE_RETURN_IF_ERROR(journal.table().append(name, value));
    return commit_one(journal, {StoreRecordVerb::kAppend, name, std::string(value)});
  });
}

Result<std::vector<std::string>> FileStore::multi_get(std::span<const std::string> keys,
                                                      Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_keys(keys));
  std::vector<std::string> values;
  Status status;
  CADRE_RETURN_IF_ERROR(look_until("get", keys, deadline, [&](Journal& journal) {
    KeyTable& table = journal.table();
    if (!table.has_all(keys)) return false;
    for (const std::string& key : keys) {
      Result<std::string> value = table.read(key);
      if (!value.ok()) {
        status = value.error();
        return true;
      }
      values.push_back(std::move(value).value());
    }
    return true;
  }));
  CADRE_RETURN_IF_ERROR(status);
  return values;
}

Status FileStore::multi_set(std::span<const std::string> keys, std::span<const std::string> values,
                            Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entries(keys, values));
  return change("multi_set", keys, deadline, [&](Journal& journal) -> Status {
    std::vector<StoreRecord> records;
    for (size_t i = 0; i < keys.size(); ++i) {
      CADRE_RETURN_IF_ERROR(journal.table().set(keys[i], values[i]));
      records.push_back({StoreRecordVerb::kSet, keys[i], values[i]});
    }
    return journal.commit(records);
  });
}

Result<std::vector<std::string>> FileStore::list_keys(Deadline) {
  const std::lock_guard guard(mutex_);
  CADRE_RETURN_IF_ERROR(journal_->refresh());
  return journal_->table().list_keys();
}

Status FileStore::queue_push(std::string_view queue, std::string_view value, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(queue, value));
  const std::string name(queue);
  return change("queue_push", std::span(&name, 1), deadline, [&](Journal& journal) -> Status {
    CADRE_RETURN_IF_ERROR(journal.table().push(name, std::string(value)));
    return commit_one(journal, {StoreRecordVerb::kPush, name, std::string(value)});
  });
}

Result<std::string> FileStore::queue_pop(std::string_view queue, Deadline deadline) {
  const std::string name(queue);
  while (true) {
    Result<std::optional<std::string>> item = try_queue_pop(queue, deadline);
    if (!item.ok()) return item.error();
    if (*item) return **std::move(item);
    CADRE_RETURN_IF_ERROR(
        look_until("queue_pop", std::span(&name, 1), deadline,
                   [&](Journal& journal) { return journal.table().queue_length(name) > 0; }));
  }
}

Result<std::optional<std::string>> FileStore::try_queue_pop(std::string_view queue,
                                                            Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(queue));
  const std::string name(queue);
  std::optional<std::string> item;
  CADRE_RETURN_IF_ERROR(
      change("try_queue_pop", std::span(&name, 1), deadline, [&](Journal& journal) -> Status {
        item = journal.table().pop(name);
        return item ? commit_one(journal, {StoreRecordVerb::kPop, name, ""}) : Status();
      }));
  return item;
}

Result<int64_t> FileStore::queue_length(std::string_view queue, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(queue));
  const std::lock_guard guard(mutex_);
  CADRE_RETURN_IF_ERROR(journal_->refresh());
  return journal_->table().queue_length(std::string(queue));
}

Status FileStore::barrier(std::string_view key, int64_t num_arrivals, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_barrier(key, num_arrivals));
  const std::string name(key);
  const Result<int64_t> count = add(key, 1, deadline);
  if (!count.ok()) return count.error();
  return look_until("barrier", std::span(&name, 1), deadline, [&](Journal& journal) {
    return count_of(journal.table(), name) >= num_arrivals;
  });
}

Result<std::shared_ptr<Store>> FileStore::clone(Deadline deadline) {
  auto other = open_as(system_, options_, /*joins=*/false, deadline);
  if (!other.ok()) return other.error();
  return std::shared_ptr<Store>(std::move(other).value());
}

}  // namespace cadre
