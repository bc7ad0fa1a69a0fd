// The file behind a FileStore and the table that its records make: replayed as it grows, appended
// to under the file's lock.
//
// Threads: one at a time; the owner locks. Blocking: for the time of the disk; never for a lock.
// Lifetime: the table follows the file as long as the object lives.
// Errors: kUnavailable from the disk, kCorruption for a file that is damaged before its end,
// kInvalidArgument for a full or foreign one.
// A record is appended with one write. What a killed writer left of it is passed over by readers
// and cut off by the next writer. Format: docs/formats/store-file.md.
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
  // With the lock held: whether the path still names the file that was opened.
  bool is_named() const { return file_->is_named(); }

  // With the lock held, first thing: marks this handle as present. A file that a finished or killed
  // job of `num_ranks` left behind is emptied: so many had joined, and nobody is present.
  Status enter(int num_ranks);
  // With the lock held, last thing: this handle is present no longer. The last one of a job removes
  // the file.
  Status leave(int num_ranks);

  // Reads what others wrote. Without the lock a record that is being written is not seen yet.
  Status refresh();
  // With the lock held, before a change: reads all, cuts a torn end off.
  Status refresh_for_change();
  // With the lock held: records what was done to table(). After an error the table is read anew.
  Status commit(std::span<const wire::StoreRecord> records);
  // Forgets the table, which then follows the file from its beginning: after a change of the table
  // that was not committed.
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
  size_t position_ = 0;  // offset of the first byte that is not in the table
  int num_joined_ = 0;
  KeyTable table_;
};

}  // namespace cadre::store
