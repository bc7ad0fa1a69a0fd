// Pipes between processes: the reading end is non-blocking and can be polled.
//
// Threads: one owner at a time. Blocking: never.
// Lifetime: closed by the destructor; the reader sees the end when the last writer has closed.
// Errors: make_pipe gives kUnavailable when the process has no descriptor left.
#pragma once

#include <cstddef>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/socket.h"

namespace cadre::os {

class PipeReader final : public Pollable {
 public:
  explicit PipeReader(Fd fd) : fd_(std::move(fd)) {}

  struct Chunk {
    size_t num_bytes = 0;    // the number of bytes that were read into the buffer
    bool has_ended = false;  // no writer is left, and everything was read
  };
  // Reads the available bytes, at most buffer.size().
  Chunk try_read(Bytes buffer);

  int poll_handle() const override { return fd_.get(); }

 private:
  Fd fd_;
};

struct Pipe {
  Fd read_end;   // non-blocking
  Fd write_end;  // is blocking, because it becomes a worker's output
};

// Makes a pipe whose ends are both closed on exec.
Result<Pipe> make_pipe();

}  // namespace cadre::os
