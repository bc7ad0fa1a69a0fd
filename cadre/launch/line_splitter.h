// Cuts a stream of bytes into lines, whatever the bytes are.
//
// Threads: one owner. Blocking: never. Lifetime: lines handed to the callback are valid during it.
// A line longer than kMaxLineBytes is cut into several, so memory is bounded. A carriage return
// starts the line anew, as on a terminal: of "10%\r20%\r30%\n" only "30%" is a line.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace cadre::launch {

class LineSplitter {
 public:
  static constexpr size_t kMaxLineBytes = 64 << 10;
  using Emit = std::function<void(std::string_view line)>;  // without its newline

  void feed(std::string_view bytes, const Emit& emit);
  // What came after the last newline, if anything.
  void finish(const Emit& emit);
  // The newest state of a line that rewrites itself with carriage returns (a progress bar), if it
  // changed since the last call.
  std::optional<std::string> take_progress();

 private:
  void keep(std::string_view bytes, const Emit& emit);

  std::string partial_;
  bool has_new_progress_ = false;
};

}  // namespace cadre::launch
