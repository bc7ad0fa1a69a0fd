#include "cadre/core/collective/net/tuning_file.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/nearest.h"
#include "cadre/core/base/printable.h"

namespace cadre {
namespace {

constexpr std::string_view kVersionKey = "version";
constexpr uint64_t kVersion = 1;
constexpr size_t kMaxOriginBytes = 256;

struct SizeKey {
  std::string_view name;
  uint64_t CrossoverTable::*size;
  uint64_t min = 1;
  uint64_t max = kMaxCrossoverBytes;
};
constexpr std::array kSizeKeys{
    SizeKey{"all_reduce_ring_bytes", &CrossoverTable::all_reduce_ring_bytes},
    SizeKey{"broadcast_chain_bytes", &CrossoverTable::broadcast_chain_bytes},
    SizeKey{"all_gather_ring_bytes", &CrossoverTable::all_gather_ring_bytes},
    SizeKey{"gather_linear_bytes", &CrossoverTable::gather_linear_bytes},
    // A chain has a step for each segment, so short segments would make long schedules.
    SizeKey{"chain_segment_bytes", &CrossoverTable::chain_segment_bytes, 4 << 10, 1 << 30}};

struct OriginKey {
  std::string_view name;
  std::string TuningOrigin::*text;
};
constexpr std::array kOriginKeys{OriginKey{"measured_engine", &TuningOrigin::engine},
                                 OriginKey{"measured_hosts", &TuningOrigin::hosts},
                                 OriginKey{"measured_date", &TuningOrigin::date},
                                 OriginKey{"measured_version", &TuningOrigin::version}};

constexpr std::string_view kBlanks = " \t";

std::string_view trimmed(std::string_view text) {
  const size_t begin = std::min(text.find_first_not_of(kBlanks), text.size());
  text.remove_prefix(begin);
  return text.substr(0, text.find_last_not_of(kBlanks) + 1);
}

// Returns the rest of a line after a value, without a comment.
bool is_blank(std::string_view text) {
  return text.empty() || text.front() == '#';
}

bool is_plain(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte >= 0x20 && byte != 0x7f && c != '"' && c != '\\';
}

class Parser {
 public:
  Result<TuningFile> parse(std::string_view text) {
    if (text.size() > kMaxTuningFileBytes) {
      return Error(ErrorCode::kInvalidArgument,
                   format("{} bytes, expected at most {}", text.size(), kMaxTuningFileBytes));
    }
    while (!text.empty()) {
      const size_t end = std::min(text.find('\n'), text.size());
      std::string_view line = text.substr(0, end);
      text.remove_prefix(std::min(end + 1, text.size()));
      if (line.ends_with('\r')) line.remove_suffix(1);
      ++line_;
      CADRE_RETURN_IF_ERROR(take(trimmed(line)));
    }
    return finish();
  }

 private:
  Error wrong(std::string_view what) const {
    return Error(ErrorCode::kInvalidArgument, format("line {}: {}", line_, what));
  }

  Status take(std::string_view line) {
    if (is_blank(line)) return {};
    const size_t equals = line.find('=');
    if (equals == std::string_view::npos) {
      return wrong(format("\"{}\", expected KEY = VALUE", printable(line.substr(0, 80))));
    }
    const std::string_view key = trimmed(line.substr(0, equals));
    const std::string_view value = trimmed(line.substr(equals + 1));
    if (lines_.empty() && key != kVersionKey) {
      return wrong(format("expected \"{} = {}\" before all other keys", kVersionKey, kVersion));
    }
    const auto [earlier, is_new] = lines_.try_emplace(std::string(key), line_);
    if (!is_new) return wrong(format("{} is given again, first in line {}", key, earlier->second));
    if (key == kVersionKey) return take_version(value);
    for (const SizeKey& known : kSizeKeys) {
      if (known.name == key) return take_size(known, value);
    }
    for (const OriginKey& known : kOriginKeys) {
      if (known.name == key) return take_text(known, value);
    }
    return unknown(key);
  }

  // Parses a decimal number; nullopt if another text follows, or if it is larger than 64 bits.
  static std::optional<uint64_t> number_of(std::string_view value) {
    uint64_t number = 0;
    const char* const end = value.data() + value.size();
    const auto parsed = std::from_chars(value.data(), end, number);
    if (parsed.ec != std::errc()) return std::nullopt;
    const auto rest = static_cast<size_t>(parsed.ptr - value.data());
    if (!is_blank(trimmed(value.substr(rest)))) return std::nullopt;
    return number;
  }

  Status take_version(std::string_view value) const {
    if (number_of(value) == kVersion) return {};
    return wrong(
        format("{} is {}, but this version of Cadre reads version {}: measure again with "
               "cadre tune",
               kVersionKey, printable(value.substr(0, 40)), kVersion));
  }

  Status take_size(const SizeKey& key, std::string_view value) {
    const auto number = number_of(value);
    if (!number || *number < key.min || *number > key.max) {
      return wrong(format("{} is {}, expected a number of bytes from {} to {}", key.name,
                          value.empty() ? "empty" : printable(value.substr(0, 40)), key.min,
                          key.max));
    }
    file_.table.*key.size = *number;
    return {};
  }

  Status take_text(const OriginKey& key, std::string_view value) {
    const size_t end = value.size() > 1 ? value.find('"', 1) : std::string_view::npos;
    const bool is_quoted = value.starts_with('"') && end != std::string_view::npos &&
                           is_blank(trimmed(value.substr(end + 1)));
    const std::string_view text = is_quoted ? value.substr(1, end - 1) : std::string_view();
    if (text.empty() || text.size() > kMaxOriginBytes || !std::ranges::all_of(text, is_plain)) {
      return wrong(
          format("{} has an invalid value, expected 1 to {} characters between quotation "
                 "marks, without a backslash",
                 key.name, kMaxOriginBytes));
    }
    origin_.*key.text = text;
    ++num_origin_keys_;
    return {};
  }

  Error unknown(std::string_view key) const {
    std::vector<std::string> names = {std::string(kVersionKey)};
    for (const SizeKey& known : kSizeKeys) names.emplace_back(known.name);
    for (const OriginKey& known : kOriginKeys) names.emplace_back(known.name);
    const std::string near = nearest(key.substr(0, 80), names);
    return wrong(format("unknown key \"{}\"{}", printable(key.substr(0, 80)),
                        near.empty() ? "" : format("; did you mean {}?", near)));
  }

  Result<TuningFile> finish() {
    const auto missing = [](std::string_view name) {
      return Error(ErrorCode::kInvalidArgument,
                   format("there is no {}; is the file complete?", name));
    };
    if (lines_.empty()) return missing(kVersionKey);
    for (const SizeKey& key : kSizeKeys) {
      if (!lines_.contains(std::string(key.name))) return missing(key.name);
    }
    for (const OriginKey& key : kOriginKeys) {
      const bool is_there = lines_.contains(std::string(key.name));
      if (num_origin_keys_ > 0 && !is_there) return missing(key.name);
    }
    if (num_origin_keys_ > 0) file_.measured = std::move(origin_);
    return std::move(file_);
  }

  TuningFile file_;
  TuningOrigin origin_;
  size_t num_origin_keys_ = 0;
  int line_ = 0;
  std::map<std::string, int, std::less<>> lines_;  // the line of each key
};

}  // namespace

std::string to_text(const TuningFile& file) {
  std::string text =
      format("# Sizes in bytes from which collectives use their second algorithm.\n{} = {}\n",
             kVersionKey, kVersion);
  for (const SizeKey& key : kSizeKeys) text += format("{} = {}\n", key.name, file.table.*key.size);
  if (!file.measured) return text;
  for (const OriginKey& key : kOriginKeys) {
    text += format("{} = \"{}\"\n", key.name, (*file.measured).*key.text);
  }
  return text;
}

Result<TuningFile> parse_tuning_file(std::string_view text) {
  return Parser().parse(text);
}

std::string hosts_text(std::span<const int> host_of_rank) {
  std::map<int, int> num_ranks_of_host;
  for (const int host : host_of_rank) ++num_ranks_of_host[host];
  std::map<int, int, std::greater<>> num_hosts_of_size;
  for (const auto& [host, num_ranks] : num_ranks_of_host) ++num_hosts_of_size[num_ranks];
  std::string text;
  for (const auto& [num_ranks, num_hosts] : num_hosts_of_size) {
    text += format("{}{}x{}", text.empty() ? "" : ",", num_hosts, num_ranks);
  }
  return text;
}

}  // namespace cadre
