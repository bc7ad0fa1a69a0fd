// A Store in one file on a file system that all ranks see, for jobs without a network, or before
// the network is used.
//
// Threads: any. Blocking: every call, until its Deadline; a call that waits polls the file every 1
// to 20 ms. Lifetime: no call may be in progress when the store is destroyed. Errors: those of
// store.h, kUnavailable from the file system, kCorruption for a damaged file; never kPeerLost,
// because a file does not show that a process has died. A process may be killed at any point: it
// leaves no lock and no partial value behind. The last of `num_ranks` ranks to leave removes the
// file. If a job was killed, the first rank of the next job empties its file. If `num_ranks` is 0,
// the file is never removed. The file keeps every change, so it grows, up to `max_bytes`. Every
// process that may write the file is trusted; the file is created for its owner only. Source:
// c10d::FileStore; the format differs (docs/formats/store-file.md).
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
  // The file system, which must outlive the store. If null, the store uses that of the operating
  // system.
  os::FileSystem* files = nullptr;
};

class CADRE_EXPORT FileStore final : public Store {
 public:
  // Opens or creates the file. `Time` is a Duration or a Deadline, as for the verbs (store.h).
  template <StoreTime Time>
  static StoreResult<Time, std::unique_ptr<FileStore>> open(os::System& system,
                                                            const FileStoreOptions& options,
                                                            Time time) {
    return finish(open_until(system, options, deadline_of(system, time)), time);
  }
  // Called by open() only.
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
  // Answers a request from a table that is up to date; returns nullopt if the request must still
  // wait.
  using Look = std::function<std::optional<wire::StoreResponse>(store::KeyTable&)>;
  // Locks the file, reads it, executes the request on the table, and appends records of the
  // changes. `called` is the verb of the user's call, which errors name.
  Result<wire::StoreResponse> change(const wire::StoreRequest& request, wire::StoreVerb called,
                                     Deadline deadline);
  // Calls `look` repeatedly, with pauses, until it returns a response. Returns the kTimeout error
  // of the request at the deadline.
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
