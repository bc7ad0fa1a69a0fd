// The last operations of a rank, as they are read from the file of its flight recorder.
//
//   const cadre::ConstBytes
//       file;  // what a rank wrote to CommunicatorOptions::flight_record_path
//   const cadre::FlightRecord record = cadre::parse_flight_record(file).value_or_throw();
//   for (const cadre::FlightEntry& entry : record.entries) {
//     if (entry.end_ns == 0)
//       std::printf("operation %llu was running\n", (unsigned long long)entry.number);
//   }
//   std::printf("%s\n", cadre::to_json(record).c_str());
//
// Declares:
// - `FlightRecord`, `parse_flight_record()`, `to_json()`: a record, from the bytes of its file and
//   as JSON.
// - `FlightIdentity`: the rank, the process and the group that wrote it.
// - `FlightEntry`: one operation.
// - `encode_flight_header()`, `kFlightRecordCapacity`: the format of the file.
//
// Format: docs/formats/flight-record.md. Guide: docs/guide/running/my-run-hangs.md. PyTorch:
// TORCH_NCCL_TRACE_BUFFER_SIZE.
#pragma once

#include "cadre/core/fabric/flight/flight_record.h"
