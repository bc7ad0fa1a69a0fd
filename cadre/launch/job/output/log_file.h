// A file for the output of workers, and a filter that copies chosen lines into one.
//
// Threads: one owner. Blocking: while the file system works. Errors: after the first write that
// fails (a full disk), further output to the file is dropped; failure() returns the reason.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/os/file_system.h"
#include "cadre/launch/job/output/line_splitter.h"

namespace cadre::launch {

class LogFile {
 public:
  LogFile(std::unique_ptr<os::OutputFile> file, std::string path)
      : file_(std::move(file)), path_(std::move(path)) {}

  void write(std::string_view bytes);

  const std::string& path() const { return path_; }
  const std::optional<Error>& failure() const { return failure_; }

 private:
  std::unique_ptr<os::OutputFile> file_;
  std::string path_;
  std::optional<Error> failure_;
};

// Copies the lines that contain one of several texts. A line is searched up to its first
// kMaxLineBytes bytes; the rest of a longer line is not copied.
class LineFilter {
 public:
  static constexpr size_t kMaxLineBytes = size_t{1} << 20;

  LineFilter(std::vector<std::string> texts, LogFile& file)
      : texts_(std::move(texts)), file_(file) {}

  // The unfinished line of one stream.
  struct Line {
    std::string bytes;
  };
  // Adds a piece to the line. At the end of a line with one of the texts, writes the prefix and the
  // line.
  void add(Line& line, std::string_view prefix, const LinePiece& piece) const;

 private:
  std::vector<std::string> texts_;
  LogFile& file_;
};

}  // namespace cadre::launch
