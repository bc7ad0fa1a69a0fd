// Standard output or standard error of this process, written without ever blocking for long.
//
// Threads: one owner at a time. Blocking: never on pipes, terminals and sockets; for the time of
// the disk on files. Lifetime: the process's own descriptor stays open. Errors: an output whose
// reader is gone swallows all that follows, as a terminal does that was closed: the work is worth
// more than its log. So does one that fails otherwise (a full disk), and failure() says why.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/socket.h"

namespace cadre::os {

class CADRE_EXPORT OutputStream final : public Pollable {
 public:
  enum class Target { kStandardOutput, kStandardError };
  explicit OutputStream(Target target);

  bool is_terminal() const { return is_terminal_; }
  // Bytes taken; fewer than given when the reader is slow.
  size_t try_write(std::string_view text);

  // Why bytes were lost: kUnavailable with the system's reason.
  const std::optional<Error>& failure() const { return failure_; }

  int poll_handle() const override { return handle_; }

 private:
  bool is_ready() const;
  void give_up(int error_number);

  // The flag O_NONBLOCK belongs to the open file, which is shared with the shell; so a terminal is
  // opened once more, and pipes are written in pieces that poll() promises not to block.
  Fd reopened_;
  int handle_;
  bool is_terminal_ = false;
  bool is_gone_ = false;
  std::optional<Error> failure_;
};

// To be called first by a program that opens files: a standard stream that was closed gets a
// descriptor that ends at once when it is read and fails when it is written, so that no file, pipe
// or socket of the program takes its number.
void fill_closed_streams();

// The width of the terminal of this process, which its standard output need not be; `otherwise` if
// it has none or does not know it.
CADRE_EXPORT int terminal_columns(int otherwise);

// Whether standard output and standard error are the same terminal, file or pipe.
bool outputs_are_one();

}  // namespace cadre::os
