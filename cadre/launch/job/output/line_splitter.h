// Splits a stream of arbitrary bytes into lines.
//
// Threads: one owner. Blocking: never. Lifetime: pieces are valid only during the callback.
// A line is passed on as one piece if its newline arrives in time. A line longer than
// kMaxPieceBytes, or one that is unfinished at flush(), is passed on in pieces that do not end the
// line, so memory is bounded. For a terminal, a carriage return restarts the line: of
// "10%\r20%\r30%\n" only "30%" is shown. Otherwise the bytes stay unchanged.
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
  bool was_shown = false;  // take_progress() has already returned it
  friend bool operator==(const LinePiece&, const LinePiece&) = default;
};

// Returns the text that a terminal shows for a line with carriage returns.
std::string_view visible_part(std::string_view line);

class LineSplitter {
 public:
  static constexpr size_t kMaxPieceBytes = 64 << 10;
  using Emit = std::function<void(const LinePiece& piece)>;

  enum class Returns { kKept, kRewriteTheLine };
  explicit LineSplitter(Returns returns) : returns_(returns) {}

  void feed(std::string_view bytes, const Emit& emit);
  // Passes on the pending part of an unfinished line, unless the line is rewritten in place.
  void flush(const Emit& emit);
  // Ends an unfinished line at the end of the stream.
  void finish(const Emit& emit);
  // Returns whether a line has begun and not ended.
  bool is_in_line() const { return is_open_ || !partial_.empty(); }
  // Returns the current text of a line that is rewritten in place (a progress bar); nullopt if it
  // has not changed since the last call.
  std::optional<std::string> take_progress();

 private:
  void rewrite();
  bool is_after_return() const {
    return returns_ == Returns::kRewriteTheLine && partial_.ends_with('\r');
  }
  void keep(std::string_view bytes, const Emit& emit);
  void pass_on(std::string_view bytes, bool ends_line, const Emit& emit);

  const Returns returns_;
  std::string partial_;   // the part of the line that was not passed on yet
  bool is_open_ = false;  // a part of the line was passed on
  bool rewrites_itself_ = false;
  bool has_new_progress_ = false;
  std::string shown_progress_;  // the text of the current line that take_progress() returned last
};

}  // namespace cadre::launch
