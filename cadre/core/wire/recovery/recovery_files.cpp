#include "cadre/core/wire/recovery/recovery_files.h"

#include <algorithm>
#include <charconv>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

constexpr std::string_view kRecoveryBegin = "cadre-recovery 1\n";
constexpr std::string_view kMembershipBegin = "cadre-membership 1\n";
constexpr std::string_view kLostRanksBegin = "cadre-lost-ranks 1\n";
constexpr int64_t kMaxMilliseconds = int64_t{1} << 40;

// Removes a line from the front of `text`. Returns nullopt if it has no newline.
std::optional<std::string_view> take_line(std::string_view& text) {
  const size_t end = text.find('\n');
  if (end == std::string_view::npos) return std::nullopt;
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end + 1);
  return line;
}

// Returns the number, which is not negative and must be the whole text.
template <typename Number>
std::optional<Number> parse_number(std::string_view text) {
  Number number = 0;
  const char* const stop = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), stop, number);
  if (parsed.ec != std::errc() || parsed.ptr != stop || text.starts_with('-')) return std::nullopt;
  return number;
}

// Removes "NAME NUMBER\n" from the front of `text` and returns the number.
std::optional<uint64_t> take_number(std::string_view& text, std::string_view name) {
  const auto line = take_line(text);
  if (!line || !line->starts_with(name)) return std::nullopt;
  return parse_number<uint64_t>(line->substr(name.size()));
}

// Removes "ranks FIRST-LAST\n" from the front of `text`.
std::optional<RankRange> take_range(std::string_view& text) {
  constexpr std::string_view kName = "ranks ";
  const auto line = take_line(text);
  if (!line || !line->starts_with(kName)) return std::nullopt;
  const std::string_view value = line->substr(kName.size());
  const size_t hyphen = value.find('-');
  if (hyphen == std::string_view::npos) return std::nullopt;
  const auto first = parse_number<int>(value.substr(0, hyphen));
  const auto last = parse_number<int>(value.substr(hyphen + 1));
  if (!first || !last || *last < *first) return std::nullopt;
  return RankRange{*first, *last};
}

}  // namespace

std::optional<std::string> MembershipFile::find(std::string_view name) const {
  for (const auto& [own_name, value] : variables) {
    if (own_name == name) return value;
  }
  return std::nullopt;
}

std::string encode_recovery_file(const RecoveryFile& file) {
  return cadre::format("{}state {}\nmemberships {}\ncomes-within-ms {}\n", kRecoveryBegin,
                       file.is_waiting ? "waiting" : "running", file.num_memberships,
                       file.comes_within.count());
}

std::optional<RecoveryFile> parse_recovery_file(std::string_view text) {
  if (!text.starts_with(kRecoveryBegin)) return std::nullopt;
  text.remove_prefix(kRecoveryBegin.size());
  const auto state = take_line(text);
  if (state != "state waiting" && state != "state running") return std::nullopt;
  const auto number = take_number(text, "memberships ");
  const auto within = take_number(text, "comes-within-ms ");
  if (!number || !within || *within > kMaxMilliseconds || !text.empty()) return std::nullopt;
  return RecoveryFile{.is_waiting = state == "state waiting",
                      .num_memberships = *number,
                      .comes_within = std::chrono::milliseconds(*within)};
}

std::string encode_membership_file(const MembershipFile& file) {
  std::string text = cadre::format("{}number {}\n", kMembershipBegin, file.number);
  for (const auto& [name, value] : file.variables) text += cadre::format("{}={}\n", name, value);
  return text;
}

std::optional<MembershipFile> parse_membership_file(std::string_view text) {
  if (!text.starts_with(kMembershipBegin)) return std::nullopt;
  text.remove_prefix(kMembershipBegin.size());
  const auto number = take_number(text, "number ");
  if (!number) return std::nullopt;
  MembershipFile file{.number = *number, .variables = {}};
  while (!text.empty()) {
    const auto line = take_line(text);
    const size_t equals = line ? line->find('=') : std::string_view::npos;
    if (equals == std::string_view::npos) return std::nullopt;
    const std::string_view name = line->substr(0, equals);
    const bool is_known =
        std::ranges::find(kMembershipVariables, name) != kMembershipVariables.end();
    if (!is_known || file.find(name)) return std::nullopt;
    file.variables.emplace_back(name, line->substr(equals + 1));
  }
  // A file without all variables would be mixed with those of the process.
  if (file.variables.size() != kMembershipVariables.size()) return std::nullopt;
  return file;
}

std::string encode_lost_ranks_file(const LostRanksFile& file) {
  std::string text = cadre::format("{}memberships {}\n", kLostRanksBegin, file.num_memberships);
  for (const RankRange& range : file.ranks) {
    text += cadre::format("ranks {}-{}\n", range.first, range.last);
  }
  return text;
}

std::optional<LostRanksFile> parse_lost_ranks_file(std::string_view text) {
  if (!text.starts_with(kLostRanksBegin)) return std::nullopt;
  text.remove_prefix(kLostRanksBegin.size());
  const auto number = take_number(text, "memberships ");
  if (!number || text.empty()) return std::nullopt;
  LostRanksFile file{.num_memberships = *number, .ranks = {}};
  while (!text.empty()) {
    const auto range = take_range(text);
    if (!range) return std::nullopt;
    file.ranks.push_back(*range);
  }
  return file;
}

}  // namespace cadre
