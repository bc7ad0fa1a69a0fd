#include "cadre/core/os/host/fork_mark.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {
namespace {

size_t page_bytes() {
  return static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace

ForkMark::ForkMark() {
  void* page =
      ::mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) throw errno_error(ErrorCode::kUnavailable, "map a page", errno);
  // A kernel without MADV_WIPEONFORK does not zero the page, so is_in_child() returns false in
  // children.
  ::madvise(page, page_bytes(), MADV_WIPEONFORK);
  word_ = std::construct_at(static_cast<std::atomic<uint32_t>*>(page), 1U);
}

ForkMark::~ForkMark() {
  ::munmap(word_, page_bytes());
}

}  // namespace cadre::os
