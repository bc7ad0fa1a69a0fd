#include "cadre/core/store/file/file_store.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/native_file_system.h"
#include "cadre/core/os/host/fork_mark.h"
#include "cadre/core/store/checks.h"
#include "cadre/core/store/file/journal.h"
#include "cadre/core/store/table_answers.h"

namespace cadre {

using store::Journal;
using wire::StoreRecord;
using wire::StoreRecordVerb;
using wire::StoreRequest;
using wire::StoreResponse;
using wire::StoreVerb;

namespace {

// The longest time that the destructor waits for the file's lock. If it does not get the lock, the
// file is not removed.
constexpr Duration kLeaveTimeout = std::chrono::milliseconds(500);

// Sleeps between two attempts, for 1 ms at first, then twice as long each time, up to 20 ms.
class Nap {
 public:
  Nap(os::System& system, Deadline deadline)
      : system_(system), waiter_(system.make_waiter()), deadline_(deadline) {}

  // Sleeps once. Returns false, without sleeping, if the deadline has passed. So the caller makes
  // one last attempt after the deadline.
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

// Returns records of the changes that the request has made in the table. `response` is its
// response.
std::vector<StoreRecord> records_of(const StoreRequest& request, const StoreResponse& response,
                                    const store::KeyTable& table) {
  if (response.error) return {};
  const auto& [verb, amount, keys, values] = request;
  switch (verb) {
    case StoreVerb::kSet:
      return {{StoreRecordVerb::kSet, keys[0], values[0]}};
    case StoreVerb::kAdd:
      return {{StoreRecordVerb::kSet, keys[0], std::to_string(response.number)}};
    case StoreVerb::kCompareSet: {
      // If the key is absent, the response is the expected value, which may equal the desired one.
      // So the value in the table is compared.
      const std::string* now = table.find(keys[0]);
      if (now == nullptr || *now != values[1]) return {};
      return {{StoreRecordVerb::kSet, keys[0], values[1]}};
    }
    case StoreVerb::kErase:
      if (response.number == 0) return {};
      return {{StoreRecordVerb::kErase, keys[0], ""}};
    case StoreVerb::kAppend:
      return {{StoreRecordVerb::kAppend, keys[0], values[0]}};
    case StoreVerb::kQueuePush:
      return {{StoreRecordVerb::kPush, keys[0], values[0]}};
    case StoreVerb::kTryQueuePop:
      if (response.number == 0) return {};
      return {{StoreRecordVerb::kPop, keys[0], ""}};
    default:
      break;
  }
  std::vector<StoreRecord> records;  // the records of a multi_set
  for (size_t i = 0; i < keys.size(); ++i) {
    records.push_back({StoreRecordVerb::kSet, keys[i], values[i]});
  }
  return records;
}

// Returns the value of a counter; 0 if it is absent or not a number.
int64_t count_of(store::KeyTable& table, const std::string& key) {
  const std::string* text = table.find(key);
  int64_t count = 0;
  if (text) std::from_chars(text->data(), text->data() + text->size(), count);
  return count;
}

std::optional<StoreResponse> answer_if(bool is_ready) {
  return is_ready ? std::optional(StoreResponse()) : std::nullopt;
}

}  // namespace

Result<std::unique_ptr<FileStore>> FileStore::open_until(os::System& system,
                                                         const FileStoreOptions& options,
                                                         Deadline deadline) {
  return open_as(system, options, /*joins=*/true, deadline);
}

Result<std::unique_ptr<FileStore>> FileStore::open_as(os::System& system,
                                                      const FileStoreOptions& options, bool joins,
                                                      Deadline deadline) {
  Nap nap(system, deadline);
  do {
    auto file = options.files != nullptr ? options.files->open_shared(options.path)
                                         : os::NativeFileSystem().open_shared(options.path);
    if (!file.ok()) return file.error().with_context("file store");
    auto journal =
        std::make_unique<Journal>(std::move(file).value(), options.path, options.max_bytes);
    const Result<bool> locked = journal->try_lock();
    if (!locked.ok()) return locked.error();
    if (!*locked) continue;
    const Unlock unlock(*journal);
    // The last rank of another job removed the file after this call had opened it and before it had
    // locked it. The loop tries again and opens a new file.
    if (!journal->is_named()) continue;
    CADRE_RETURN_IF_ERROR(journal->enter(options.num_ranks));
    if (joins)
      CADRE_RETURN_IF_ERROR(
          journal->commit(std::array{StoreRecord{.verb = StoreRecordVerb::kJoin}}));
    return std::make_unique<FileStore>(system, options, std::move(journal));
  } while (nap.take());
  return never_locked(options.path);
}

FileStore::FileStore(os::System& system, const FileStoreOptions& options,
                     std::unique_ptr<Journal> journal)
    : Store(system),
      mark_(std::make_unique<os::ForkMark>()),
      options_(options),
      journal_(std::move(journal)) {}

FileStore::~FileStore() {
  if (mark_->is_in_child()) return;  // the locks belong to the parent
  Nap nap(system(), system().deadline_in(kLeaveTimeout));
  do {
    const Result<bool> locked = journal_->try_lock();
    if (!locked.ok()) return;
    if (!*locked) continue;
    const Unlock unlock(*journal_);
    // If the file cannot be read or removed, it stays. A destructor cannot return the error.
    (void)journal_->leave(options_.num_ranks);
    return;
  } while (nap.take());
}

Result<StoreResponse> FileStore::answer(StoreRequest request, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_not_forked(*mark_, request.verb));
  switch (request.verb) {
    case StoreVerb::kGet:
    case StoreVerb::kWait:
    case StoreVerb::kMultiGet:
      return look_until(request, deadline, [&](store::KeyTable& table) {
        return table.has_all(request.keys) ? std::optional(store::answer_from(table, request))
                                           : std::nullopt;
      });
    case StoreVerb::kCheck:
    case StoreVerb::kNumKeys:
    case StoreVerb::kListKeys:
    case StoreVerb::kQueueLength:
      return look_until(request, deadline, [&](store::KeyTable& table) {
        return std::optional(store::answer_from(table, request));
      });
    case StoreVerb::kQueuePop:
      return pop(request, deadline);
    case StoreVerb::kBarrier:
      return arrive(request, deadline);
    default:
      return change(request, request.verb, deadline);
  }
}

Result<StoreResponse> FileStore::change(const StoreRequest& request, StoreVerb called,
                                        Deadline deadline) {
  Nap nap(system(), deadline);
  do {
    const std::lock_guard guard(mutex_);
    const Result<bool> locked = journal_->try_lock();
    if (!locked.ok()) return locked.error();
    if (!*locked) continue;
    const Unlock unlock(*journal_);
    CADRE_RETURN_IF_ERROR(journal_->refresh_for_change());
    StoreResponse response = store::answer_from(journal_->table(), request);
    const std::vector<StoreRecord> records = records_of(request, response, journal_->table());
    const Status status = response.error    ? Status(*response.error)
                          : records.empty() ? Status()
                                            : journal_->commit(records);
    // The table has changes that were not written to the file, so it is read again from the file.
    if (!status.ok()) journal_->forget();
    if (!status.ok()) return status.error();
    return response;
  } while (nap.take());
  return never_locked(options_.path).with_context(format("store {}", wire::to_string(called)));
}

Result<StoreResponse> FileStore::look_until(const StoreRequest& request, Deadline deadline,
                                            const Look& look) {
  Nap nap(system(), deadline);
  do {
    const std::lock_guard guard(mutex_);
    CADRE_RETURN_IF_ERROR(journal_->refresh());
    if (auto response = look(journal_->table())) return *std::move(response);
  } while (nap.take());
  const std::lock_guard guard(mutex_);
  return store::timeout_from(journal_->table(), request);
}

Result<StoreResponse> FileStore::pop(const StoreRequest& request, Deadline deadline) {
  StoreRequest attempt = request;
  attempt.verb = StoreVerb::kTryQueuePop;
  while (true) {
    Result<StoreResponse> item = change(attempt, request.verb, deadline);
    if (!item.ok() || item->number > 0) return item;
    CADRE_RETURN_IF_ERROR(look_until(request, deadline, [&](store::KeyTable& table) {
      return answer_if(table.queue_length(request.keys[0]) > 0);
    }));
  }
}

Result<StoreResponse> FileStore::arrive(const StoreRequest& request, Deadline deadline) {
  StoreRequest arrival = request;
  arrival.verb = StoreVerb::kAdd;
  arrival.amount = 1;
  CADRE_RETURN_IF_ERROR(change(arrival, request.verb, deadline));
  return look_until(request, deadline, [&](store::KeyTable& table) {
    return answer_if(count_of(table, request.keys[0]) >= request.amount);
  });
}

Result<std::shared_ptr<Store>> FileStore::clone(Deadline deadline) {
  auto other = open_as(system(), options_, /*joins=*/false, deadline);
  if (!other.ok()) return other.error();
  return std::shared_ptr<Store>(std::move(other).value());
}

}  // namespace cadre
