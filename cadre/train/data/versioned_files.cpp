#include "cadre/train/data/versioned_files.h"

#include <algorithm>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {

std::shared_ptr<const os::VersionedFile> VersionedFiles::get(size_t index,
                                                             const std::string& path) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(files_, index, &Entry::index);
  if (found != files_.end()) return found->file;
  auto file =
      std::make_shared<const os::VersionedFile>(os::VersionedFile::open(path).value_or_throw());
  if (files_.size() == kMaxOpen) files_.pop_front();
  files_.push_back({index, file});
  return file;
}

void VersionedFiles::read(size_t index, const std::string& path, const os::FileVersion& version,
                          uint64_t offset, Bytes out) {
  const auto open = get(index, path);
  const Status is_read = open->read_at(static_cast<size_t>(offset), out);
  const os::FileVersion now = open->current_version().value_or_throw();
  if (now != version) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("{} {} since it was opened", path, os::change_text(version, now)));
  }
  is_read.value_or_throw();
}

}  // namespace cadre
