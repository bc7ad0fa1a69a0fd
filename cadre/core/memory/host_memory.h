// The memory that the ranks of a host share: one segment in which each rank has a slice, from which
// it cuts the pieces that its groups use.
//
// Threads: any; a small mutex guards the table of own pieces and is not held in system calls.
// Blocking: never; allocate(), commit() and the end of a piece for the time the system takes for
// their pages. Lifetime: pieces keep the memory; views keep their own mapping. In a forked child no
// Piece may be destroyed: it is the parent's.
// Errors: kUnavailable with the sizes when memory or addresses are short; kCorruption for a place
// of a peer that lies outside its slice; find() in a piece that was revoked: kAborted. Destructors
// throw nothing: pages that cannot be given back for lack of memory stay unused.
// Format: docs/formats/shared-memory.md.
//
// The segment is sparse: a page takes memory once its rank has committed it. A rank allocates
// without communication. Each piece has a header in the segment with a bit for each peer that uses
// it: the owner sets the bits, each peer clears its own. Pages of a destroyed piece are reused only
// when no live peer holds it, so memory does not change while a slow peer accesses it. A peer that
// wants a pointer through which the program may write at any time announces that in the header
// first. Such a piece is reused only when each peer has released it: a peer that was reported as
// lost may be alive and write.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/memory/free_ranges.h"
#include "cadre/core/memory/place.h"
#include "cadre/core/os/shared_memory.h"
#include "cadre/core/os/system.h"

namespace cadre {

class HostMemory;

struct HostMemoryLayout {
  int num_slots = 1;       // ranks of the host, at most HostMemory::kMaxSlots
  size_t front_bytes = 0;  // before the slices, for the owner of the segment
  size_t slice_bytes = 0;  // one rank's slice; rounded down to pages

  friend bool operator==(const HostMemoryLayout&, const HostMemoryLayout&) = default;
};

// Memory cut from this rank's slice, page-aligned and zero at first. The destructor gives it back.
class Piece {
 public:
  Piece() = default;
  Piece(Piece&& other) noexcept { swap(other); }
  Piece& operator=(Piece&& other) noexcept;
  ~Piece();

  explicit operator bool() const { return memory_ != nullptr; }
  Bytes bytes() const { return bytes_; }
  // Place of its first byte.
  const Place& place() const { return place_; }
  // Gives the range its memory, which bytes behind PieceOptions::committed_bytes need before their
  // first use.
  Status commit(const ByteRange& range);
  // Drops all holders but these: no other peer that was named when it was cut will use it.
  void keep_holders(std::span<const int> slots);
  // No peer knows the place of this piece, so none will release it.
  void drop_holders();

 private:
  friend class HostMemory;
  Piece(std::shared_ptr<HostMemory> memory, Bytes bytes, const Place& place);
  void swap(Piece& other) noexcept;

  std::shared_ptr<HostMemory> memory_;  // shared: a piece may outlive the group that cut it
  Bytes bytes_;
  Place place_;
};

struct PieceOptions {
  size_t num_bytes = 0;
  std::optional<size_t> committed_bytes = {};  // from the beginning; all without it
  std::span<const int> holders = {};           // slots of the peers that will use it; borrowed
};

class HostMemory : public std::enable_shared_from_this<HostMemory> {
  struct Key {  // only attach() can make one
    explicit Key() = default;
  };

 public:
  static constexpr int kMaxSlots = 896;
  static constexpr uint32_t kMaxPieces = 1 << 16;  // limit per rank, at a time

  static size_t segment_bytes(const HostMemoryLayout& layout);
  // The layout with the largest slices that a segment of this size has room for.
  static HostMemoryLayout layout_of(size_t segment_bytes, HostMemoryLayout layout);
  // As much as the machine has memory, within the limit for a segment of this number of slots and
  // this front.
  static size_t default_slice_bytes(const os::HostInfo& host, const HostMemoryLayout& layout);

  // This rank's view of a segment that was zero when the first rank attached.
  static Result<std::shared_ptr<HostMemory>> attach(std::shared_ptr<os::SharedMemory> segment,
                                                    const HostMemoryLayout& layout, int slot);
  HostMemory(Key, std::shared_ptr<os::SharedMemory> segment, const HostMemoryLayout& layout,
             int slot);

  const HostMemoryLayout& layout() const { return layout_; }
  int slot() const { return slot_; }
  // Committed by the process that made the segment.
  Bytes front() const { return segment_->bytes().first(layout_.front_bytes); }

  Result<Piece> allocate(const PieceOptions& options);

  // The place of this rank's buffer, for its peers; no place if the buffer is not entirely in one
  // piece.
  Result<Place> find(ConstBytes buffer) const;
  // The memory of a peer; nullptr if it is not all in the peer's slice.
  std::byte* resolve(const SlotPlace& at, size_t num_bytes) const;
  // One mapping of equally long, page-aligned places, one behind the other.
  Result<std::unique_ptr<os::SharedMemory>> map_side_by_side(std::span<const SlotPlace> places,
                                                             size_t num_bytes) const;

  // Makes these bytes of this rank private, although peers may still write to them. The piece is
  // marked as revoked before that. It is never reused: from now on find() of a buffer in it returns
  // the reason of its first revocation.
  Status revoke(const Place& place, size_t num_bytes, std::string_view reason);
  bool is_revoked(int slot, uint32_t piece) const;
  // The word that is_revoked() loads, for frequent checks: above 0 once the piece is revoked. Lives
  // as long as this memory.
  const std::atomic<uint64_t>& revocation_of(int slot, uint32_t piece) const;

  // The access of peers by pointers that the program keeps, apart from operations.
  // Announces that this rank may write to the piece of a peer from now on. False if the peer has
  // withdrawn the piece, or if has_lost_holds(): then it must not be written.
  bool announce_writer(int slot, uint32_t piece);
  bool is_withdrawn(int slot, uint32_t piece) const;
  // From now on no peer can announce itself for this piece of this rank. If one has before, these
  // bytes are revoked: they keep their content, and nothing that a peer writes later shows in them.
  Status withdraw(const Place& place, size_t num_bytes, std::string_view reason);
  // The same for all of this rank's pieces to which peers may write.
  Status withdraw_all(std::string_view reason);

  // Releases this rank's hold on the piece of a peer.
  void release_hold(int slot, uint32_t piece);
  // The rank is lost, so its holds no longer count. It may still be alive, with only its
  // connections cut. So a mark is set first, which its own has_lost_holds() reads.
  void forget_holder(int slot);
  // Whether a peer has reported this rank as lost, so that memory of peers may have been reused
  // while this rank read it. Call it after reading memory of peers, before a result counts as
  // valid.
  bool has_lost_holds() const;

 private:
  friend class Piece;
  struct Header;
  struct Record {  // an own piece, also when it is destroyed and peers hold it
    uint32_t id = 0;
    size_t size = 0;
    bool is_alive = true;
    bool is_revoked = false;
    std::string reason = {};
    ByteRange private_pages = {};  // part of the slice; guarded by revocation_mutex_
  };
  struct Cut {
    uint32_t id = 0;
    size_t offset = 0;
  };

  size_t slice_begin(int slot) const;
  Header& header(int slot, uint32_t piece) const;
  Result<Cut> cut(size_t size);
  Status prepare(const Cut& cut, size_t committed_bytes);
  void put_back(size_t offset) noexcept;
  void destroy(size_t offset) noexcept;
  bool is_held(uint32_t piece) const;         // under the lock
  bool may_be_written(uint32_t piece) const;  // by a peer that has not released it
  void reclaim();
  std::vector<ByteRange> take_released();
  // The record of a piece of this rank; null if it is destroyed. The address is valid until the
  // piece is put back.
  Record* record_of(const Place& place);  // under the lock
  Status make_private(Record& record, const ByteRange& range);

  const std::shared_ptr<os::SharedMemory> segment_;  // shared with the owner of the front
  const HostMemoryLayout layout_;
  const int slot_;

  // Locked before mutex_ where both are. Held while pages are made private, because a second
  // mapping of a page that is private would drop its content.
  std::mutex revocation_mutex_;
  mutable std::mutex mutex_;
  FreeRanges free_;
  std::map<size_t, Record> records_;  // by offset in the slice
  // Offsets of pieces that may be held. This and the next have room for all pieces, so that the end
  // of a piece needs no memory.
  std::vector<size_t> destroyed_;
  std::vector<uint32_t> free_ids_;
  uint32_t last_id_ = 0;
  std::array<uint64_t, kMaxSlots / 64> dead_{};  // bits by slot
};

}  // namespace cadre
