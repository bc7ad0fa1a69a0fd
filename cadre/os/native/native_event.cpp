#include "cadre/os/native/native_event.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>

#include "cadre/os/io/errno_error.h"

namespace cadre::os {

NativeEvent::NativeEvent() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!fd_.is_open()) throw errno_error(ErrorCode::kUnavailable, "eventfd", errno);
}

void NativeEvent::notify() {
  const uint64_t one = 1;
  // EAGAIN means that the counter is full: then it is readable already.
  while (::write(fd_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void NativeEvent::clear() {
  uint64_t count = 0;
  // EAGAIN means that there was nothing to clear.
  while (::read(fd_.get(), &count, sizeof(count)) < 0 && errno == EINTR) {
  }
}

}  // namespace cadre::os
