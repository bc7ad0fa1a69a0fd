#include "cadre/core/fabric/status_page.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/op.h"

namespace cadre {

static_assert(std::atomic<uint64_t>::is_always_lock_free, "cells are shared between processes");

void ActivityCell::begin(uint64_t op_number, const Fingerprint& fingerprint, TimePoint now) {
  number.store(op_number, std::memory_order_relaxed);
  call.store(fingerprint.call, std::memory_order_relaxed);
  shape.store(fingerprint.shape, std::memory_order_relaxed);
  since_ns.store(now.ns, std::memory_order_relaxed);
  state.store(static_cast<uint32_t>(wire::ActivityState::kRunning), std::memory_order_release);
}

void ActivityCell::end(bool well, TimePoint now) {
  // A failed activity keeps its start time, because peers report how long ago it began.
  if (well) since_ns.store(now.ns, std::memory_order_relaxed);
  state.store(
      static_cast<uint32_t>(well ? wire::ActivityState::kDone : wire::ActivityState::kFailed),
      std::memory_order_release);
}

void ActivityCell::clear() {
  state.store(0, std::memory_order_relaxed);
  number.store(0, std::memory_order_relaxed);
  call.store(0, std::memory_order_relaxed);
  shape.store(0, std::memory_order_relaxed);
  since_ns.store(0, std::memory_order_relaxed);
}

void ActivityCell::copy(const ActivityCell& other) {
  const auto assign = [](auto& to, const auto& from) {
    to.store(from.load(std::memory_order_acquire), std::memory_order_relaxed);
  };
  assign(number, other.number);
  assign(call, other.call);
  assign(shape, other.shape);
  assign(since_ns, other.since_ns);
  assign(state, other.state);
  assign(progress.waiting_for, other.progress.waiting_for);
  for (size_t i = 0; i < progress.phase.size(); ++i) {
    assign(progress.phase[i], other.progress.phase[i]);
  }
}

bool ActivityCell::is_running() const {
  return state.load(std::memory_order_acquire) ==
         static_cast<uint32_t>(wire::ActivityState::kRunning);
}

wire::Activity ActivityCell::read(TimePoint now) const {
  const uint32_t raw_state = state.load(std::memory_order_acquire);
  wire::Activity activity;
  // The value comes from another process: one that is out of range counts as "no operation yet".
  if (raw_state < wire::kNumActivityStates) {
    activity.state = static_cast<wire::ActivityState>(raw_state);
  }
  activity.number = number.load(std::memory_order_relaxed);
  activity.fingerprint = {call.load(std::memory_order_relaxed),
                          shape.load(std::memory_order_relaxed)};
  activity.waiting_for = progress.waiting_for.load(std::memory_order_relaxed);
  activity.age_ns = now.ns - since_ns.load(std::memory_order_relaxed);
  std::array<char, 17> text{};
  for (size_t i = 0; i < progress.phase.size(); ++i) {
    const uint64_t word = progress.phase[i].load(std::memory_order_relaxed);
    std::memcpy(text.data() + i * sizeof(word), &word, sizeof(word));
  }
  activity.phase = text.data();
  return activity;
}

// A failed operation is shown rather than one that succeeded, because it is the reason why the
// group has failed. Otherwise a rank whose message failed after a later collective had succeeded
// would look idle to its peers.
wire::Activity GroupCell::read(TimePoint now) const {
  const wire::Activity a = collective.read(now);
  const wire::Activity b = message.read(now);
  const auto precedence = [](const wire::Activity& activity) {
    switch (activity.state) {
      case wire::ActivityState::kNothingYet:
        return 0;
      case wire::ActivityState::kDone:
        return 1;
      case wire::ActivityState::kFailed:
        return 2;
      case wire::ActivityState::kRunning:
        return 3;
    }
    return 0;
  };
  if (precedence(a) != precedence(b)) return precedence(a) > precedence(b) ? a : b;
  return a.age_ns <= b.age_ns ? a : b;
}

const GroupCell* StatusSlot::find(GroupKey group) const {
  const auto found = std::find_if(cells.begin(), cells.end(), [group](const GroupCell& cell) {
    return cell.group.load(std::memory_order_acquire) == group;
  });
  return found == cells.end() ? nullptr : &*found;
}

size_t StatusPage::bytes_for(int num_slots) {
  return static_cast<size_t>(num_slots) * sizeof(StatusSlot);
}

// A slot of zero bytes is valid and means "no operation", so a rank may make its view at any time.
StatusPage::StatusPage(std::shared_ptr<os::SharedMemory> segment, size_t offset, int num_slots)
    : segment_(std::move(segment)),
      slots_(reinterpret_cast<StatusSlot*>(segment_->bytes().data() + offset)),
      num_slots_(num_slots) {}

StatusPage::StatusPage()
    : own_(std::make_shared<StatusSlot>()), slots_(own_.get()), num_slots_(1) {}

StatusCells::StatusCells(StatusPage page, int own_slot)
    : page_(std::move(page)), slot_(page_.slot(own_slot)) {
  for (size_t i = 0; i < StatusSlot::kNumCells; ++i) table_->free.push_back(i);
}

std::shared_ptr<GroupCell> StatusCells::take(GroupKey group, const std::string& name) {
  std::optional<size_t> index;
  {
    std::lock_guard lock(table_->mutex);
    if (!table_->free.empty()) {
      index = table_->free.front();
      table_->free.pop_front();
    }
  }
  const auto hidden = index ? nullptr : std::make_shared<GroupCell>();
  GroupCell* const cell = index ? &slot_.cells[*index] : hidden.get();
  std::shared_ptr<GroupCell> taken(
      cell, [page = page_, table = table_, index, hidden](GroupCell* given_back) {
        std::lock_guard lock(table->mutex);
        table->names.erase(given_back);
        if (index) table->free.push_back(*index);
      });
  cell->group.store(0, std::memory_order_release);
  cell->collective.clear();
  cell->message.clear();
  cell->group.store(group, std::memory_order_release);
  std::lock_guard lock(table_->mutex);
  table_->names.emplace(cell, name);
  return taken;
}

std::shared_ptr<const std::string> StatusCells::show_wait(std::string call) {
  auto wait = std::make_shared<const std::string>(std::move(call));
  std::lock_guard lock(table_->mutex);
  std::erase_if(table_->waits, [](const auto& ended) { return ended.expired(); });
  table_->waits.emplace_back(wait);
  return wait;
}

std::string StatusCells::running_besides(GroupKey group, TimePoint now) const {
  std::lock_guard lock(table_->mutex);
  std::string failed;
  for (const auto& [cell, name] : table_->names) {
    if (cell->group.load(std::memory_order_relaxed) == group) continue;
    const wire::Activity activity = cell->read(now);
    if (!is_in_operation(activity)) continue;
    std::string operation = format("{} of group \"{}\"",
                                   describe_operation(activity.number, activity.fingerprint), name);
    if (activity.state == wire::ActivityState::kRunning) return operation;
    if (failed.empty()) failed = operation + ", which has failed";
  }
  for (const auto& wait : table_->waits) {
    if (const auto call = wait.lock()) return *call;
  }
  return failed;
}

}  // namespace cadre
