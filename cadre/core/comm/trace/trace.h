// What the flight records of a group's ranks say together: where it stopped, who waited, who owes.
//
// Threads: pure functions over values. Blocking: never. Errors: none; a record that cannot be read
// was refused before (parse_flight_record).
// Times are of each host's monotonic clock: they are compared between ranks of one host only.
// Source: the questions that PyTorch's flight recorder analyser answers for NCCL.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/fabric/flight/flight_record.h"

namespace cadre {

// Where one rank stands towards the collective at which its group stopped.
struct RankStanding {
  enum class Kind {
    kFinished,  // it completed the collective
    kWaiting,   // it called it, and it had not ended or has failed while another was waited for
    kOwing,     // it did not call it, or another waited for it there
    kNoRecord,
  };
  int rank = 0;
  Kind kind = Kind::kNoRecord;
  std::string who;   // "rank 3 (node1, pid 812)"
  std::string text;  // "last seen after all_gather #1041, 61 s ago"

  friend bool operator==(const RankStanding&, const RankStanding&) = default;
};

struct GroupTrace {
  std::string group;
  std::string id;  // tells it from groups of the same name
  uint64_t round = 0;
  int world_size = 0;
  std::vector<FlightRecord> records;  // by rank, those that there are
  // The first collective that not all finished; nullopt when all finished all that any began.
  std::optional<uint64_t> stopped_at;
  std::string call;  // that collective: "all_reduce(sum, float32 x 1024)"
  std::vector<RankStanding> standings;
  // What ranks called differently under one number, one sentence each.
  std::vector<std::string> disagreements;
  // Messages that were not done, one sentence each.
  std::vector<std::string> open_messages;
};

// The records of each job by themselves, the job that began last at the end: a folder may hold
// those of several. Records are of one job when one process wrote them, or processes that connected
// with each other.
CADRE_EXPORT std::vector<std::vector<FlightRecord>> split_jobs(std::vector<FlightRecord> records);

// One trace for each group and round, in the order of their names and rounds. If a rank has two
// records, the one that began later counts. Where a rank of a host was seen to live, the host's
// time goes on until then; else it ends with the last event in its records.
// REQUIRES: the records are of one job.
CADRE_EXPORT std::vector<GroupTrace> trace_groups(std::vector<FlightRecord> records);

// For people: the verdict, then a table of the last `num_operations` collectives with, for each
// rank, when it came after the first rank of its host and how long it was inside.
CADRE_EXPORT std::string to_text(const GroupTrace& trace, size_t num_operations);
// For programs: an array of the same, each with its records' operations.
CADRE_EXPORT std::string to_json(const std::vector<GroupTrace>& traces);

}  // namespace cadre
