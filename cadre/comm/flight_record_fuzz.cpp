// Fuzzes the reader of flight records: any file is read or refused, what was read can be told, and
// the rank that it names is read back from a header written for it.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "cadre/comm/flight_record.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto record = cadre::parse_flight_record({reinterpret_cast<const std::byte*>(data), size});
  if (!record.ok()) return 0;
  static_cast<void>(cadre::to_json(*record));
  const std::vector<std::byte> header = cadre::encode_flight_header(record->identity);
  std::vector<std::byte> unused(cadre::kFlightHeaderBytes +
                                cadre::kFlightRecordCapacity * cadre::kFlightEntryBytes);
  std::ranges::copy(header, unused.begin());
  const auto again = cadre::parse_flight_record(unused);
  if (!again.ok() || again->identity != record->identity || !again->entries.empty()) std::abort();
  return 0;
}
