// A Store in one file on a file system that all ranks see, for jobs without a network, or before
// the network is used.
//
// Threads: any. Blocking: every call, until its Deadline; a call that waits looks again after naps
// of 1 to 20 ms. Lifetime: no call may be in progress when the store is destroyed. Errors: those of
// store.h, kUnavailable from the file system, kCorruption for a damaged file; never kPeerLost: a
// file does not show that a process has died. A process that is killed at any point leaves neither
// a lock nor half a value behind. The last of `num_ranks` to leave removes the file, and the first
// of a later job empties a file that a killed job left; with 0 ranks the file stays. The file keeps
// every change and so grows up to `max_bytes`. A process that may write the file is trusted; the
// file is created for its owner only. Source: c10d::FileStore; the format is another
// (docs/formats/store-file.md).
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cadre/core/os/file_system.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/store.h"

namespace cadre {

namespace os {
class ForkMark;
}  // namespace os

namespace store {
class Journal;
class KeyTable;
}  // namespace store

struct FileStoreOptions {
  std::string path;  // the path of the file, whose folder must exist
  int num_ranks = 0;
  size_t max_bytes = size_t{1} << 30;
  // Must outlive the store; if null, the store uses the files of the operating system.
  os::FileSystem* files = nullptr;
};

class CADRE_EXPORT FileStore final : public Store {
 public:
  // Opens or creates the file. `Time` is that of the verbs (store.h).
  template <StoreTime Time>
  static StoreResult<Time, std::unique_ptr<FileStore>> open(os::System& system,
                                                            const FileStoreOptions& options,
                                                            Time time) {
    return finish(open_until(system, options, deadline_of(system, time)), time);
  }
  // Programs call open() instead.
  FileStore(os::System& system, const FileStoreOptions& options,
            std::unique_ptr<store::Journal> journal);
  ~FileStore() override;

  Result<std::shared_ptr<Store>> clone(Deadline deadline) override;

 private:
  static Result<std::unique_ptr<FileStore>> open_until(os::System& system,
                                                       const FileStoreOptions& options,
                                                       Deadline deadline);
  static Result<std::unique_ptr<FileStore>> open_as(os::System& system,
                                                    const FileStoreOptions& options, bool joins,
                                                    Deadline deadline);
  Result<wire::StoreResponse> answer(wire::StoreRequest request, Deadline deadline) override;
  // Returns the answer from a table that is up to date; nullopt if the request must still wait.
  using Look = std::function<std::optional<wire::StoreResponse>(store::KeyTable&)>;
  // Answers with the file locked and the table up to date, and writes records of the changes.
  // `called` is the verb of the user's call.
  Result<wire::StoreResponse> change(const wire::StoreRequest& request, wire::StoreVerb called,
                                     Deadline deadline);
  // Sleeps until `look` answers; returns the kTimeout of the request at the deadline.
  Result<wire::StoreResponse> look_until(const wire::StoreRequest& request, Deadline deadline,
                                         const Look& look);
  Result<wire::StoreResponse> pop(const wire::StoreRequest& request, Deadline deadline);
  Result<wire::StoreResponse> arrive(const wire::StoreRequest& request, Deadline deadline);

  const std::unique_ptr<const os::ForkMark> mark_;
  const FileStoreOptions options_;
  std::mutex mutex_;
  std::unique_ptr<store::Journal> journal_;  // mutex_ guards it
};

}  // namespace cadre
