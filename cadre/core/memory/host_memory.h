// The memory that the ranks of a host share: one segment with a slice for each rank. A rank
// allocates the pieces that its groups use from its own slice.
//
// Threads: any; a mutex guards the table of own pieces and is not held in system calls. Blocking:
// never; but allocate(), commit() and the destructor of a piece take the time that the system needs
// for their pages. Lifetime: pieces keep the memory alive; views keep their own mapping. A forked
// child must not destroy a Piece: it belongs to the parent. Errors: kUnavailable with the sizes
// when memory or addresses are short; kCorruption for a place of a peer that lies outside the
// peer's slice; kAborted for find() in a piece that was revoked. Destructors do not throw: if
// memory is too short to free pages, the pages stay unused.
// Format: docs/formats/shared-memory.md.
//
// The segment is sparse: a page takes memory once its rank has committed it. A rank allocates
// without communication. Each piece has a header in the segment with a bit for each peer that uses
// it: the owner sets the bits, each peer clears its own. Pages of a destroyed piece are reused only
// when no live peer holds it, so memory does not change while a slow peer accesses it. Before a
// peer gives its program a pointer for writes at any time, it announces that in the header. Such a
// piece is reused only after all peers have released it, lost ones included: a peer that was
// reported as lost may still be alive and write.
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
  int num_slots = 1;  // the number of ranks of the host, at most HostMemory::kMaxSlots
  // The number of bytes before the slices, which the owner of the segment uses.
  size_t front_bytes = 0;
  size_t slice_bytes = 0;  // the size of one rank's slice; it is rounded down to pages

  friend bool operator==(const HostMemoryLayout&, const HostMemoryLayout&) = default;
};

// Memory allocated from this rank's slice, page-aligned and zero at first. The destructor gives it
// back.
class Piece {
 public:
  Piece() = default;
  Piece(Piece&& other) noexcept { swap(other); }
  Piece& operator=(Piece&& other) noexcept;
  ~Piece();

  explicit operator bool() const { return memory_ != nullptr; }
  Bytes bytes() const { return bytes_; }
  // Returns the place of the piece's first byte, which peers can resolve.
  const Place& place() const { return place_; }
  // Commits the memory of this range of the piece, which is needed before the first use of bytes
  // beyond PieceOptions::committed_bytes.
  Status commit(const ByteRange& range);
  // Keeps only these holders: the other holders named at allocation will not use the piece.
  void keep_holders(std::span<const int> slots);
  // Removes all holders of a piece whose place was not sent to any peer, because none would release
  // it.
  void drop_holders();

 private:
  friend class HostMemory;
  Piece(std::shared_ptr<HostMemory> memory, Bytes bytes, const Place& place);
  void swap(Piece& other) noexcept;

  // The memory is shared because a piece may outlive the group that allocated it.
  std::shared_ptr<HostMemory> memory_;
  Bytes bytes_;
  Place place_;
};

struct PieceOptions {
  size_t num_bytes = 0;
  // The size of the part that is committed from the beginning; nullopt means the whole piece.
  std::optional<size_t> committed_bytes = {};
  std::span<const int> holders = {};  // the slots of the peers that will use the piece; borrowed
};

class HostMemory : public std::enable_shared_from_this<HostMemory> {
  struct Key {  // only attach() can make a Key
    explicit Key() = default;
  };

 public:
  static constexpr int kMaxSlots = 896;
  // The number of pieces that a rank can have at one time.
  static constexpr uint32_t kMaxPieces = 1 << 16;

  static size_t segment_bytes(const HostMemoryLayout& layout);
  // Returns the layout with the largest slices that fit into a segment of this size.
  static HostMemoryLayout layout_of(size_t segment_bytes, HostMemoryLayout layout);
  // Returns the default size of a slice: the size of the machine's memory, or less if a segment
  // with this number of slots and this front would exceed the host's limit on segments.
  static size_t default_slice_bytes(const os::HostInfo& host, const HostMemoryLayout& layout);

  // Attaches this rank to a segment, which was filled with zeros when the first rank attached.
  static Result<std::shared_ptr<HostMemory>> attach(std::shared_ptr<os::SharedMemory> segment,
                                                    const HostMemoryLayout& layout, int slot);
  HostMemory(Key, std::shared_ptr<os::SharedMemory> segment, const HostMemoryLayout& layout,
             int slot);

  const HostMemoryLayout& layout() const { return layout_; }
  int slot() const { return slot_; }
  // Returns the bytes before the slices. The process that made the segment commits them.
  Bytes front() const { return segment_->bytes().first(layout_.front_bytes); }

  Result<Piece> allocate(const PieceOptions& options);

  // Returns the place of this rank's buffer, which peers can resolve; an empty Place if the buffer
  // does not lie within one piece.
  Result<Place> find(ConstBytes buffer) const;
  // Returns the address of a peer's memory in this process; nullptr if the memory does not lie
  // entirely in the peer's slice.
  std::byte* resolve(const SlotPlace& at, size_t num_bytes) const;
  // Maps places at consecutive addresses. Each is page-aligned and has `num_bytes` bytes.
  Result<std::unique_ptr<os::SharedMemory>> map_side_by_side(std::span<const SlotPlace> places,
                                                             size_t num_bytes) const;

  // Takes these bytes back from the peers: from then on they are private to this rank, and later
  // writes of peers do not change them. First marks the piece that has them as revoked. A revoked
  // piece is never reused, and find() of a buffer in it returns the reason of the first revocation.
  Status revoke(const Place& place, size_t num_bytes, std::string_view reason);
  bool is_revoked(int slot, uint32_t piece) const;
  // Returns the word that is_revoked() loads, for frequent checks. It is above 0 once the piece is
  // revoked, and valid as long as this HostMemory lives.
  const std::atomic<uint64_t>& revocation_of(int slot, uint32_t piece) const;

  // Announces that this rank may write to the piece of a peer from now on, through pointers that
  // the program keeps beyond an operation. Returns false if the peer has withdrawn the piece, or if
  // has_lost_holds(): then this rank must not write to the piece.
  bool announce_writer(int slot, uint32_t piece);
  bool is_withdrawn(int slot, uint32_t piece) const;
  // Makes announce_writer() fail on all peers for this rank's piece `place.piece`. If a peer has
  // called announce_writer() before, also calls revoke(), which keeps the content of the bytes.
  Status withdraw(const Place& place, size_t num_bytes, std::string_view reason);
  // Withdraws all of this rank's pieces to which peers may write.
  Status withdraw_all(std::string_view reason);

  // Releases this rank's hold on the piece of a peer.
  void release_hold(int slot, uint32_t piece);
  // Called when the rank in `slot` is lost: its holds no longer count. That rank may still be alive
  // with broken connections. So the call first sets a mark, which the rank's own has_lost_holds()
  // reads.
  void forget_holder(int slot);
  // Returns whether a peer has reported this rank as lost, so that memory of peers may have been
  // reused while this rank read it. Call it after reading memory of peers, before using what was
  // read.
  bool has_lost_holds() const;

 private:
  friend class Piece;
  struct Header;
  struct Record {  // a piece of this rank, also one that is destroyed but held by peers
    uint32_t id = 0;
    size_t size = 0;
    bool is_alive = true;
    bool is_revoked = false;
    std::string reason = {};
    ByteRange private_pages = {};  // a part of the slice; revocation_mutex_ guards it
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
  bool is_held(uint32_t piece) const;  // REQUIRES: mutex_ is locked
  // Returns whether a peer that has not released the piece may write to it.
  bool may_be_written(uint32_t piece) const;
  void reclaim();
  std::vector<ByteRange> take_released();
  // Returns the record of a piece of this rank; null if it is destroyed. The address is valid until
  // put_back(). REQUIRES: mutex_ is locked.
  Record* record_of(const Place& place);
  Status make_private(Record& record, const ByteRange& range);

  const std::shared_ptr<os::SharedMemory> segment_;  // shared with the owner of the front
  const HostMemoryLayout layout_;
  const int slot_;

  // A function that locks both mutexes locks this one first. It is held while pages are made
  // private, because making a private page private again would drop its content.
  std::mutex revocation_mutex_;
  mutable std::mutex mutex_;
  FreeRanges free_;
  // The records of this rank's pieces; the key is the offset in the slice.
  std::map<size_t, Record> records_;
  // The offsets of destroyed pieces that peers may hold. This vector and free_ids_ reserve room for
  // all pieces, so that the destructor of a piece allocates no memory.
  std::vector<size_t> destroyed_;
  std::vector<uint32_t> free_ids_;
  uint32_t last_id_ = 0;
  std::array<uint64_t, kMaxSlots / 64> dead_{};  // bit s is set if the rank in slot s is dead
};

}  // namespace cadre
