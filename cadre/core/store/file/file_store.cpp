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

// The last handle waits this long for the lock when it leaves. If it does not get the lock, the
// file stays.
constexpr Duration kLeaveTimeout = std::chrono::milliseconds(500);

// Sleeps, for 1 ms at first and then longer, up to 20 ms, until a deadline.
class Nap {
 public:
  Nap(os::System& system, Deadline deadline)
      : system_(system), waiter_(system.make_waiter()), deadline_(deadline) {}

  // Returns false once the deadline has passed; the caller looks one last time after the last nap.
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

// Returns the changes that the request, with this response, has made in the table.
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
      // If the key is absent, the answer is the expected value, which may equal the desired one.
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
    // The last handle of another job removed the file after this call opened it and before it
    // locked it. The loop opens the next file.
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
  if (mark_->is_in_child()) return;  // the locks are those of the parent
  Nap nap(system(), system().deadline_in(kLeaveTimeout));
  do {
    const Result<bool> locked = journal_->try_lock();
    if (!locked.ok()) return;
    if (!*locked) continue;
    const Unlock unlock(*journal_);
    // The file stays if it cannot be read or removed. No caller is left who could get the error.
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
    // Changes of the table before the error are in no record.
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
