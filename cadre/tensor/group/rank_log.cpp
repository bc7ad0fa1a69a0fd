#include "cadre/tensor/group/rank_log.h"

#include <utility>

#include "cadre/tensor/group/main_rank.h"

namespace cadre {

RankLog::RankLog(const ProcessGroup& group, RankLogOptions options)
    : group_(group),
      component_(std::move(options.component)),
      is_writing_(
          options.ranks == LoggingRanks::kAll ||
          is_main_rank(group, {.of_each_node = options.ranks == LoggingRanks::kMainOfEachNode})) {}

void RankLog::write(LogLevel level, std::string_view message) const {
  const auto& log = group_.communicator().options().log;
  if (!is_writing_ || !log) return;
  while (true) {
    const size_t end = message.find('\n');
    log->write(level, component_, message.substr(0, end));
    if (end == std::string_view::npos) return;
    message.remove_prefix(end + 1);
  }
}

}  // namespace cadre
