#include "cadre/core/wire/stream_buffer.h"

namespace cadre::wire {

void StreamBuffer::append(ConstBytes bytes) {
  move_to_front();
  data_.insert(data_.end(), bytes.begin(), bytes.end());
}

Bytes StreamBuffer::extend(size_t num_bytes) {
  move_to_front();
  data_.resize(data_.size() + num_bytes);
  return Bytes(data_).last(num_bytes);
}

void StreamBuffer::drop_last(size_t num_bytes) {
  data_.resize(data_.size() - num_bytes);
  if (empty()) consume(0);
}

// Moves the unread bytes to the front only if more than half of the buffer was consumed, so the
// amortized cost of a byte is constant.
void StreamBuffer::move_to_front() {
  if (begin_ <= data_.size() / 2) return;
  data_.erase(data_.begin(), data_.begin() + static_cast<ptrdiff_t>(begin_));
  begin_ = 0;
}

void StreamBuffer::consume(size_t num_bytes) {
  begin_ += num_bytes;
  if (begin_ < data_.size()) return;
  begin_ = 0;
  data_.clear();
  // The memory of a large message is released, because a server has thousands of connections and
  // would otherwise keep that memory for each.
  constexpr size_t kKeptBytes = 4 << 10;
  if (data_.capacity() > kKeptBytes) data_ = {};
}

}  // namespace cadre::wire
