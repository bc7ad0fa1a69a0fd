#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/trace/trace.h"

namespace cadre {
namespace {

// A disjoint-set forest (union-find) of records.
class Sets {
 public:
  explicit Sets(size_t count) : parents_(count) {
    std::iota(parents_.begin(), parents_.end(), size_t{0});
  }
  size_t find(size_t one) {
    while (parents_[one] != one) one = parents_[one] = parents_[parents_[one]];
    return one;
  }
  void join(size_t a, size_t b) { parents_[find(a)] = find(b); }

 private:
  std::vector<size_t> parents_;
};

using Birth = std::tuple<int64_t, uint64_t, int64_t>;

// Orders records by the second in which they were made, then by the start of their processes, then
// by the clock of their operations.
Birth birth_of(const FlightRecord& record) {
  return {record.identity.made_at_s, record.identity.process_start,
          record.entries.empty() ? 0 : record.entries.front().begin_ns};
}

std::string process_of(const FlightIdentity& who) {
  return format("{} {} {}", who.host, who.pid, who.process_start);
}

std::string connection_of(const FlightIdentity& who) {
  return format("{}\n{}\n{}\n{}", who.group, who.id, who.round, who.connection);
}

}  // namespace

std::vector<std::vector<FlightRecord>> split_jobs(std::vector<FlightRecord> records) {
  Sets sets(records.size());
  std::map<std::string, size_t> first_of;  // the first record of each process and connection
  for (size_t i = 0; i < records.size(); ++i) {
    for (const std::string& key :
         {process_of(records[i].identity), connection_of(records[i].identity)}) {
      sets.join(i, first_of.try_emplace(key, i).first->second);
    }
  }
  std::map<size_t, std::vector<FlightRecord>> by_set;
  for (size_t i = 0; i < records.size(); ++i) {
    by_set[sets.find(i)].push_back(std::move(records[i]));
  }
  std::vector<std::vector<FlightRecord>> jobs;
  for (auto& [set, job] : by_set) {
    std::ranges::sort(job, {}, birth_of);
    jobs.push_back(std::move(job));
  }
  std::ranges::sort(jobs, {}, [](const auto& job) { return birth_of(job.front()); });
  return jobs;
}

}  // namespace cadre
