// Fuzzes parse_flight_record() in two ways: with arbitrary bytes as a file, and with arbitrary
// bytes as the slots behind a valid header, where parsing must succeed. to_json() must accept every
// record that was parsed.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "cadre/core/fabric/flight/flight_record.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto input = std::as_bytes(std::span(data, size));
  const auto record = cadre::parse_flight_record(input);
  if (record.ok()) static_cast<void>(cadre::to_json(*record));

  const cadre::FlightIdentity identity{"world", "node0", 1, 2, 4711, 3};
  std::vector<std::byte> file = cadre::encode_flight_header(identity);
  file.resize(cadre::kFlightHeaderBytes + cadre::kFlightRecordCapacity * cadre::kFlightEntryBytes);
  const auto slots = std::span(file).subspan(cadre::kFlightHeaderBytes);
  std::ranges::copy(input.first(std::min(input.size(), slots.size())), slots.begin());
  const auto written = cadre::parse_flight_record(file);
  if (!written.ok() || written->identity != identity) std::abort();
  static_cast<void>(cadre::to_json(*written));
  return 0;
}
