#include "cadre/core/rendezvous/lost_rank.h"

#include <charconv>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

// Removes a number and the space after it from the beginning of the text.
bool take_number(std::string_view& text, int& number) {
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  const auto length = static_cast<size_t>(end - text.data());
  if (code != std::errc() || length == text.size() || text[length] != ' ') return false;
  text.remove_prefix(length + 1);
  return true;
}

}  // namespace

std::string write_lost_rank(const LostRank& lost) {
  return format("{} {} {}\n", lost.rank, lost.pid, lost.host);
}

std::vector<LostRank> read_lost_ranks(std::string_view text) {
  std::vector<LostRank> all;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
    int rank = 0;
    LostRank lost;
    if (!take_number(line, rank) || !take_number(line, lost.pid) || rank < 0) continue;
    lost.rank = rank;
    lost.host = line;
    all.push_back(std::move(lost));
  }
  return all;
}

std::string lost_key(uint64_t round, std::string_view group) {
  return format("cadre/{}/{}/lost", round, group);
}

Status leave_presence_will(os::System& system, Membership& membership, Deadline deadline) {
  const os::HostInfo host = system.host();
  auto will = membership.store->leave_will(lost_key(membership.round, membership.group),
                                           write_lost_rank({membership.rank, host.pid, host.name}),
                                           deadline);
  if (!will.ok()) return will.error();
  membership.will_group = membership.group;
  membership.will = std::move(will).value();
  return {};
}

}  // namespace cadre
