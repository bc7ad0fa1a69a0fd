// Bytes in order from one process to another through shared memory: one writer, one reader.
//
// Threads: RingWriter and RingReader each belong to one thread; the two may run in two processes.
// Blocking: never; the transport waits. Lifetime: the mapping outlives both ends.
// Errors: kCorruption when the other end's index is impossible; nothing outside the ring is touched
// then. kPeerLost when the other end has closed (a reader gets what was written before).
// Source: Lamport's single-producer single-consumer queue, with counters that never wrap (2^64
// bytes).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"

namespace cadre {

inline constexpr size_t kCacheLine = 64;

// The part of a ring that both ends see, followed by its bytes. All zero is the empty ring. Each
// end writes its own line only, and never believes what it reads: it keeps its own counter to
// itself and checks the other's.
struct RingControl {
  struct alignas(kCacheLine) End {
    std::atomic<uint64_t> count{0};  // bytes written, or read, so far
    std::atomic<uint32_t> is_closed{0};
  };
  End writer;
  End reader;
};
static_assert(sizeof(RingControl) == 2 * kCacheLine && std::atomic<uint64_t>::is_always_lock_free);

class RingWriter {
 public:
  // `data` is the ring's bytes: a power of two of them.
  RingWriter(RingControl& control, Bytes data) : control_(control), data_(data) {}

  Result<size_t> try_write(ConstBytes source);
  size_t capacity() const { return data_.size(); }
  // Whether try_write would do more than return 0.
  bool is_ready() const;
  void close() { control_.writer.is_closed.store(1, std::memory_order_release); }

 private:
  RingControl& control_;
  Bytes data_;
  uint64_t written_ = 0;
};

class RingReader {
 public:
  RingReader(RingControl& control, Bytes data) : control_(control), data_(data) {}

  Result<size_t> try_read(Bytes target);
  // Whether try_read would do more than return 0.
  bool is_ready() const;
  void close() { control_.reader.is_closed.store(1, std::memory_order_release); }

 private:
  RingControl& control_;
  Bytes data_;
  uint64_t read_ = 0;
};

}  // namespace cadre
