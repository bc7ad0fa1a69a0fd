#include "cadre/core/comm/group_destruction.h"

#include <exception>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/os/native/native_thread.h"

namespace cadre {

bool must_end_elsewhere(const Communicator& group) {
  return CommunicatorParts::must_end_elsewhere(group);
}

void destroy_in_other_thread(std::function<void()> destroy,
                             const std::shared_ptr<LogSink>& log) noexcept {
  try {
    os::run_detached("cadre-closer", std::move(destroy));
  } catch (const std::exception& thrown) {
    if (log == nullptr) return;
    try {
      log->write(LogLevel::kError, "comm",
                 format("a group stays until this process ends: its last handle was dropped in a "
                        "thread that must not wait for the group, and no other thread could be "
                        "started to destroy it: {}",
                        thrown.what()));
    } catch (...) {
      // There is not enough memory for the log line.
    }
  }
}

}  // namespace cadre
