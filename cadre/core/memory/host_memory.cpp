#include "cadre/core/memory/host_memory.h"

#include <algorithm>
#include <functional>
#include <new>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/shared_pages.h"

namespace cadre {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kHeaderBytes = 128;
constexpr size_t kTableBytes = HostMemory::kMaxPieces * kHeaderBytes;

size_t round_to_pages(size_t num_bytes) {
  return (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

size_t table_begin(const HostMemoryLayout& layout) {
  return round_to_pages(layout.front_bytes);
}

size_t slices_begin(const HostMemoryLayout& layout) {
  return table_begin(layout) + static_cast<size_t>(layout.num_slots) * kTableBytes;
}

// Copies the reason; if that fails for lack of memory, stores a fixed text instead.
void keep_reason(std::string& kept, std::string_view reason) {
  try {
    kept = reason;
  } catch (const std::bad_alloc&) {
    kept = "out of memory";
  }
}

}  // namespace

// The header of a piece, by which peers tell the owner that they use it. If all its bytes are zero,
// no peer holds the piece. Pieces are numbered from 1. Header 0 of a slot belongs to no piece: its
// is_revoked says that a peer has reported the rank in this slot as lost and no longer counts its
// holds.
struct HostMemory::Header {
  // The bits of `access`.
  static constexpr uint64_t kHasWriters = 1;   // a peer sets it in announce_writer()
  static constexpr uint64_t kIsWithdrawn = 2;  // the owner sets it in withdraw()

  std::atomic<uint64_t> is_revoked;
  std::atomic<uint64_t> access;
  // Bit s is set if the rank in slot s holds the piece.
  std::array<std::atomic<uint64_t>, kMaxSlots / 64> holders;
};

Piece::Piece(std::shared_ptr<HostMemory> memory, Bytes bytes, const Place& place)
    : memory_(std::move(memory)), bytes_(bytes), place_(place) {}

Piece& Piece::operator=(Piece&& other) noexcept {
  Piece taken(std::move(other));
  swap(taken);
  return *this;
}

Piece::~Piece() {
  if (memory_ != nullptr) memory_->destroy(place_.offset);
}

void Piece::swap(Piece& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
  std::swap(place_, other.place_);
}

Status Piece::commit(const ByteRange& range) {
  const size_t begin = memory_->slice_begin(memory_->slot()) + place_.offset + range.begin;
  return os::reserve_pages(*memory_->segment_, begin, range.size);
}

void Piece::keep_holders(std::span<const int> slots) {
  std::array<uint64_t, HostMemory::kMaxSlots / 64> kept{};
  for (const int slot : slots) {
    const auto bit = static_cast<size_t>(slot);
    kept[bit / 64] |= uint64_t{1} << bit % 64;
  }
  auto& holders = memory_->header(memory_->slot(), place_.piece).holders;
  for (size_t i = 0; i < kept.size(); ++i) {
    holders[i].fetch_and(kept[i], std::memory_order_release);
  }
}

void Piece::drop_holders() {
  for (auto& word : memory_->header(memory_->slot(), place_.piece).holders) {
    word.store(0, std::memory_order_relaxed);
  }
}

size_t HostMemory::segment_bytes(const HostMemoryLayout& layout) {
  const size_t slice = layout.slice_bytes / kPageBytes * kPageBytes;
  return slices_begin(layout) + static_cast<size_t>(layout.num_slots) * slice;
}

HostMemoryLayout HostMemory::layout_of(size_t segment_bytes, HostMemoryLayout layout) {
  const size_t begin = slices_begin(layout);
  const size_t room = segment_bytes > begin ? segment_bytes - begin : 0;
  layout.slice_bytes = room / static_cast<size_t>(layout.num_slots) / kPageBytes * kPageBytes;
  return layout;
}

size_t HostMemory::default_slice_bytes(const os::HostInfo& host, const HostMemoryLayout& layout) {
  const size_t most = layout_of(host.max_segment_bytes, layout).slice_bytes;
  return std::min<size_t>(host.memory_bytes / kPageBytes * kPageBytes, most);
}

Result<std::shared_ptr<HostMemory>> HostMemory::attach(std::shared_ptr<os::SharedMemory> segment,
                                                       const HostMemoryLayout& layout, int slot) {
  if (layout.num_slots < 1 || layout.num_slots > kMaxSlots || slot < 0 ||
      slot >= layout.num_slots || segment->bytes().size() < segment_bytes(layout)) {
    return Error(ErrorCode::kInternal,
                 format("host memory: a segment of {} bytes for slot {} of {} with {} bytes each; "
                        "{} bytes and at most {} slots are expected",
                        segment->bytes().size(), slot, layout.num_slots, layout.slice_bytes,
                        segment_bytes(layout), kMaxSlots));
  }
  return std::make_shared<HostMemory>(Key(), std::move(segment), layout, slot);
}

HostMemory::HostMemory(Key, std::shared_ptr<os::SharedMemory> segment,
                       const HostMemoryLayout& layout, int slot)
    : segment_(std::move(segment)),
      layout_(layout_of(segment_bytes(layout), layout)),
      slot_(slot),
      free_(layout_.slice_bytes) {}

size_t HostMemory::slice_begin(int slot) const {
  return slices_begin(layout_) + static_cast<size_t>(slot) * layout_.slice_bytes;
}

HostMemory::Header& HostMemory::header(int slot, uint32_t piece) const {
  static_assert(sizeof(Header) == kHeaderBytes);
  const size_t at = table_begin(layout_) + static_cast<size_t>(slot) * kTableBytes +
                    static_cast<size_t>(piece) * kHeaderBytes;
  return *reinterpret_cast<Header*>(segment_->bytes().data() + at);
}

Result<Piece> HostMemory::allocate(const PieceOptions& options) {
  reclaim();
  if (options.num_bytes > layout_.slice_bytes) {
    return Error(
        ErrorCode::kUnavailable,
        format("host memory: {} bytes are more than the whole slice of slot {}, which has {} "
               "bytes: the machine's memory, unless ulimit -f or -v of a process is lower",
               options.num_bytes, slot_, layout_.slice_bytes));
  }
  const size_t size = round_to_pages(std::max<size_t>(options.num_bytes, 1));
  const Result<Cut> made = cut(size);
  if (!made.ok()) return made.error();
  const size_t committed = std::min(round_to_pages(options.committed_bytes.value_or(size)), size);
  if (const Status status = prepare(*made, committed); !status.ok()) {
    const Status released =
        os::release_pages(*segment_, slice_begin(slot_) + made->offset, committed);
    // Pages that the system did not take back may have any content, so their addresses are not
    // reused.
    if (released.ok()) put_back(made->offset);
    return status.error().with_context(
        format("host memory: a piece of {} bytes for slot {}", options.num_bytes, slot_));
  }
  Header& own = header(slot_, made->id);
  own.access.store(0, std::memory_order_relaxed);
  std::array<uint64_t, kMaxSlots / 64> holders{};
  for (const int holder : options.holders) {
    const auto bit = static_cast<size_t>(holder);
    if (holder != slot_) holders[bit / 64] |= uint64_t{1} << bit % 64;
  }
  for (size_t i = 0; i < holders.size(); ++i) {
    own.holders[i].store(holders[i], std::memory_order_relaxed);
  }
  const Bytes bytes = segment_->bytes().subspan(slice_begin(slot_) + made->offset, size);
  return Piece(shared_from_this(), bytes.first(options.num_bytes),
               Place{.piece = made->id, .offset = made->offset});
}

// Chooses a number and an offset in the slice for a new piece.
Result<HostMemory::Cut> HostMemory::cut(size_t size) {
  const std::lock_guard lock(mutex_);
  if (free_ids_.empty() && last_id_ + 1 == kMaxPieces) {
    return Error(
        ErrorCode::kUnavailable,
        format("host memory: slot {} has {} pieces, which is the limit; free symmetric memory",
               slot_, kMaxPieces - 1));
  }
  destroyed_.reserve(records_.size() + 1);
  free_ids_.reserve(last_id_ + 1);
  const std::optional<size_t> offset = free_.take(size);
  if (!offset) {
    return Error(
        ErrorCode::kUnavailable,
        format("host memory: a piece of {} bytes does not fit into the slice of slot {}: of its {} "
               "bytes {} are free, at most {} of them contiguous; free symmetric memory",
               size, slot_, layout_.slice_bytes, free_.num_bytes(), free_.longest()));
  }
  uint32_t id = 0;
  if (free_ids_.empty()) {
    id = ++last_id_;
  } else {
    id = free_ids_.back();
    free_ids_.pop_back();
  }
  records_.emplace(*offset, Record{.id = id, .size = size});
  return Cut{id, *offset};
}

// Commits the memory of a piece and the page of its header. Several headers share a page, which is
// committed again for each of them: that has no effect, and no list of committed pages is needed.
Status HostMemory::prepare(const Cut& cut, size_t committed_bytes) {
  const std::byte* const begin = segment_->bytes().data();
  const auto at =
      static_cast<size_t>(reinterpret_cast<const std::byte*>(&header(slot_, cut.id)) - begin);
  CADRE_RETURN_IF_ERROR(os::reserve_pages(*segment_, at / kPageBytes * kPageBytes, kPageBytes));
  return os::reserve_pages(*segment_, slice_begin(slot_) + cut.offset, committed_bytes);
}

// If the table of free ranges cannot grow for lack of memory, the addresses of this piece are never
// reused.
void HostMemory::put_back(size_t offset) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = records_.find(offset);
  free_ids_.push_back(found->second.id);
  const size_t size = found->second.size;
  records_.erase(found);
  try {
    free_.give({offset, size});
  } catch (const std::bad_alloc&) {
  }
}

// If reclaim() fails for lack of memory, its next call frees the pages.
void HostMemory::destroy(size_t offset) noexcept {
  {
    const std::lock_guard lock(mutex_);
    records_.find(offset)->second.is_alive = false;
    destroyed_.push_back(offset);
  }
  try {
    reclaim();
  } catch (const std::bad_alloc&) {
  }
}

bool HostMemory::is_held(uint32_t piece) const {
  const Header& own = header(slot_, piece);
  for (size_t i = 0; i < dead_.size(); ++i) {
    if ((own.holders[i].load(std::memory_order_acquire) & ~dead_[i]) != 0) return true;
  }
  return false;
}

bool HostMemory::may_be_written(uint32_t piece) const {
  const Header& own = header(slot_, piece);
  if ((own.access.load(std::memory_order_seq_cst) & Header::kHasWriters) == 0) return false;
  return std::ranges::any_of(own.holders, [](const std::atomic<uint64_t>& word) {
    return word.load(std::memory_order_acquire) != 0;
  });
}

// Returns the ranges of destroyed pieces that no peer holds.
std::vector<ByteRange> HostMemory::take_released() {
  std::vector<ByteRange> released;
  const std::lock_guard lock(mutex_);
  released.reserve(destroyed_.size());
  std::erase_if(destroyed_, [&](size_t offset) {
    const Record& record = records_.find(offset)->second;
    if (is_held(record.id)) return false;
    released.push_back({offset, record.size});
    return true;
  });
  return released;
}

// Frees the pages of destroyed pieces without holders. The addresses and the number of a piece are
// not reused if it was revoked, because a peer without a hold may still start an operation on it,
// or if a peer may still write to it.
void HostMemory::reclaim() {
  for (const ByteRange& range : take_released()) {
    const Status released =
        os::release_pages(*segment_, slice_begin(slot_) + range.begin, range.size);
    bool is_reusable = released.ok();
    {
      const std::lock_guard lock(mutex_);
      const Record& record = records_.find(range.begin)->second;
      is_reusable = is_reusable && !record.is_revoked && !may_be_written(record.id);
    }
    if (is_reusable) put_back(range.begin);
  }
}

Result<Place> HostMemory::find(ConstBytes buffer) const {
  const std::less_equal<const std::byte*> is_before;
  const std::byte* const begin = segment_->bytes().data() + slice_begin(slot_);
  const std::byte* const end = begin + layout_.slice_bytes;
  if (buffer.data() == nullptr || !is_before(begin, buffer.data()) ||
      !is_before(buffer.data() + buffer.size(), end)) {
    return Place{};
  }
  const auto offset = static_cast<size_t>(buffer.data() - begin);
  const std::lock_guard lock(mutex_);
  const auto after = records_.upper_bound(offset);
  if (after == records_.begin()) return Place{};
  const auto& [piece_begin, record] = *std::prev(after);
  if (!record.is_alive || offset + buffer.size() > piece_begin + record.size) return Place{};
  if (record.is_revoked) {
    return Error(ErrorCode::kAborted,
                 format("{} bytes of this rank's symmetric memory were taken back from its peers "
                        "after a failure, allocate new memory; the failure: {}",
                        buffer.size(), record.reason));
  }
  return Place{.piece = record.id, .offset = offset};
}

std::byte* HostMemory::resolve(const SlotPlace& at, size_t num_bytes) const {
  const Place& place = at.place;
  if (at.slot < 0 || at.slot >= layout_.num_slots || place.piece == 0 ||
      place.piece >= kMaxPieces || place.offset > layout_.slice_bytes ||
      num_bytes > layout_.slice_bytes - place.offset) {
    return nullptr;
  }
  return segment_->bytes().data() + slice_begin(at.slot) + place.offset;
}

Result<std::unique_ptr<os::SharedMemory>> HostMemory::map_side_by_side(
    std::span<const SlotPlace> places, size_t num_bytes) const {
  std::vector<size_t> begins;
  for (const SlotPlace& at : places) {
    const bool is_possible = num_bytes <= layout_.slice_bytes;
    const std::byte* const bytes = is_possible ? resolve(at, round_to_pages(num_bytes)) : nullptr;
    if (bytes == nullptr || at.place.offset % kPageBytes != 0) {
      return Error(
          ErrorCode::kCorruption,
          format("host memory: {} bytes at offset {} of slot {} are not whole pages of its slice "
                 "of {} bytes",
                 num_bytes, at.place.offset, at.slot, layout_.slice_bytes));
    }
    begins.push_back(static_cast<size_t>(bytes - segment_->bytes().data()));
  }
  auto* const pages = dynamic_cast<os::SharedPages*>(segment_.get());
  if (pages == nullptr || begins.empty()) {
    return Error(ErrorCode::kUnavailable, "host memory: this segment cannot be mapped in parts");
  }
  return pages->map_ranges(begins, round_to_pages(std::max<size_t>(num_bytes, 1)));
}

// Stores the revocation mark, sequentially consistent, before it changes the pages (see
// Peers::mark_left()): a peer that does not see the mark at the end of its operation has written
// before the change. The essential steps allocate no memory, because this rank may be leaving the
// group for lack of it.
Status HostMemory::revoke(const Place& place, size_t num_bytes, std::string_view reason) {
  const std::lock_guard only_one(revocation_mutex_);
  Record* record = nullptr;
  {
    const std::lock_guard lock(mutex_);
    record = record_of(place);
    if (record == nullptr) return {};
    if (!record->is_revoked) keep_reason(record->reason, reason);
    record->is_revoked = true;
  }
  header(slot_, place.piece).is_revoked.store(1, std::memory_order_seq_cst);
  return make_private(*record, {place.offset, num_bytes});
}

HostMemory::Record* HostMemory::record_of(const Place& place) {
  const auto after = records_.upper_bound(place.offset);
  if (after == records_.begin()) return nullptr;
  Record& record = std::prev(after)->second;
  return record.id == place.piece && record.is_alive ? &record : nullptr;
}

// Makes the range private, and the pages between it and those that are private already, so that the
// private pages stay one contiguous range.
Status HostMemory::make_private(Record& record, const ByteRange& range) {
  const size_t begin = range.begin / kPageBytes * kPageBytes;
  const size_t end = round_to_pages(range.begin + range.size);
  const auto map = [&](size_t from, size_t to) {
    return from < to ? os::make_pages_private(*segment_, slice_begin(slot_) + from, to - from)
                     : Status();
  };
  ByteRange& known = record.private_pages;
  if (known.size == 0) {
    CADRE_RETURN_IF_ERROR(map(begin, end));
    known = {begin, end - begin};
    return {};
  }
  const size_t known_end = known.begin + known.size;
  CADRE_RETURN_IF_ERROR(map(begin, known.begin));
  CADRE_RETURN_IF_ERROR(map(known_end, end));
  known = {std::min(begin, known.begin), 0};
  known.size = std::max(end, known_end) - known.begin;
  return {};
}

// The peer and the owner each set a bit and then read the other one's bit, sequentially consistent:
// if a peer announces itself while the owner withdraws the piece, at least one of the two sees the
// other's bit. The same holds if others report the announcing peer as lost: either the owner sees
// the peer's bit and does not reuse the piece, or the peer sees the report.
bool HostMemory::announce_writer(int slot, uint32_t piece) {
  const uint64_t before =
      header(slot, piece).access.fetch_or(Header::kHasWriters, std::memory_order_seq_cst);
  return (before & Header::kIsWithdrawn) == 0 && !has_lost_holds();
}

bool HostMemory::is_withdrawn(int slot, uint32_t piece) const {
  return (header(slot, piece).access.load(std::memory_order_seq_cst) & Header::kIsWithdrawn) != 0;
}

Status HostMemory::withdraw(const Place& place, size_t num_bytes, std::string_view reason) {
  header(slot_, place.piece).access.fetch_or(Header::kIsWithdrawn, std::memory_order_seq_cst);
  return may_be_written(place.piece) ? revoke(place, num_bytes, reason) : Status();
}

Status HostMemory::withdraw_all(std::string_view reason) {
  Status status;
  for (size_t begin = 0;;) {
    Place place;
    size_t size = 0;
    {
      const std::lock_guard lock(mutex_);
      const auto next = std::find_if(records_.lower_bound(begin), records_.end(), [&](auto& entry) {
        return entry.second.is_alive && may_be_written(entry.second.id);
      });
      if (next == records_.end()) return status;
      place = {.piece = next->second.id, .offset = next->first};
      size = next->second.size;
    }
    const Status withdrawn = withdraw(place, size, reason);
    if (!withdrawn.ok()) status = withdrawn;
    begin = place.offset + size;
  }
}

const std::atomic<uint64_t>& HostMemory::revocation_of(int slot, uint32_t piece) const {
  return header(slot, piece).is_revoked;
}

bool HostMemory::is_revoked(int slot, uint32_t piece) const {
  return revocation_of(slot, piece).load(std::memory_order_seq_cst) != 0;
}

void HostMemory::release_hold(int slot, uint32_t piece) {
  if (piece >= kMaxPieces) return;  // an invalid number from a peer
  const auto bit = static_cast<size_t>(slot_);
  header(slot, piece)
      .holders[bit / 64]
      .fetch_and(~(uint64_t{1} << bit % 64), std::memory_order_release);
}

// Stores the mark of a lost rank before any page changes, as in revoke(). If no memory is left for
// the page of the mark, the holds of that rank still count.
void HostMemory::forget_holder(int slot) {
  const auto* const begin = segment_->bytes().data();
  Header& mark = header(slot, 0);
  const auto at = static_cast<size_t>(reinterpret_cast<const std::byte*>(&mark) - begin);
  if (!os::reserve_pages(*segment_, at, kPageBytes).ok()) return;
  mark.is_revoked.store(1, std::memory_order_seq_cst);
  {
    const std::lock_guard lock(mutex_);
    const auto bit = static_cast<size_t>(slot);
    dead_[bit / 64] |= uint64_t{1} << bit % 64;
  }
  reclaim();
}

// The page of header 0 is committed together with this rank's first piece, so this read is valid.
bool HostMemory::has_lost_holds() const {
  return is_revoked(slot_, 0);
}

}  // namespace cadre
