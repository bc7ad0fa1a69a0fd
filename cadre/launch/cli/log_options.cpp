#include "cadre/launch/cli/log_options.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "cadre/core/base/format.h"

namespace cadre::cli {
namespace {

using launch::StreamChoice;
using launch::StreamSet;

Error unexpected(const GivenOption& given, std::string_view expected) {
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("{}: expected {}", given.text(), expected));
}

std::vector<std::string_view> split_at_commas(std::string_view text) {
  std::vector<std::string_view> parts;
  for (size_t comma = text.find(','); comma != std::string_view::npos; comma = text.find(',')) {
    parts.push_back(text.substr(0, comma));
    text.remove_prefix(comma + 1);
  }
  parts.push_back(text);
  return parts;
}

std::optional<int> parse_rank(std::string_view text) {
  const auto rank = parse_integer(text);
  return rank && *rank >= 0 ? rank : std::nullopt;
}

std::optional<StreamSet> parse_stream_set(std::string_view text) {
  if (text.size() != 1 || text[0] < '0' || text[0] > '3') return std::nullopt;
  const int bits = text[0] - '0';
  return StreamSet{.has_output = (bits & 1) != 0, .has_error = (bits & 2) != 0};
}

}  // namespace

Result<StreamChoice> parse_streams(const GivenOption& given) {
  StreamChoice choice;
  if (given.value.empty()) return choice;
  if (const auto all = parse_stream_set(given.value)) {
    choice.of_all = *all;
    return choice;
  }
  for (const std::string_view part : split_at_commas(given.value)) {
    const size_t colon = std::min(part.find(':'), part.size());
    const auto rank = parse_rank(part.substr(0, colon));
    const auto streams = parse_stream_set(part.substr(std::min(colon + 1, part.size())));
    if (!rank || !streams) {
      return unexpected(
          given,
          "0 (no stream), 1 (standard output), 2 (standard error) or 3 (both), or one of "
          "them for each local rank, such as 0:3,1:2");
    }
    choice.of_rank[*rank] = *streams;
  }
  return choice;
}

Result<std::vector<int>> parse_local_ranks(const GivenOption& given) {
  std::vector<int> ranks;
  if (given.value.empty()) return ranks;
  for (const std::string_view part : split_at_commas(given.value)) {
    const auto rank = parse_rank(part);
    if (!rank) return unexpected(given, "local ranks with commas between them, such as 0,2");
    ranks.push_back(*rank);
  }
  return ranks;
}

Result<std::vector<std::string>> parse_filters(const GivenOption& given) {
  std::vector<std::string> texts;
  if (given.value.empty()) return texts;
  texts.emplace_back();
  for (size_t i = 0; i < given.value.size(); ++i) {
    const char c = given.value[i];
    if (c != ',') {
      texts.back() += c;
    } else if (i + 1 < given.value.size() && given.value[i + 1] == ',') {
      texts.back() += c;
      ++i;
    } else {
      texts.emplace_back();
    }
  }
  if (std::ranges::any_of(texts, &std::string::empty)) {
    return unexpected(given, "texts with one comma between them; two commas are a comma in a text");
  }
  return texts;
}

Status check_local_rank(std::string_view option, int rank, int num_workers) {
  if (rank < num_workers) return {};
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("{}: there is no local rank {}; this host has {} worker{}", option,
                             rank, num_workers, num_workers == 1 ? "" : "s"));
}

Status check_local_ranks(const launch::LogSpec& logs, int num_workers) {
  for (const auto& [rank, streams] : logs.redirects.of_rank) {
    CADRE_RETURN_IF_ERROR(check_local_rank("--redirects", rank, num_workers));
  }
  for (const auto& [rank, streams] : logs.tees.of_rank) {
    CADRE_RETURN_IF_ERROR(check_local_rank("--tee", rank, num_workers));
  }
  for (const int rank : logs.shown_ranks) {
    CADRE_RETURN_IF_ERROR(check_local_rank("--local-ranks-filter", rank, num_workers));
  }
  return {};
}

}  // namespace cadre::cli
