#include "cadre/core/os/io/poll_set.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/io/handle_owner.h"

namespace cadre::os {
namespace {

constexpr int kMaxEventsPerWait = 256;

bool wants_something(const PollItem& item) {
  return item.want_read || item.want_write;
}

}  // namespace

// Does nothing for a descriptor that was closed from outside (fd.h): the kernel has removed it from
// the epoll set, and the number may belong to a file of the program. wait() reports its object as
// ready.
void PollSet::change_in_kernel(int operation, uint64_t key, const PollItem& item) {
  if (!epoll_.is_own() || !owns_handle(*item.target)) return;
  epoll_event event{};
  if (item.want_read) event.events |= EPOLLIN;
  if (item.want_write) event.events |= EPOLLOUT;
  event.data.u64 = key;
  if (::epoll_ctl(epoll_.get(), operation, item.target->poll_handle(), &event) != 0) {
    throw errno_error(ErrorCode::kInternal, "epoll_ctl", errno);
  }
}

void PollSet::watch(uint64_t key, const PollItem& item) {
  Watched& watched = watched_[key];
  const bool has_handle = item.target->poll_handle() >= 0;
  if (has_handle && !epoll_.is_open()) {
    epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
    if (!epoll_.is_open()) throw errno_error(ErrorCode::kInternal, "epoll_create1", errno);
  }
  if (has_handle) {
    const bool wants = wants_something(item);
    const bool is_changed =
        watched.item.want_read != item.want_read || watched.item.want_write != item.want_write;
    if (wants && !watched.is_in_kernel) change_in_kernel(EPOLL_CTL_ADD, key, item);
    if (wants && watched.is_in_kernel && is_changed) change_in_kernel(EPOLL_CTL_MOD, key, item);
    // The kernel would report errors also of an item that wants neither reading nor writing, so
    // such an item is removed.
    if (!wants && watched.is_in_kernel) change_in_kernel(EPOLL_CTL_DEL, key, item);
    watched.is_in_kernel = wants;
  }
  watched.item = item;
}

void PollSet::forget(uint64_t key) {
  const auto found = watched_.find(key);
  if (found == watched_.end()) return;
  if (found->second.is_in_kernel) change_in_kernel(EPOLL_CTL_DEL, key, found->second.item);
  watched_.erase(found);
}

std::span<const PollSet::Ready> PollSet::wait(Deadline deadline) {
  ready_.clear();
  if (epoll_.is_open() && epoll_.is_own()) {
    wait_in_kernel(deadline);
  } else {
    wait_through_system(deadline);
  }
  return ready_;
}

void PollSet::wait_in_kernel(Deadline deadline) {
  std::array<epoll_event, kMaxEventsPerWait> events;
  while (true) {
    const Duration budget = std::min(deadline.remaining(system_.now()), kHandleLook);
    // The time is rounded up, because after a wait that ends too early the caller would wait again
    // at once, and spin.
    const auto budget_ms = std::chrono::ceil<std::chrono::milliseconds>(budget).count();
    const int num_ready =
        ::epoll_wait(epoll_.get(), events.data(), kMaxEventsPerWait, static_cast<int>(budget_ms));
    if (num_ready < 0 && errno == EINTR) continue;
    if (num_ready < 0) throw errno_error(ErrorCode::kInternal, "epoll_wait", errno);
    for (int i = 0; i < num_ready; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      const bool is_broken = (event.events & (EPOLLERR | EPOLLHUP)) != 0;
      ready_.push_back({event.data.u64, is_broken || (event.events & EPOLLIN) != 0,
                        is_broken || (event.events & EPOLLOUT) != 0});
    }
    if (num_ready == 0) add_closed();
    if (!ready_.empty() || deadline.has_passed(system_.now())) return;
  }
}

void PollSet::add_closed() {
  for (const auto& [key, watched] : watched_) {
    if (watched.is_in_kernel && !owns_handle(*watched.item.target)) {
      ready_.push_back({key, true, true});
    }
  }
}

void PollSet::wait_through_system(Deadline deadline) {
  std::vector<uint64_t> keys;
  for (const auto& [key, watched] : watched_) keys.push_back(key);
  std::sort(keys.begin(), keys.end());  // a simulation needs the same order in each run
  std::vector<PollItem> items;
  for (const uint64_t key : keys) items.push_back(watched_.at(key).item);
  system_.poll(items, deadline);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (items[i].can_read || items[i].can_write) {
      ready_.push_back({keys[i], items[i].can_read, items[i].can_write});
    }
  }
}

}  // namespace cadre::os
