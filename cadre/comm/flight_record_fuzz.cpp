// Fuzzes the reader of flight records: any file is read or refused, and what was read can be told.
#include <cstdint>

#include "cadre/comm/flight_record.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto record = cadre::parse_flight_record({reinterpret_cast<const std::byte*>(data), size});
  if (record.ok()) static_cast<void>(cadre::to_json(*record));
  return 0;
}
