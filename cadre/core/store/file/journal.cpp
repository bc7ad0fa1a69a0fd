#include "cadre/core/store/file/journal.h"

#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::store {

using wire::StoreRecord;
using wire::StoreRecordVerb;

namespace {

// The limit of the table is that of the file times this factor, so that the file's limit is reached
// first: the table counts more bytes for an entry than its record has in the file.
constexpr size_t kTableBytesPerFileByte = 8;

Error not_ours() {
  return Error(
      ErrorCode::kInvalidArgument,
      "the file was not written by a file store of this version (PyTorch's has another format); "
      "give another path");
}

}  // namespace

Journal::Journal(std::unique_ptr<os::SharedFile> file, std::string path, size_t max_bytes)
    : file_(std::move(file)),
      path_(std::move(path)),
      max_bytes_(max_bytes),
      table_(max_bytes * kTableBytesPerFileByte) {}

Error Journal::explain(const Error& error) const {
  return error.with_context(format("file store {} at byte {}", path_, position_));
}

Status Journal::start_file() {
  CADRE_RETURN_IF_ERROR(file_->truncate(0));
  CADRE_RETURN_IF_ERROR(file_->append_at(0, wire::as_bytes(wire::kStoreFileMagic)));
  forget();
  return {};
}

Status Journal::enter(int num_ranks) {
  CADRE_RETURN_IF_ERROR(file_->enter());
  const Result<size_t> size = file_->size();
  if (!size.ok()) return size.error();
  if (*size < wire::kStoreFileMagic.size()) {
    // The file is new, or its creator was killed before it had written the beginning. Any other
    // short file belongs to another program, which is an error.
    std::string begin(*size, '\0');
    const auto num_read = file_->read_at(0, std::as_writable_bytes(std::span(begin)));
    if (!num_read.ok()) return num_read.error();
    if (!wire::kStoreFileMagic.starts_with(begin)) return explain(not_ours());
    CADRE_RETURN_IF_ERROR(start_file());
  }
  const Result<bool> is_alone = file_->is_alone();
  if (!is_alone.ok()) return is_alone.error();
  CADRE_RETURN_IF_ERROR(refresh_for_change());
  if (num_ranks > 0 && *is_alone && num_joined_ >= num_ranks) {
    CADRE_RETURN_IF_ERROR(start_file());
    CADRE_RETURN_IF_ERROR(refresh_for_change());
  }
  return {};
}

Status Journal::leave(int num_ranks) {
  const Status status = remove_if_last(num_ranks);
  // The mark of this handle is removed while the lock is held, so the handle that takes the lock
  // next does not find this one present.
  file_->leave();
  return status;
}

Status Journal::remove_if_last(int num_ranks) {
  if (num_ranks <= 0 || !file_->is_named()) return {};
  CADRE_RETURN_IF_ERROR(refresh_for_change());
  const Result<bool> is_alone = file_->is_alone();
  if (!is_alone.ok()) return is_alone.error();
  return *is_alone && num_joined_ >= num_ranks ? file_->remove() : Status();
}

Status Journal::refresh() {
  const Result<size_t> size = file_->size();
  if (!size.ok()) return size.error();
  if (*size <= position_) return {};
  std::vector<std::byte> content(*size - position_);
  const Result<size_t> num_read = file_->read_at(position_, content);
  if (!num_read.ok()) return num_read.error();
  size_t num_used = 0;
  const Status status = replay(ConstBytes(content).first(*num_read), num_used);
  position_ += num_used;
  return status.ok() ? status : Status(explain(status.error()));
}

Status Journal::replay(ConstBytes content, size_t& num_used) {
  if (position_ == 0) {
    const ConstBytes magic = wire::as_bytes(wire::kStoreFileMagic);
    if (content.size() < magic.size()) return {};
    if (wire::as_text(content.first(magic.size())) != wire::kStoreFileMagic) {
      return not_ours();
    }
    num_used = magic.size();
  }
  while (num_used < content.size()) {
    Result<wire::DecodedStoreRecord> decoded = wire::decode_store_record(content.subspan(num_used));
    if (!decoded.ok()) return decoded.error();
    if (!decoded->record) return {};
    CADRE_RETURN_IF_ERROR(apply(*decoded->record));
    num_used += decoded->num_bytes;
  }
  return {};
}

Status Journal::apply(const StoreRecord& record) {
  switch (record.verb) {
    case StoreRecordVerb::kJoin:
      ++num_joined_;
      return {};
    case StoreRecordVerb::kSet:
      return table_.set(record.key, record.value);
    case StoreRecordVerb::kAppend:
      return table_.append(record.key, record.value);
    case StoreRecordVerb::kErase:
      table_.erase(record.key);
      return {};
    case StoreRecordVerb::kPush:
      return table_.push(record.key, record.value);
    case StoreRecordVerb::kPop:
      table_.pop(record.key);
      return {};
  }
  return {};
}

Status Journal::refresh_for_change() {
  CADRE_RETURN_IF_ERROR(refresh());
  const Result<size_t> size = file_->size();
  if (!size.ok()) return size.error();
  return *size > position_ ? file_->truncate(position_) : Status();
}

Status Journal::commit(std::span<const StoreRecord> records) {
  std::vector<std::byte> bytes;
  for (const StoreRecord& record : records) {
    const std::vector<std::byte> encoded = wire::encode(record);
    bytes.insert(bytes.end(), encoded.begin(), encoded.end());
    if (record.verb == StoreRecordVerb::kJoin) ++num_joined_;
  }
  Status status;
  if (position_ > max_bytes_ || bytes.size() > max_bytes_ - position_) {
    status =
        Error(ErrorCode::kInvalidArgument,
              format("file store {} is full: {} more bytes are needed and {} of {} are in use, "
                     "because it keeps every change; send data through a group, or use a "
                     "store server",
                     path_, bytes.size(), position_, max_bytes_));
  } else {
    status = file_->append_at(position_, bytes);
  }
  if (!status.ok()) {
    forget();
    return status;
  }
  position_ += bytes.size();
  return {};
}

void Journal::forget() {
  position_ = 0;
  num_joined_ = 0;
  table_ = KeyTable(max_bytes_ * kTableBytesPerFileByte);
}

}  // namespace cadre::store
