#include "cadre/core/fabric/flight/process_start.h"

#include <string>

#include "cadre/core/os/host/host_info.h"
#include "cadre/core/os/host/process_stat.h"

namespace cadre {

uint64_t process_start_of(int pid) {
  const auto stat = os::read_process_stat(pid);
  return stat && !stat->has_ended ? stat->start_time : 0;
}

bool writer_lives(const FlightIdentity& writer) {
  if (writer.process_start == 0) return false;
  const std::string host = os::read_host_info().name.substr(0, kFlightNameBytes);
  return host == writer.host && process_start_of(writer.pid) == writer.process_start;
}

}  // namespace cadre
