// The file in which a rank tells its launcher how far it is in leaving a job that must end: it has
// asked whether it must leave, or it has saved a step and leaves.
//
// Threads: pure functions. Blocking: never. Errors: a text in another format gives nullopt.
// Format: docs/formats/preemption-file.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/core/base/export.h"

namespace cadre {

struct PreemptionFile {
  std::optional<int64_t> saved_step;  // nullopt: the rank has asked, and has not saved yet
  int exit_code = 0;                  // the code with which the rank leaves after it has saved

  friend bool operator==(const PreemptionFile&, const PreemptionFile&) = default;
};

inline constexpr size_t kMaxPreemptionFileBytes = 128;
inline constexpr std::string_view kPreemptionFileSuffix =
    ".preemption";  // appended to the name of the error file

CADRE_EXPORT std::string encode_preemption_file(const PreemptionFile& file);
std::optional<PreemptionFile> parse_preemption_file(std::string_view text);

}  // namespace cadre
