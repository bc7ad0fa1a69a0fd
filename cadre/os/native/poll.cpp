#include "cadre/os/native/poll.h"

#include <array>
#include <cerrno>
#include <vector>

#include "cadre/os/io/errno_error.h"
#include "cadre/os/native/monotonic_clock.h"

namespace cadre::os {
namespace {

constexpr size_t kInlineItems = 64;  // larger sets are rare and pay an allocation

// The number of descriptors that are ready; 0 at the deadline. It looks at least once, so that a
// deadline in the past is a test without waiting.
int poll_until(std::span<pollfd> fds, Deadline deadline) {
  // Skips the clock for a deadline in the past: reading it is a tenth of the cost of such a poll.
  const bool is_over = deadline.at() <= TimePoint{};
  for (;;) {
    const timespec budget = is_over ? timespec{} : to_timespec(deadline.remaining(monotonic_now()));
    const int ready = ::ppoll(fds.data(), fds.size(), &budget, nullptr);
    if (ready >= 0) return ready;
    if (errno != EINTR) throw errno_error(ErrorCode::kInternal, "poll", errno);
  }
}

pollfd to_pollfd(const PollItem& item) {
  pollfd result{item.target->poll_handle(), 0, 0};
  if (item.want_read) result.events |= POLLIN;
  if (item.want_write) result.events |= POLLOUT;
  // The kernel reports errors even of those that want nothing; a negative number is passed over.
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
  const int ready = poll_until(fds, deadline);
  for (size_t i = 0; i < items.size(); ++i) {
    const bool is_broken = (fds[i].revents & (POLLERR | POLLHUP | POLLNVAL)) != 0;
    items[i].can_read = is_broken || (fds[i].revents & POLLIN) != 0;
    items[i].can_write = is_broken || (fds[i].revents & POLLOUT) != 0;
  }
  return ready > 0;
}

bool poll_one(int fd, short events, Deadline deadline) {
  pollfd item{fd, events, 0};
  return poll_until(std::span(&item, 1), deadline) > 0;
}

}  // namespace cadre::os
