#include "verdict.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

namespace cadre::testing {
namespace {

std::optional<int> number_at(std::string_view text) {
  int number = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  if (parsed.ec != std::errc()) return std::nullopt;
  return number;
}

void add(std::vector<int>& ranks, std::optional<int> rank) {
  if (rank && std::ranges::find(ranks, *rank) == ranks.end()) ranks.push_back(*rank);
}

// In the order of the text: "rank 1 (node0, pid 1001) ..."
std::vector<int> ranks_in(std::string_view text) {
  constexpr std::string_view kWord = "rank ";
  std::vector<int> ranks;
  for (size_t at = text.find(kWord); at != text.npos; at = text.find(kWord, at + 1)) {
    add(ranks, number_at(text.substr(at + kWord.size())));
  }
  return ranks;
}

// "these ranks did not come before the deadline: 1, 2 (of 4)"
std::vector<int> missing_ranks_in(std::string_view text) {
  constexpr std::string_view kWords = "these ranks did not come before the deadline: ";
  std::vector<int> ranks;
  size_t at = text.find(kWords);
  if (at == text.npos) return ranks;
  for (at += kWords.size(); at < text.size() && text[at - 1] != '('; ++at) {
    const bool is_start = text[at - 1] == ' ';
    if (is_start) add(ranks, number_at(text.substr(at)));
  }
  return ranks;
}

}  // namespace

// The last lines of an operation's failure are those of the first failure, on whatever rank:
//   ... on rank 0 (node0, pid 1000)
//     waiting for rank 1 (node1, pid 1001): ...
// or, of one that had not connected yet:
//     first failure: rank 0 (node0, pid 1000) gave up connecting: ... rank 1 (node1, pid 1001)
Verdict verdict_of(const RankReport& report, int rank) {
  constexpr std::string_view kGaveUp = " gave up connecting: ";
  constexpr std::string_view kCouldNotConnect = " could not connect: ";
  constexpr std::string_view kCannotReach = " cannot reach rank ";
  constexpr std::string_view kOnRank = " on rank ";
  const std::string_view text = report.failure->message();
  Verdict verdict;
  verdict.is_connecting = report.was_connecting();
  verdict.reporter = rank;
  if (verdict.is_connecting) {
    // "rank 2 could not connect: ...", heard from rank 2.
    std::string_view own = text.substr(text.find(": "));
    if (const size_t heard_at = text.rfind(kCouldNotConnect); heard_at != text.npos) {
      verdict.reporter = ranks_in(text.substr(0, heard_at)).back();
      own = text.substr(heard_at);
    }
    // "rank 2 (...) cannot reach rank 1 (...)"
    if (const size_t reach_at = own.find(kCannotReach); reach_at != own.npos) {
      own = own.substr(reach_at);
    }
    verdict.named = missing_ranks_in(text);
    if (verdict.named.empty()) verdict.named = ranks_in(own);
    return verdict;
  }
  const size_t cause_at = text.rfind("\n  ");
  if (cause_at == text.npos) return verdict;
  const std::string_view cause = text.substr(cause_at);
  if (const size_t gave_up_at = cause.find(kGaveUp); gave_up_at != cause.npos) {
    verdict.is_connecting = true;
    verdict.reporter = ranks_in(cause).front();
    verdict.named = ranks_in(cause.substr(gave_up_at));
    return verdict;
  }
  const size_t reporter_at = text.rfind(kOnRank, cause_at);
  verdict.reporter = number_at(text.substr(reporter_at + kOnRank.size())).value_or(rank);
  verdict.named = ranks_in(cause);
  if (verdict.named.size() > 1) verdict.named.resize(1);
  return verdict;
}

}  // namespace cadre::testing
