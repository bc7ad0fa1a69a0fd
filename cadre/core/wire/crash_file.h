// The file that a crashing process leaves: the signal, the addresses of its calls, and what is
// mapped at which address. Another process finds functions, files and lines from it.
//
// Threads: pure functions. Blocking: never. Errors: kCorruption with the number of the line.
// Format: docs/formats/crash-file.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"

namespace cadre {

struct CrashFrame {
  uint64_t address = 0;
  // True for the instruction that was executed when the signal arrived. False for a return address,
  // which follows the instruction of the call.
  bool is_exact = false;

  friend bool operator==(const CrashFrame&, const CrashFrame&) = default;
};

struct CrashFile {
  int signal = 0;
  int code = 0;          // siginfo_t::si_code
  uint64_t address = 0;  // siginfo_t::si_addr, the faulting address; 0 for a signal that was sent
  int process = 0;
  int thread = 0;
  int64_t time_ms = 0;             // milliseconds since 1970
  std::string maps;                // /proc/self/maps
  std::vector<CrashFrame> frames;  // innermost first
  bool is_complete = false;        // false: the process died while it wrote the file

  friend bool operator==(const CrashFile&, const CrashFile&) = default;
};

inline constexpr size_t kMaxCrashFrames = 64;  // the innermost ones are kept
inline constexpr size_t kMaxMapsBytes = 4 << 20;
inline constexpr size_t kMaxCrashFileBytes = kMaxMapsBytes + (64 << 10);
inline constexpr std::string_view kCrashFileBegin = "cadre-crash 1\n";
inline constexpr std::string_view kCrashFileSuffix =
    ".crash";  // appended to the name of the error file

Result<CrashFile> parse_crash_file(std::string_view text);

struct MappedCode {
  std::string_view path;
  uint64_t offset = 0;  // relative to the first mapping of the file
};

// Finds the file that is mapped at the address. Allocates nothing, so a signal handler may call it.
std::optional<MappedCode> find_mapped_code(std::string_view maps, uint64_t address) noexcept;

}  // namespace cadre
