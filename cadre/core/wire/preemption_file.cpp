#include "cadre/core/wire/preemption_file.h"

#include <charconv>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

constexpr std::string_view kBegin = "cadre-preemption 1\n";
constexpr std::string_view kAsked = "asked\n";
constexpr int kMaxExitCode = 255;

// Removes "NAME NUMBER\n" from the front of `text` and returns the number.
std::optional<int64_t> take_field(std::string_view& text, std::string_view name) {
  const size_t end = text.find('\n');
  if (end == std::string_view::npos || !text.starts_with(name)) return std::nullopt;
  const std::string_view value = text.substr(name.size(), end - name.size());
  int64_t number = 0;
  const char* const stop = value.data() + value.size();
  const auto parsed = std::from_chars(value.data(), stop, number);
  if (parsed.ec != std::errc() || parsed.ptr != stop) return std::nullopt;
  text.remove_prefix(end + 1);
  return number;
}

}  // namespace

std::string encode_preemption_file(const PreemptionFile& file) {
  if (!file.saved_step) return std::string(kBegin).append(kAsked);
  return cadre::format("{}saved-step {}\nexit-code {}\n", kBegin, *file.saved_step, file.exit_code);
}

std::optional<PreemptionFile> parse_preemption_file(std::string_view text) {
  if (!text.starts_with(kBegin)) return std::nullopt;
  text.remove_prefix(kBegin.size());
  if (text == kAsked) return PreemptionFile();
  const auto step = take_field(text, "saved-step ");
  const auto code = take_field(text, "exit-code ");
  if (!step || !code || !text.empty() || *code < 1 || *code > kMaxExitCode) return std::nullopt;
  return PreemptionFile{.saved_step = *step, .exit_code = static_cast<int>(*code)};
}

}  // namespace cadre
