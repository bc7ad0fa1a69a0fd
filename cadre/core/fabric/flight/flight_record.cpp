#include "cadre/core/fabric/flight/flight_record.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre {
namespace {

constexpr uint64_t kMagic = 0x3330544c46524443;  // "CDRFLT03"
// A valid record has fewer slots than this. Without a limit a damaged header could make a reader
// allocate any amount of memory.
constexpr uint32_t kMaxCapacity = 1 << 20;
constexpr int32_t kMaxWorldSize = 1 << 20;  // the limit of rendezvous/job_environment.cpp

void write_name(wire::ByteWriter& out, std::string_view name) {
  std::array<std::byte, kFlightNameBytes> field{};
  const std::string_view cut = name.substr(0, kFlightNameBytes);
  std::memcpy(field.data(), cut.data(), cut.size());
  out.raw(field);
}

// Makes the name printable, because a damaged or hostile file must not send control codes to the
// terminal that shows it.
template <size_t N>
std::string read_name(wire::ByteReader& in) {
  std::array<char, N> field{};
  in.raw(std::as_writable_bytes(std::span(field)));
  return printable(std::string(field.data(), std::find(field.begin(), field.end(), '\0')));
}

Error malformed(const std::string& what) {
  return Error(ErrorCode::kCorruption,
               format("the file is not a complete flight record of this version: {}", what));
}

// Returns false for a slot that is empty or only partly written.
bool parse_slot(ConstBytes bytes, FlightEntry& entry) {
  wire::ByteReader in(bytes);
  const auto stamp = in.integer<uint64_t>();
  entry.number = in.integer<uint64_t>();
  entry.fingerprint.call = in.integer<uint64_t>();
  entry.fingerprint.shape = in.integer<uint64_t>();
  entry.begin_ns = in.integer<int64_t>();
  entry.end_ns = in.integer<int64_t>();
  const auto state = in.integer<uint32_t>();
  entry.peer = in.integer<int32_t>();
  entry.phase = read_name<kFlightPhaseBytes>(in);
  if (stamp == 0 || state >= wire::kNumActivityStates) return false;
  // Times are measured from the boot of the host, so they are not negative.
  if (entry.begin_ns < 0 || entry.end_ns < 0) return false;
  entry.index = stamp - 1;
  entry.state = static_cast<wire::ActivityState>(state);
  return true;
}

std::string_view name_of(wire::ActivityState state) {
  constexpr std::array<std::string_view, wire::kNumActivityStates> kNames = {"nothing", "running",
                                                                             "done", "failed"};
  return kNames[static_cast<size_t>(state)];
}

}  // namespace

std::vector<std::byte> encode_flight_header(const FlightIdentity& identity) {
  wire::ByteWriter out;
  out.integer(kMagic);
  out.integer(kFlightRecordCapacity);
  out.integer(static_cast<uint32_t>(kFlightEntryBytes));
  out.integer(identity.rank);
  out.integer(identity.world_size);
  out.integer(identity.pid);
  out.integer(uint32_t{0});
  out.integer(identity.round);
  write_name(out, identity.host);
  write_name(out, identity.group);
  out.integer(identity.process_start);
  write_name(out, identity.id);
  out.integer(identity.connection);
  out.integer(identity.made_at_s);
  return out.take();
}

Result<FlightRecord> parse_flight_record(ConstBytes file) {
  if (file.size() < kFlightHeaderBytes) return malformed(format("{} bytes", file.size()));
  wire::ByteReader in(file.first(kFlightHeaderBytes));
  if (in.integer<uint64_t>() != kMagic) return malformed("its first 8 bytes are not CDRFLT03");
  const auto capacity = in.integer<uint32_t>();
  const auto slot_bytes = in.integer<uint32_t>();
  if (slot_bytes != kFlightEntryBytes || capacity > kMaxCapacity ||
      file.size() != kFlightHeaderBytes + capacity * kFlightEntryBytes) {
    return malformed(
        format("{} slots of {} bytes in a file of {} bytes", capacity, slot_bytes, file.size()));
  }
  FlightRecord record;
  record.identity.rank = in.integer<int32_t>();
  record.identity.world_size = in.integer<int32_t>();
  const FlightIdentity& who = record.identity;
  if (who.world_size < 1 || who.world_size > kMaxWorldSize || who.rank < 0 ||
      who.rank >= who.world_size) {
    return malformed(format("rank {} in a world of {}", who.rank, who.world_size));
  }
  record.identity.pid = in.integer<int32_t>();
  static_cast<void>(in.integer<uint32_t>());
  record.identity.round = in.integer<uint64_t>();
  record.identity.host = read_name<kFlightNameBytes>(in);
  record.identity.group = read_name<kFlightNameBytes>(in);
  record.identity.process_start = in.integer<uint64_t>();
  record.identity.id = read_name<kFlightNameBytes>(in);
  record.identity.connection = in.integer<uint64_t>();
  record.identity.made_at_s = in.integer<int64_t>();
  for (size_t i = 0; i < capacity; ++i) {
    FlightEntry entry;
    if (parse_slot(file.subspan(kFlightHeaderBytes + i * kFlightEntryBytes, kFlightEntryBytes),
                   entry)) {
      record.entries.push_back(std::move(entry));
    }
  }
  std::sort(record.entries.begin(), record.entries.end(),
            [](const FlightEntry& a, const FlightEntry& b) { return a.index < b.index; });
  return record;
}

std::string to_json(const FlightRecord& record) {
  const FlightIdentity& who = record.identity;
  nlohmann::ordered_json json = {{"group", who.group}, {"round", who.round},
                                 {"rank", who.rank},   {"world_size", who.world_size},
                                 {"host", who.host},   {"pid", who.pid}};
  if (!who.id.empty()) json["id"] = who.id;
  nlohmann::ordered_json operations = nlohmann::ordered_json::array();
  for (const FlightEntry& entry : record.entries) {
    const OpDescriptor descriptor = OpDescriptor::from_fingerprint(entry.fingerprint);
    nlohmann::ordered_json operation = {{"index", entry.index},
                                        {"number", entry.number},
                                        {"kind", std::string(to_string(descriptor.kind))},
                                        {"call", descriptor.to_string()},
                                        {"state", std::string(name_of(entry.state))},
                                        {"begin_ns", entry.begin_ns}};
    if (entry.end_ns != 0) operation["end_ns"] = entry.end_ns;
    if (entry.peer >= 0) operation["peer"] = entry.peer;
    if (!entry.phase.empty()) operation["phase"] = entry.phase;
    operations.push_back(std::move(operation));
  }
  json["operations"] = std::move(operations);
  // The names come from a file that may be damaged, so bytes that are not UTF-8 are replaced. By
  // default dump() would throw.
  return json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace cadre
