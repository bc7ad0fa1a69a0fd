#include "cadre/core/transport/shm/ring.h"

#include <algorithm>
#include <cstring>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

// The writer and the reader of a long copy each publish their count after each piece of this size,
// so that both can copy at the same time instead of alternately.
constexpr size_t kPublishBytes = 64 << 10;

Error impossible_count(const char* end, uint64_t theirs, uint64_t ours, size_t capacity) {
  return Error(
      ErrorCode::kCorruption,
      cadre::format("shared-memory ring of {} bytes: the {} counts {} bytes where this end "
                    "counts {}; the peer has overwritten its memory or runs another build",
                    capacity, end, theirs, ours));
}

Error closed() {
  return Error(ErrorCode::kPeerLost, "shared-memory ring: the peer has closed its end");
}

// Returns how many bytes to copy next: from `position` to the end of the ring at most, at most
// `limit`, and at most kPublishBytes.
size_t piece_at(uint64_t position, size_t capacity, size_t limit) {
  const size_t offset = position & (capacity - 1);
  return std::min({capacity - offset, limit, kPublishBytes});
}

}  // namespace

Result<size_t> RingWriter::try_write(ConstBytes source) {
  const size_t capacity = data_.size();
  size_t taken = 0;
  while (taken < source.size()) {
    if (control_.reader.is_closed.load(std::memory_order_acquire) != 0) return closed();
    const uint64_t read = control_.reader.count.load(std::memory_order_acquire);
    const uint64_t used = written_ - read;
    if (read > written_ || used > capacity)
      return impossible_count("reader", read, written_, capacity);
    if (used == capacity) break;
    const size_t piece =
        piece_at(written_, capacity, std::min<size_t>(source.size() - taken, capacity - used));
    std::memcpy(data_.data() + (written_ & (capacity - 1)), source.data() + taken, piece);
    written_ += piece;
    taken += piece;
    control_.writer.count.store(written_, std::memory_order_release);
  }
  return taken;
}

bool RingWriter::is_ready() const {
  return control_.reader.is_closed.load(std::memory_order_acquire) != 0 ||
         written_ - control_.reader.count.load(std::memory_order_acquire) != data_.size();
}

Result<size_t> RingReader::try_read(Bytes target) {
  const size_t capacity = data_.size();
  size_t received = 0;
  while (received < target.size()) {
    // is_closed is read before the count, so if it is set, the count includes all bytes that were
    // written before the close.
    const bool is_closed = control_.writer.is_closed.load(std::memory_order_acquire) != 0;
    const uint64_t written = control_.writer.count.load(std::memory_order_acquire);
    const uint64_t used = written - read_;
    if (written < read_ || used > capacity)
      return impossible_count("writer", written, read_, capacity);
    if (used == 0 && is_closed && received == 0) return closed();
    if (used == 0) break;
    const size_t piece =
        piece_at(read_, capacity, std::min<size_t>(target.size() - received, used));
    std::memcpy(target.data() + received, data_.data() + (read_ & (capacity - 1)), piece);
    read_ += piece;
    received += piece;
    control_.reader.count.store(read_, std::memory_order_release);
  }
  return received;
}

bool RingReader::is_ready() const {
  return control_.writer.is_closed.load(std::memory_order_acquire) != 0 ||
         control_.writer.count.load(std::memory_order_acquire) != read_;
}

}  // namespace cadre
