#include "cadre/core/os/native/poll.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/io/handle_owner.h"
#include "cadre/core/os/native/monotonic_clock.h"

namespace cadre::os {
namespace {

constexpr size_t kInlineItems = 64;  // larger sets are rare and need an allocation

// A poll reports a closed descriptor at once; without this pause a loop around the poll would spin.
constexpr auto kPauseOfClosed = std::chrono::milliseconds(10);

// Returns the number of descriptors that are ready; 0 when the deadline, or kHandleLook, has
// passed. It polls at least once: with a deadline in the past it is a non-blocking check.
int poll_until(std::span<pollfd> fds, Deadline deadline) {
  // Does not read the clock for a deadline in the past: that would be a tenth of the cost of such a
  // poll.
  const bool is_over = deadline.at() <= TimePoint{};
  for (;;) {
    const Duration budget =
        is_over ? Duration{} : std::min(deadline.remaining(monotonic_now()), kHandleLook);
    const timespec time = to_timespec(budget);
    const int ready = ::ppoll(fds.data(), fds.size(), &time, nullptr);
    if (ready >= 0) return ready;
    if (errno != EINTR) throw errno_error(ErrorCode::kInternal, "poll", errno);
  }
}

bool has_ended(Deadline deadline) {
  return deadline.at() <= TimePoint{} || deadline.has_passed(monotonic_now());
}

// Reports descriptors that no longer belong to their targets as closed. Returns their number.
int mark_closed(std::span<const PollItem> items, std::span<pollfd> fds) {
  int num_closed = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    if (fds[i].fd < 0 || owns_handle(*items[i].target)) continue;
    fds[i].revents = POLLNVAL;
    ++num_closed;
  }
  return num_closed;
}

pollfd to_pollfd(const PollItem& item) {
  pollfd result{item.target->poll_handle(), 0, 0};
  if (item.want_read) result.events |= POLLIN;
  if (item.want_write) result.events |= POLLOUT;
  // The kernel reports errors even of items that want neither reading nor writing, but it skips
  // negative descriptor numbers.
  if (result.events == 0) result.fd = -1;
  return result;
}

}  // namespace

bool poll_items(std::span<PollItem> items, Deadline deadline) {
  std::array<pollfd, kInlineItems> few;
  std::vector<pollfd> many;
  std::span<pollfd> fds(few.data(), std::min(items.size(), few.size()));
  if (items.size() > few.size()) {
    many.resize(items.size());
    fds = many;
  }
  for (size_t i = 0; i < items.size(); ++i) fds[i] = to_pollfd(items[i]);
  int ready = poll_until(fds, deadline);
  while (ready == 0 && !has_ended(deadline)) {
    ready = mark_closed(items, fds);
    if (ready == 0) ready = poll_until(fds, deadline);
  }
  bool is_any_closed = false;
  for (size_t i = 0; i < items.size(); ++i) {
    const bool is_broken = (fds[i].revents & (POLLERR | POLLHUP | POLLNVAL)) != 0;
    is_any_closed = is_any_closed || (fds[i].revents & POLLNVAL) != 0;
    items[i].can_read = is_broken || (fds[i].revents & POLLIN) != 0;
    items[i].can_write = is_broken || (fds[i].revents & POLLOUT) != 0;
  }
  if (is_any_closed) std::this_thread::sleep_for(kPauseOfClosed);
  return ready > 0;
}

bool poll_one(int fd, short events, Deadline deadline) {
  pollfd item{fd, events, 0};
  int ready = poll_until(std::span(&item, 1), deadline);
  while (ready == 0 && !has_ended(deadline)) ready = poll_until(std::span(&item, 1), deadline);
  return ready > 0;
}

}  // namespace cadre::os
