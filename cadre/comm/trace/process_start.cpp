#include "cadre/comm/trace/process_start.h"

#include <sstream>
#include <string>

#include "cadre/base/format.h"
#include "cadre/os/host/host_info.h"
#include "cadre/os/io/file.h"

namespace cadre {
namespace {

constexpr size_t kMaxStatBytes = 4096;

}  // namespace

// /proc/PID/stat: "pid (name) state ppid ... starttime ...", which is field 22. The name may hold
// blanks and parentheses.
uint64_t process_start_of(int pid) {
  constexpr int kFieldsBetween = 18;  // from ppid on
  const auto text = os::read_file(format("/proc/{}/stat", pid), kMaxStatBytes);
  if (!text.ok()) return 0;
  const size_t name_end = text->rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text->substr(name_end + 1));
  std::string field;
  fields >> field;
  if (field == "Z" || field == "X") return 0;
  for (int i = 0; i < kFieldsBetween; ++i) fields >> field;
  uint64_t start = 0;
  fields >> start;
  return fields ? start : 0;
}

bool writer_lives(const FlightIdentity& writer) {
  if (writer.process_start == 0) return false;
  const std::string host = os::read_host_info().name.substr(0, kFlightNameBytes);
  return host == writer.host && process_start_of(writer.pid) == writer.process_start;
}

}  // namespace cadre
