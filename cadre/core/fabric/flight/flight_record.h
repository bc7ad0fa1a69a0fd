// The last operations of a rank, as read from a flight recorder's memory or file.
//
// Threads: pure functions over values. Blocking: never.
// Errors: kCorruption, which says what is wrong with the file. Every field of a file is checked.
// Format: docs/formats/flight-record.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/wire/control.h"

namespace cadre {

inline constexpr uint32_t kFlightRecordCapacity = 2000;

// The rank, process and group that wrote a record.
struct FlightIdentity {
  std::string group;
  std::string host;
  int32_t rank = 0;
  int32_t world_size = 1;
  int32_t pid = 0;
  uint64_t round = 0;
  // The time at which the process started, in the kernel's ticks since the host's boot; 0 if it is
  // unknown.
  uint64_t process_start = 0;
  // The id of the group, which tells apart groups of equal names. If empty, the name is the id.
  std::string id = {};
  // The number of the fabric (Fabric::connection_number()), equal on all ranks that are connected
  // with each other; 0 if the rank is not connected.
  uint64_t connection = 0;
  // The time at which the record was created, in seconds since 1970; 0 if it is not known.
  int64_t made_at_s = 0;

  friend bool operator==(const FlightIdentity&, const FlightIdentity&) = default;
};

// One operation, as the parser has read it.
struct FlightEntry {
  uint64_t index = 0;  // the number of the operation among all operations of the rank, from 0
  uint64_t number = 0;
  Fingerprint fingerprint = {};
  int64_t begin_ns = 0;
  int64_t end_ns = 0;  // 0 if the operation was still running
  wire::ActivityState state = wire::ActivityState::kNothingYet;
  // The peer of a send or recv; for a failed collective, the peer for which the rank waited; else
  // -1.
  int32_t peer = -1;
  std::string phase;  // the phase in which the operation failed

  friend bool operator==(const FlightEntry&, const FlightEntry&) = default;
};

struct FlightRecord {
  FlightIdentity identity;
  std::vector<FlightEntry> entries;  // the entries, the oldest first
  // The last time at which the reader of the file found the writing process alive. It is not part
  // of the file.
  std::optional<TimePoint> alive_at = {};
};

// Parses the bytes of a record's file. Leaves out entries that were only partly written when the
// file was read.
CADRE_EXPORT Result<FlightRecord> parse_flight_record(ConstBytes file);
// Returns a JSON object {group, rank, ..., "operations": [{...}]}.
CADRE_EXPORT std::string to_json(const FlightRecord& record);

// The sizes, in bytes, of the header, of an entry, and of the texts in them. Longer texts are
// truncated. kFlightConnectionAt is the offset of the connection number in the header.
inline constexpr size_t kFlightHeaderBytes = 256;
inline constexpr size_t kFlightConnectionAt = 240;
inline constexpr size_t kFlightEntryBytes = 72;
inline constexpr size_t kFlightNameBytes = 64;
inline constexpr size_t kFlightPhaseBytes = 16;
std::vector<std::byte> encode_flight_header(const FlightIdentity& identity);

}  // namespace cadre
