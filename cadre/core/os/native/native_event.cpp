#include "cadre/core/os/native/native_event.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <thread>

#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {
namespace {

// A poll reports an event whose descriptor was closed as ready at once, so its loop would spin.
constexpr auto kPauseOfClosed = std::chrono::milliseconds(10);

}  // namespace

NativeEvent::NativeEvent() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!fd_.is_open()) throw errno_error(ErrorCode::kUnavailable, "eventfd", errno);
}

void NativeEvent::notify() {
  if (!fd_.is_own()) return;  // the number may belong to a file of the program
  const uint64_t one = 1;
  // EAGAIN means that the counter is full: then the event is readable already.
  while (::write(fd_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void NativeEvent::clear() {
  if (!fd_.is_own()) return std::this_thread::sleep_for(kPauseOfClosed);
  uint64_t count = 0;
  // EAGAIN means that there was nothing to clear.
  while (::read(fd_.get(), &count, sizeof(count)) < 0 && errno == EINTR) {
  }
}

}  // namespace cadre::os
