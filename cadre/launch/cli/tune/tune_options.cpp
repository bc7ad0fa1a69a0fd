#include "cadre/launch/cli/tune/tune_options.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre::cli {
namespace {

// Groups of up to 8,192 ranks have a choice from this size on: a tuning file with the size 1
// chooses the second algorithm from 1 x ring_factor() bytes.
constexpr uint64_t kSmallestSize = 1 << 10;
constexpr uint64_t kLargestSize = 1 << 30;
constexpr uint64_t kDefaultLargest = 16 << 20;
constexpr int kMaxRepetitions = 10'000;

Error invalid(const GivenOption& given, std::string_view sentence) {
  return Error(ErrorCode::kInvalidArgument, cadre::format("{}: {}", given.text(), sentence));
}

// Parses "65536", "64K" or "1M".
std::optional<uint64_t> parse_size(std::string_view text) {
  uint64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  const std::string_view unit(parsed.ptr, static_cast<size_t>(end - parsed.ptr));
  if (parsed.ec != std::errc() || number > kLargestSize) return std::nullopt;
  if (unit == "K") number <<= 10;
  if (unit == "M") number <<= 20;
  const bool is_known = unit.empty() || unit == "K" || unit == "M";
  if (!is_known || number < kSmallestSize || number > kLargestSize) return std::nullopt;
  return number;
}

Result<std::vector<uint64_t>> parse_sizes(const GivenOption& given) {
  std::vector<uint64_t> sizes;
  std::string_view rest = given.value;
  while (true) {
    const size_t comma = std::min(rest.find(','), rest.size());
    const auto size = parse_size(rest.substr(0, comma));
    if (!size || (!sizes.empty() && *size <= sizes.back())) {
      return invalid(given,
                     "expected ascending sizes from 1K to 1024M, such as 1K,64K,1M or 4096,65536");
    }
    sizes.push_back(*size);
    if (comma == rest.size()) return sizes;
    rest.remove_prefix(comma + 1);
  }
}

std::vector<uint64_t> default_sizes() {
  std::vector<uint64_t> sizes;
  for (uint64_t size = kSmallestSize; size <= kDefaultLargest; size *= 2) sizes.push_back(size);
  return sizes;
}

}  // namespace

Result<TuneOptions> parse_tune_options(const ParsedWords& parsed) {
  TuneOptions options{.measured = {.sizes = default_sizes()}};
  if (const GivenOption* given = parsed.find("--output")) {
    if (given->value.empty()) return invalid(*given, "expected the name of a file");
    options.output = given->value;
  }
  if (const GivenOption* given = parsed.find("--sizes")) {
    auto sizes = parse_sizes(*given);
    if (!sizes.ok()) return sizes.error();
    options.measured.sizes = *std::move(sizes);
  }
  if (const GivenOption* given = parsed.find("--repetitions")) {
    const auto number = parse_integer(given->value);
    if (!number || *number < 1 || *number > kMaxRepetitions) {
      return invalid(*given, cadre::format("expected a number from 1 to {}", kMaxRepetitions));
    }
    options.measured.repetitions = *number;
  }
  return options;
}

}  // namespace cadre::cli
