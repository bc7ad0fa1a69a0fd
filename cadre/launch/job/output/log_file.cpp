#include "cadre/launch/job/output/log_file.h"

#include <algorithm>

#include "cadre/core/base/format.h"
#include "cadre/core/base/types.h"

namespace cadre::launch {

void LogFile::write(std::string_view bytes) {
  if (failure_) return;
  const Status written =
      file_->write(ConstBytes(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()));
  if (!written.ok()) failure_ = written.error();
}

void LineFilter::add(Line& line, std::string_view prefix, const LinePiece& piece) const {
  const size_t room = kMaxLineBytes - std::min(line.bytes.size(), kMaxLineBytes);
  line.bytes.append(piece.bytes.substr(0, room));
  if (!piece.ends_line) return;
  const bool is_wanted = std::ranges::any_of(
      texts_, [&](const std::string& text) { return line.bytes.find(text) != std::string::npos; });
  if (is_wanted) file_.write(cadre::format("{}{}\n", prefix, line.bytes));
  line.bytes.clear();
}

}  // namespace cadre::launch
