// The last operations of a rank, in a ring that survives kill -9 when it lies in a mapped file.
//
// Threads: begin(), end() and read() from any thread.
// Blocking: create() while the file system works; begin() and end() never, as they only store a few
// words.
// Lifetime: owns its memory; a file stays when the process ends.
// Errors: create() fails like os::MappedFile::create().
// Format: docs/formats/flight-record.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/fabric/flight/flight_record.h"
#include "cadre/core/os/files/mapped_file.h"

namespace cadre {

class FlightRecorder {
 public:
  // Records in a mapped file of the record's size, or in memory if `file` is nullopt.
  FlightRecorder(std::optional<os::MappedFile> file, const FlightIdentity& identity);
  // Records in the file `path`, or in memory if `path` is empty.
  static Result<std::unique_ptr<FlightRecorder>> create(const std::string& path,
                                                        const FlightIdentity& identity);

  // Returns the index to pass to end().
  uint64_t begin(uint64_t number, const Fingerprint& fingerprint, int peer, TimePoint now);
  struct Ending {
    bool well = true;
    int waiting_for = -1;
    const char* phase = "";
    TimePoint now;
  };
  void end(uint64_t index, const Ending& ending);

  // Sets the number of the fabric (Fabric::connection_number()) to which the record belongs. All
  // ranks of the group set the same number.
  void set_connection(uint64_t connection);
  // Marks the record as that of a closed group, which will record no further operation.
  void set_closed();
  // Returns whether set_closed() has marked the record. REQUIRES: parse_flight_record() has
  // accepted the bytes.
  static bool is_closed(ConstBytes file);
  bool has_file() const { return file_.has_value(); }
  FlightRecord read() const;

 private:
  struct Slot;

  Slot& slot(uint64_t index) const;

  std::optional<os::MappedFile> file_;
  std::vector<uint64_t> memory_;
  Bytes bytes_;
  std::atomic<uint64_t> num_begun_{0};
};

}  // namespace cadre
