#include "cadre/core/os/native/process_watch.h"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/io/handle_owner.h"

namespace cadre::os {
namespace {

class ProcessWatch final : public Pollable, public HandleOwner {
 public:
  explicit ProcessWatch(Fd pidfd) : pidfd_(std::move(pidfd)) {}
  int poll_handle() const override { return pidfd_.get(); }
  bool owns_handle() const override { return pidfd_.is_own(); }

 private:
  Fd pidfd_;
};

}  // namespace

uint64_t read_pid_namespace() {
  struct stat info {};
  return ::stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

std::unique_ptr<Pollable> open_process_watch(int pid) {
  Fd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!pidfd.is_open()) return nullptr;
  return std::make_unique<ProcessWatch>(std::move(pidfd));
}

}  // namespace cadre::os
