// The text of a tuning file: the sizes at which operations change their algorithms, and the hosts
// on which they were measured.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument with the line, the key and
// what was expected. Format: docs/formats/tuning-file.md, a subset of TOML.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/collective/net/chooser.h"

namespace cadre {

inline constexpr size_t kMaxTuningFileBytes = 64 << 10;

// The group on which the sizes of a tuning file were measured. No text has control characters,
// quotation marks or backslashes, and each has 1 to 256 bytes.
struct TuningOrigin {
  std::string engine;   // Capabilities::name
  std::string hosts;    // hosts_text()
  std::string date;     // such as "2026-11-28"
  std::string version;  // that of Cadre

  friend bool operator==(const TuningOrigin&, const TuningOrigin&) = default;
};

struct TuningFile {
  CrossoverTable table = {};
  std::optional<TuningOrigin> measured = {};  // nullopt for a file that was written by hand

  friend bool operator==(const TuningFile&, const TuningFile&) = default;
};

std::string to_text(const TuningFile& file);
Result<TuningFile> parse_tuning_file(std::string_view text);

// Returns the numbers of ranks of the hosts, in descending order: "2x4" for two hosts with 4 ranks
// each, "2x4,1x3" if another one has 3. host_of_rank[r] identifies the host of rank r.
std::string hosts_text(std::span<const int> host_of_rank);

}  // namespace cadre
