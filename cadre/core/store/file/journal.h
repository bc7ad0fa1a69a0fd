// The file behind a FileStore, and the table that its records make. The table follows the file as
// it grows; records are appended under the file's lock.
//
// Threads: one at a time; the owner locks. Blocking: for the time of the disk; never for a lock.
// Lifetime: the table follows the file as long as the object lives.
// Errors: kUnavailable from the disk, kCorruption for a file that is damaged before its end,
// kInvalidArgument for a full file or one of another program. A record is appended with one write.
// Readers ignore an incomplete record of a killed writer, and the next writer cuts it off. Format:
// docs/formats/store-file.md.
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
  // Returns whether the path still names the file that was opened. REQUIRES: the lock is held.
  bool is_named() const { return file_->is_named(); }

  // Marks this handle as present; called first. A file that a finished or killed job of `num_ranks`
  // left behind is emptied: so many ranks had joined, and none is present. REQUIRES: the lock is
  // held.
  Status enter(int num_ranks);
  // Marks this handle as no longer present; called last. The last handle of a job removes the file.
  // REQUIRES: the lock is held.
  Status leave(int num_ranks);

  // Reads what others wrote. If the lock is not held, a record that is being written is not seen
  // yet.
  Status refresh();
  // Reads all records and cuts off a torn end; called before a change. REQUIRES: the lock is held.
  Status refresh_for_change();
  // Appends records of the changes of table(). After an error the table is read anew. REQUIRES: the
  // lock is held.
  Status commit(std::span<const wire::StoreRecord> records);
  // Forgets the table, which is then read from the beginning of the file again. Called after a
  // change of the table that was not committed.
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
  size_t position_ = 0;  // the offset of the first byte that is not in the table
  int num_joined_ = 0;
  KeyTable table_;
};

}  // namespace cadre::store
