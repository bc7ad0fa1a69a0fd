// Combines the flight records of a group's ranks: where the group stopped, which ranks waited, and
// which rank did not do its part.
//
// Threads: pure functions over values. Blocking: never. Errors: none; parse_flight_record() has
// returned the errors of records that cannot be read. Times are those of each host's monotonic
// clock; only times of one host are compared. Source: the questions that PyTorch's flight recorder
// analyser answers for NCCL.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/fabric/flight/flight_record.h"

namespace cadre {

// The state of one rank in the collective at which its group stopped.
struct RankStanding {
  enum class Kind {
    kFinished,  // the rank completed the collective
    // The rank called the collective and did not complete it, because it waited for another rank.
    kWaiting,
    // The rank did not call the collective, or others waited inside it for this rank.
    kOwing,
    kNoRecord,
  };
  int rank = 0;
  Kind kind = Kind::kNoRecord;
  std::string who;   // for example "rank 3 (node1, pid 812)"
  std::string text;  // for example "last seen after all_gather #1041, 61 s ago"

  friend bool operator==(const RankStanding&, const RankStanding&) = default;
};

struct GroupTrace {
  std::string group;
  std::string id;  // distinguishes this group from groups of the same name
  uint64_t round = 0;
  int world_size = 0;
  std::vector<FlightRecord> records;  // the records that exist; the key is the rank
  // The first collective that not all ranks finished; nullopt if every rank finished what any rank
  // began.
  std::optional<uint64_t> stopped_at;
  std::string call;  // describes that collective, for example "all_reduce(sum, float32 x 1024)"
  std::vector<RankStanding> standings;
  // The calls that differ between ranks under one number, in one sentence each.
  std::vector<std::string> disagreements;
  // The messages that were not completed, in one sentence each.
  std::vector<std::string> open_messages;
};

// Returns the records of each job separately, because a folder may hold those of several jobs. The
// job that began last is at the end. Records are of one job if one process wrote them, or processes
// that connected with each other.
CADRE_EXPORT std::vector<std::vector<FlightRecord>> split_jobs(std::vector<FlightRecord> records);

// Returns one trace for each group and round, in the order of their names and rounds. If a rank has
// two records, the one that began later is used. The time of a host ends when a rank of it was last
// seen alive, or else with the last event in its records.
// REQUIRES: the records are of one job.
CADRE_EXPORT std::vector<GroupTrace> trace_groups(std::vector<FlightRecord> records);

// Returns text for people: the result, then a table of the last `num_operations` collectives. For
// each rank the table has how much later than the first rank of its host it began the collective,
// and how long it was inside.
CADRE_EXPORT std::string to_text(const GroupTrace& trace, size_t num_operations);
// Returns JSON for programs: an array of the traces, each with the operations of its records.
CADRE_EXPORT std::string to_json(const std::vector<GroupTrace>& traces);

}  // namespace cadre
