// The file of a FileStore, and the table of keys that its records produce. The table follows the
// file as it grows; records are appended under the file's lock.
//
// Threads: one at a time; the owner locks. Blocking: while the file system works; never for a lock.
// Lifetime: the table follows the file as long as the object lives.
// Errors: kUnavailable from the disk, kCorruption for a file that is damaged before its end,
// kInvalidArgument for a full file or one of another program. A record is appended with one write.
// If a writer was killed during the write, readers ignore the incomplete record, and the next
// writer truncates the file before it. Format: docs/formats/store-file.md.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "cadre/core/os/file_system.h"
#include "cadre/core/store/key_table.h"
#include "cadre/core/wire/store/store_record.h"

namespace cadre::store {

class Journal {
 public:
  Journal(std::unique_ptr<os::SharedFile> file, std::string path, size_t max_bytes);

  Result<bool> try_lock() { return file_->try_lock(); }
  void unlock() { file_->unlock(); }
  // Returns whether the path still leads to the file that was opened: another process may have
  // removed it. REQUIRES: the lock is held.
  bool is_named() const { return file_->is_named(); }

  // Marks this handle as present; called before all other methods that read or change the file.
  // Empties the file if a finished or killed job has left it behind: `num_ranks` ranks have joined,
  // and none of them is present. REQUIRES: the lock is held.
  Status enter(int num_ranks);
  // Marks this handle as no longer present; called last. If it was the last of the job's handles,
  // removes the file. REQUIRES: the lock is held.
  Status leave(int num_ranks);

  // Reads the records that other processes have appended. If the lock is not held, a record that is
  // only partly written is read by a later call.
  Status refresh();
  // Reads all records and truncates an incomplete one at the end; called before a change. REQUIRES:
  // the lock is held.
  Status refresh_for_change();
  // Appends records of changes that were made in table(). After an error the table is read again
  // from the file. REQUIRES: the lock is held.
  Status commit(std::span<const wire::StoreRecord> records);
  // Empties the table, which is then read again from the beginning of the file. Called if the table
  // has changes that were not committed.
  void forget();

  KeyTable& table() { return table_; }

 private:
  Status replay(ConstBytes content, size_t& num_used);
  Status apply(const wire::StoreRecord& record);
  Status start_file();
  Status remove_if_last(int num_ranks);
  Error explain(const Error& error) const;

  std::unique_ptr<os::SharedFile> file_;
  std::string path_;
  size_t max_bytes_;
  size_t position_ = 0;  // the offset in the file of the first byte that is not yet in the table
  int num_joined_ = 0;
  KeyTable table_;
};

}  // namespace cadre::store
