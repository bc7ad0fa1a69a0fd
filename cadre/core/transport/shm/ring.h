// A byte queue from one process to another through shared memory, with one writer and one reader.
//
// Threads: RingWriter and RingReader each belong to one thread; the two may run in two processes.
// Blocking: never; ShmTransport waits. Lifetime: the mapping must outlive the RingWriter and the
// RingReader.
// Errors: kCorruption if the other end's count of bytes is impossible; memory outside the ring is
// never accessed. kPeerLost if the other end has closed; the reader first gets all bytes that were
// written before. Source: Lamport's single-producer single-consumer queue, with counters that never
// wrap (2^64 bytes).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"

namespace cadre {

inline constexpr size_t kCacheLine = 64;

// The control part of a ring in shared memory, followed by the ring's bytes. All bytes of an empty
// ring are zero. Each end writes only its own cache line. It also has a copy of its own count in
// private memory and checks the other end's count against this copy.
struct RingControl {
  struct alignas(kCacheLine) End {
    std::atomic<uint64_t> count{0};  // the number of bytes written (or read) by this end so far
    std::atomic<uint32_t> is_closed{0};
  };
  End writer;
  End reader;
};
static_assert(sizeof(RingControl) == 2 * kCacheLine && std::atomic<uint64_t>::is_always_lock_free);

class RingWriter {
 public:
  // `data` is the memory of the ring. Its size is a power of two.
  RingWriter(RingControl& control, Bytes data) : control_(control), data_(data) {}

  Result<size_t> try_write(ConstBytes source);
  size_t capacity() const { return data_.size(); }
  // Returns whether try_write() would write bytes or return an error, and not just 0.
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
  // Returns whether try_read() would read bytes or return an error, and not just 0.
  bool is_ready() const;
  void close() { control_.reader.is_closed.store(1, std::memory_order_release); }

 private:
  RingControl& control_;
  Bytes data_;
  uint64_t read_ = 0;
};

}  // namespace cadre
