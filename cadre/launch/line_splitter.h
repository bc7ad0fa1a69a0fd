// Cuts a stream of bytes into lines, whatever the bytes are.
//
// Threads: one owner. Blocking: never. Lifetime: pieces handed to the callback are valid during it.
// A line is handed on as one piece if its newline comes in time. Of a longer line than
// kMaxPieceBytes, and at flush(), a piece comes that does not end the line, so memory is bounded.
// For a terminal, a carriage return starts the line anew: of "10%\r20%\r30%\n" only "30%" is shown.
// Anywhere else the bytes stay as they are.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace cadre::launch {

// A part of a line, without its newline.
struct LinePiece {
  std::string_view bytes;
  bool starts_line = true;
  bool ends_line = true;
  bool was_shown = false;  // the whole line was the last that take_progress() gave
  friend bool operator==(const LinePiece&, const LinePiece&) = default;
};

// What a terminal shows of a line that may hold carriage returns.
std::string_view visible_part(std::string_view line);

class LineSplitter {
 public:
  static constexpr size_t kMaxPieceBytes = 64 << 10;
  using Emit = std::function<void(const LinePiece& piece)>;

  enum class Returns { kKept, kRewriteTheLine };
  explicit LineSplitter(Returns returns) : returns_(returns) {}

  void feed(std::string_view bytes, const Emit& emit);
  // Hands on what has come of an unfinished line, unless it rewrites itself.
  void flush(const Emit& emit);
  // Ends an unfinished line: nothing more will come.
  void finish(const Emit& emit);
  // Whether a line has begun and not ended.
  bool is_in_line() const { return is_open_ || !partial_.empty(); }
  // The newest state of a line that rewrites itself (a progress bar), if it changed since the last
  // call.
  std::optional<std::string> take_progress();

 private:
  void rewrite();
  bool is_after_return() const {
    return returns_ == Returns::kRewriteTheLine && partial_.ends_with('\r');
  }
  void keep(std::string_view bytes, const Emit& emit);
  void hand_on(std::string_view bytes, bool ends_line, const Emit& emit);

  const Returns returns_;
  std::string partial_;   // of the line, what was not handed on
  bool is_open_ = false;  // a piece of the line was handed on
  bool rewrites_itself_ = false;
  bool has_new_progress_ = false;
  std::string shown_progress_;  // of the line, what take_progress() gave last
};

}  // namespace cadre::launch
