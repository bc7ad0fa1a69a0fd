#include "cadre/comm/bootstrap/host_group.h"

#include <algorithm>
#include <array>
#include <functional>
#include <span>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/comm/bootstrap/callers.h"
#include "cadre/os/process_watcher.h"
#include "cadre/os/shared_pages.h"

namespace cadre {
namespace {

constexpr std::string_view kConnected = "connected";
constexpr std::byte kNo{0};
constexpr std::byte kYes{1};

std::string side_key(const HostGroup::Site& site, int rank) {
  return format("{}side/{}", site.key_prefix, rank);
}

uint64_t pid_namespace_of(os::System& system) {
  auto* watcher = dynamic_cast<os::ProcessWatcher*>(&system);
  return watcher == nullptr ? 0 : watcher->pid_namespace();
}

// How one wait of a host group polls.
using Poll = std::function<Result<bool>(os::PollItem)>;

// While the group connects: trouble that others report ends the wait.
Poll watched(const HostGroup::Site& site, Deadline deadline) {
  return [&site, deadline](os::PollItem item) {
    return site.watch.poll(std::span(&item, 1), deadline);
  };
}

// Later: the group's interrupt does.
Poll interruptible(os::System& system, const os::Interrupt* interrupt, Deadline deadline) {
  return [&system, interrupt, deadline](os::PollItem item) -> Result<bool> {
    if (interrupt != nullptr && interrupt->is_raised()) {
      return Error(ErrorCode::kAborted, "the group was aborted");
    }
    std::array<os::PollItem, 2> items = {item, {}};
    size_t num_items = 1;
    if (interrupt != nullptr)
      items[num_items++] = {.target = &interrupt->event(), .want_read = true};
    return system.poll(std::span(items).first(num_items), deadline);
  };
}

// What a rank of this host is waited for.
struct Awaited {
  int rank;
  std::string what;
};

// Calls `attempt` (a Result that is empty or false while it would block) until it has a value.
template <typename Attempt>
auto retry(const Poll& poll, os::PollItem item, const Awaited& awaited, Attempt attempt)
    -> decltype(attempt()) {
  while (true) {
    auto result = attempt();
    if (!result.ok()) return result.error().with_context(awaited.what).with_culprit(awaited.rank);
    if (*result) return result;
    const Result<bool> is_ready = poll(item);
    if (!is_ready.ok()) return is_ready.error();
    if (!*is_ready) {
      return Error(ErrorCode::kTimeout, format("the deadline passed while {}", awaited.what))
          .with_culprit(awaited.rank);
    }
  }
}

Status send_byte(const Poll& poll, os::Socket& socket, std::byte value, const Awaited& awaited) {
  const auto sent = retry(poll, {.target = &socket, .want_write = true}, awaited,
                          [&] { return socket.try_send(ConstBytes(&value, 1)); });
  return sent.ok() ? Status() : Status(sent.error());
}

Result<std::byte> receive_byte(const Poll& poll, os::Socket& socket, const Awaited& awaited) {
  std::byte value{};
  const auto received = retry(poll, {.target = &socket, .want_read = true}, awaited,
                              [&] { return socket.try_recv(Bytes(&value, 1)); });
  if (!received.ok()) return received.error();
  return value;
}

// Runs one handshake to its end.
Status finish(const Poll& poll, Handshake& handshake, int rank) {
  while (true) {
    if (const Status status = handshake.step(); !status.ok()) {
      return status.error()
          .with_context(format("in the handshake with rank {}", rank))
          .with_culprit(rank);
    }
    if (handshake.is_done()) return {};
    const Result<bool> is_ready = poll(handshake.interest());
    if (!is_ready.ok()) return is_ready.error();
    if (!*is_ready) {
      return Error(ErrorCode::kTimeout,
                   format("the deadline passed in the handshake with rank {}", rank))
          .with_culprit(rank);
    }
  }
}

}  // namespace

Result<HostGroup> HostGroup::form(const Site& site, Deadline deadline) {
  const Rank rank = site.terms.rank;
  HostGroup group(rank);
  const std::string& boot_id = site.cards[static_cast<size_t>(rank.value)].boot_id;
  for (size_t i = 0; i < site.cards.size(); ++i) {
    if (site.cards[i].boot_id == boot_id) group.members_.push_back(static_cast<int>(i));
  }
  if (group.members_.size() == 1) {
    group.obstacle_ = format("rank {} is alone on its host", rank);
    return group;
  }
  CADRE_RETURN_IF_ERROR(group.connect_star(site, deadline));
  CADRE_RETURN_IF_ERROR(group.probe(site, deadline));
  return group;
}

// A member says in the store whether it reached the leader, so that the leader knows whom to await.
Status HostGroup::connect_star(const Site& site, Deadline deadline) {
  const int leader = members_.front();
  if (is_leader()) {
    std::vector<bool> comes = {false};
    for (size_t i = 1; i < members_.size(); ++i) {
      const std::string key = side_key(site, members_[i]);
      const auto report = site.watch.multi_get(std::span(&key, 1), deadline);
      if (!report.ok()) {
        return report.error()
            .with_context(format("waiting for rank {} of this host", members_[i]))
            .with_culprit(members_[i]);
      }
      comes.push_back(report->front() == kConnected);
    }
    side_.resize(members_.size());
    return accept_members(site, comes, deadline);
  }
  const auto address = os::Address::parse(site.cards[static_cast<size_t>(leader)].unix_address);
  if (!address.ok()) return address.error();
  auto socket = site.system.connect(*address, deadline);
  CADRE_RETURN_IF_ERROR(site.store.set(side_key(site, rank_.value),
                                       socket.ok() ? kConnected : "unreachable", deadline));
  if (!socket.ok()) {
    obstacle_ = socket.error().message();
    return {};
  }
  while (true) {
    Handshake handshake = Handshake::call(site.system, std::move(socket).value(), site.terms,
                                          leader, wire::LinkPurpose::kSide);
    const Status status = finish(watched(site, deadline), handshake, leader);
    if (status.ok()) {
      side_.push_back(handshake.take());
      return {};
    }
    // The leader drops a connection whose handshake takes too long: on a busy host ours may.
    if (status.error().code() != ErrorCode::kPeerLost || deadline.has_passed(site.system.now())) {
      return status.error();
    }
    socket = site.system.connect(*address, deadline);
    if (!socket.ok()) return status.error();
  }
}

Status HostGroup::accept_members(const Site& site, const std::vector<bool>& comes,
                                 Deadline deadline) {
  const auto missing = [&]() -> int {
    for (size_t i = 1; i < members_.size(); ++i) {
      if (comes[i] && side_[i] == nullptr) return members_[i];
    }
    return -1;
  };
  Callers callers(site.system, site.terms, {&site.unix_listener}, members_.size());
  while (missing() >= 0) {
    for (Handshake& handshake : callers.advance()) place(handshake);
    const int awaited = missing();
    if (awaited < 0) break;
    if (deadline.has_passed(site.system.now())) {
      return Error(ErrorCode::kTimeout,
                   format("the deadline passed while waiting for the unix connection of rank {}{}",
                          awaited, callers.accept_failure()))
          .with_culprit(awaited);
    }
    std::vector<os::PollItem> items;
    callers.add_interests(items);
    CADRE_RETURN_IF_ERROR(site.watch.poll(items, callers.next_deadline(deadline)));
  }
  obstacle_.clear();
  for (size_t i = 1; i < members_.size(); ++i) {
    if (!comes[i]) obstacle_ = format("rank {} cannot reach rank {}", members_[i], rank_);
  }
  return {};
}

void HostGroup::place(Handshake& handshake) {
  const auto at = std::find(members_.begin(), members_.end(), handshake.hello().from);
  if (handshake.hello().purpose != wire::LinkPurpose::kSide || at == members_.end()) return;
  side_[static_cast<size_t>(at - members_.begin())] = handshake.take();
}

Status HostGroup::probe(const Site& site, Deadline deadline) {
  return is_leader() ? probe_as_leader(site, obstacle_.empty(), deadline)
                     : probe_as_member(site, deadline);
}

// The leader hands out the status page; each member writes its stamp there; the leader looks at
// all stamps and tells its verdict.
Status HostGroup::probe_as_leader(const Site& site, bool all_came, Deadline deadline) {
  const int num_slots = static_cast<int>(members_.size());
  const Poll poll = watched(site, deadline);
  auto segment = site.system.create_segment(StatusPage::bytes_for(num_slots));
  if (!segment.ok()) return segment.error();
  CADRE_RETURN_IF_ERROR(os::reserve_pages(**segment, 0, (*segment)->bytes().size()));
  StatusPage page(std::move(segment).value(), num_slots);
  page.slot(0).pid_namespace.store(pid_namespace_of(site.system), std::memory_order_relaxed);
  page.slot(0).stamp.store(site.cards[static_cast<size_t>(rank_.value)].probe,
                           std::memory_order_release);
  bool verdict = all_came;
  for (size_t i = 1; i < members_.size(); ++i) {
    if (side_[i] == nullptr) continue;
    const Awaited mapping{members_[i], format("rank {} maps shared memory", members_[i])};
    const auto sent = retry(poll, {.target = side_[i].get(), .want_write = true}, mapping,
                            [&] { return side_[i]->try_send_segment(page.segment()); });
    if (!sent.ok()) return sent.error();
    const auto reply = receive_byte(poll, *side_[i], mapping);
    if (!reply.ok()) return reply.error();
    const uint64_t expected = site.cards[static_cast<size_t>(members_[i])].probe;
    const uint64_t stamp = page.slot(static_cast<int>(i)).stamp.load(std::memory_order_acquire);
    if (*reply != kYes || stamp != expected) {
      verdict = false;
      obstacle_ = format("rank {} cannot map memory of rank {}", members_[i], rank_);
    }
  }
  for (size_t i = 1; i < members_.size(); ++i) {
    if (side_[i] == nullptr) continue;
    CADRE_RETURN_IF_ERROR(
        send_byte(poll, *side_[i], verdict ? kYes : kNo,
                  {members_[i], format("telling rank {} the verdict", members_[i])}));
  }
  if (verdict) page_ = page;
  shares_memory_ = verdict;
  return {};
}

Status HostGroup::probe_as_member(const Site& site, Deadline deadline) {
  if (side_.empty()) return {};
  const int leader = members_.front();
  const Poll poll = watched(site, deadline);
  const int num_slots = static_cast<int>(members_.size());
  const int own_slot = slot_of(rank_);
  const Awaited memory{leader, format("waiting for the shared memory of rank {}", leader)};
  auto segment = retry(poll, {.target = side_[0].get(), .want_read = true}, memory,
                       [&] { return side_[0]->try_recv_segment(); });
  if (!segment.ok() && segment.error().code() == ErrorCode::kTimeout) return segment.error();
  bool is_mapped = false;
  if (segment.ok() && (*segment)->bytes().size() >= StatusPage::bytes_for(num_slots)) {
    StatusPage page(std::move(segment).value(), num_slots);
    const auto& cards = site.cards;
    is_mapped = page.slot(0).stamp.load(std::memory_order_acquire) ==
                cards[static_cast<size_t>(leader)].probe;
    page.slot(own_slot).pid_namespace.store(pid_namespace_of(site.system),
                                            std::memory_order_relaxed);
    page.slot(own_slot).stamp.store(cards[static_cast<size_t>(rank_.value)].probe,
                                    std::memory_order_release);
    page_ = page;
  }
  CADRE_RETURN_IF_ERROR(send_byte(poll, *side_[0], is_mapped ? kYes : kNo, memory));
  const auto verdict = receive_byte(poll, *side_[0], memory);
  if (!verdict.ok()) return verdict.error();
  shares_memory_ = *verdict == kYes;
  if (!shares_memory_) {
    page_ = StatusPage();
    obstacle_ = format("not all ranks of this host can map memory of rank {}", leader);
  }
  return {};
}

int HostGroup::slot_of(Rank rank) const {
  const auto at = std::find(members_.begin(), members_.end(), rank.value);
  return at == members_.end() ? -1 : static_cast<int>(at - members_.begin());
}

Result<std::shared_ptr<os::SharedMemory>> HostGroup::share_segment(os::System& system,
                                                                   size_t num_bytes,
                                                                   const os::Interrupt* interrupt,
                                                                   Deadline deadline) {
  const Poll poll = interruptible(system, interrupt, deadline);
  if (!is_leader()) {
    const Awaited handing{members_.front(), format("waiting for a segment of {} bytes from rank {}",
                                                   num_bytes, members_.front())};
    auto segment = retry(poll, {.target = side_[0].get(), .want_read = true}, handing,
                         [&] { return side_[0]->try_recv_segment(); });
    if (!segment.ok()) return segment.error();
    if ((*segment)->bytes().size() < num_bytes) {
      return Error(ErrorCode::kInternal,
                   format("{}: it has only {} bytes", handing.what, (*segment)->bytes().size()));
    }
    return std::shared_ptr<os::SharedMemory>(std::move(segment).value());
  }
  auto created = system.create_segment(num_bytes);
  if (!created.ok()) return created.error();
  std::shared_ptr<os::SharedMemory> segment(std::move(created).value());
  for (size_t i = 1; i < members_.size(); ++i) {
    const auto sent = retry(poll, {.target = side_[i].get(), .want_write = true},
                            {members_[i], format("handing a segment to rank {}", members_[i])},
                            [&] { return side_[i]->try_send_segment(*segment); });
    if (!sent.ok()) return sent.error();
  }
  return segment;
}

}  // namespace cadre
