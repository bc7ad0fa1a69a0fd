#include "cadre/core/wire/crash_file.h"

#include <charconv>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

// Returns the next line without its newline, and removes it from `text`; nullopt at the end. A last
// line without newline, which was not written completely, does not count.
std::optional<std::string_view> take_line(std::string_view& text) noexcept {
  const size_t end = text.find('\n');
  if (end == std::string_view::npos) return std::nullopt;
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end + 1);
  return line;
}

template <typename Number>
bool parse_number(std::string_view text, Number& number, int base = 10) noexcept {
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, number, base);
  return result.ec == std::errc() && result.ptr == end;
}

bool parse_address(std::string_view text, uint64_t& address) noexcept {
  return text.starts_with("0x") && parse_number(text.substr(2), address, 16);
}

bool parse_field(std::string_view line, CrashFile& file) {
  const size_t space = line.find(' ');
  if (space == std::string_view::npos) return false;
  const std::string_view name = line.substr(0, space);
  const std::string_view value = line.substr(space + 1);
  if (name == "signal") return parse_number(value, file.signal);
  if (name == "code") return parse_number(value, file.code);
  if (name == "address") return parse_address(value, file.address);
  if (name == "process") return parse_number(value, file.process);
  if (name == "thread") return parse_number(value, file.thread);
  if (name == "time-ms") return parse_number(value, file.time_ms);
  return false;
}

bool parse_frame(std::string_view line, CrashFile& file) {
  if (file.frames.size() > kMaxCrashFrames) return false;
  CrashFrame frame{.is_exact = line.starts_with("exact ")};
  if (!frame.is_exact && !line.starts_with("call ")) return false;
  if (!parse_address(line.substr(line.find(' ') + 1), frame.address)) return false;
  file.frames.push_back(frame);
  return true;
}

}  // namespace

Result<CrashFile> parse_crash_file(std::string_view text) {
  if (!text.starts_with(kCrashFileBegin)) {
    return Error(ErrorCode::kCorruption,
                 "it is no crash file of this version: it does not begin with \"cadre-crash 1\"");
  }
  text.remove_prefix(kCrashFileBegin.size());
  enum class Part { kFields, kMaps, kFrames } part = Part::kFields;
  CrashFile file;
  int number = 1;
  while (const auto line = take_line(text)) {
    ++number;
    bool is_valid = true;
    if (part == Part::kFields) {
      if (*line == "maps") {
        part = Part::kMaps;
      } else {
        is_valid = parse_field(*line, file);
      }
    } else if (part == Part::kMaps) {
      if (*line == "frames") {
        part = Part::kFrames;
      } else {
        file.maps.append(*line).append("\n");
      }
    } else if (*line == "end") {
      file.is_complete = true;
      break;
    } else {
      is_valid = parse_frame(*line, file);
    }
    if (!is_valid) {
      return Error(ErrorCode::kCorruption,
                   cadre::format("line {} of the crash file is invalid: \"{}\"", number, *line));
    }
  }
  return file;
}

std::optional<MappedCode> find_mapped_code(std::string_view maps, uint64_t address) noexcept {
  std::string_view path;
  uint64_t base = 0;
  // A line is "START-END PERMISSIONS OFFSET DEVICE INODE  PATH".
  while (const auto line = take_line(maps)) {
    const size_t dash = line->find('-');
    const size_t space = line->find(' ');
    uint64_t start = 0;
    uint64_t end = 0;
    if (space == std::string_view::npos || dash > space ||
        !parse_number(line->substr(0, dash), start, 16) ||
        !parse_number(line->substr(dash + 1, space - dash - 1), end, 16)) {
      continue;
    }
    const size_t slash = line->find_first_of("/[");
    const auto own_path =
        slash == std::string_view::npos ? std::string_view() : line->substr(slash);
    if (own_path != path) base = start;
    path = own_path;
    if (start <= address && address < end && !path.empty()) {
      return MappedCode{.path = path, .offset = address - base};
    }
  }
  return std::nullopt;
}

}  // namespace cadre
