// Standard output or standard error of this process, written without ever blocking for long.
//
// Threads: one owner at a time. Blocking: never on pipes, terminals and sockets; for the time of
// the disk on files. Lifetime: the process's own descriptor stays open. Errors: if the reader is
// gone, for example a closed terminal, later output is dropped without an error, because a job must
// not fail for lack of a reader. Output is also dropped after another failure (a full disk), which
// failure() returns.
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
  // Returns the number of bytes taken, which is less than text.size() when the reader is slow.
  size_t try_write(std::string_view text);

  // Returns why bytes were lost: kUnavailable with the system's reason.
  const std::optional<Error>& failure() const { return failure_; }

  int poll_handle() const override { return handle_; }

 private:
  bool is_ready() const;
  void give_up(int error_number);

  // A terminal is opened once more, because O_NONBLOCK belongs to the open file, which the shell
  // shares. Pipes are written in pieces for which poll() guarantees that they do not block.
  Fd reopened_;
  int handle_;
  bool is_terminal_ = false;
  bool is_gone_ = false;
  std::optional<Error> failure_;
};

// Opens closed standard streams on /dev/null for reading only: reads return the end of the file,
// and writes fail. A program calls it first, so that no file, pipe or socket of it gets the number
// of a standard stream.
void fill_closed_streams();

// Returns the width of the terminal of this process, which need not be its standard output;
// `otherwise` if there is no terminal or its width is unknown.
CADRE_EXPORT int terminal_columns(int otherwise);

// Returns whether standard output and standard error are the same terminal, file or pipe.
bool outputs_are_one();

}  // namespace cadre::os
