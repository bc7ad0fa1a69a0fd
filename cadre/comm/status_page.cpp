#include "cadre/comm/status_page.h"

#include <array>
#include <cstring>
#include <utility>

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
  // A failed activity keeps the time of its beginning: that is what its peers ask for.
  if (well) since_ns.store(now.ns, std::memory_order_relaxed);
  state.store(
      static_cast<uint32_t>(well ? wire::ActivityState::kDone : wire::ActivityState::kFailed),
      std::memory_order_release);
}

bool ActivityCell::is_running() const {
  return state.load(std::memory_order_acquire) ==
         static_cast<uint32_t>(wire::ActivityState::kRunning);
}

wire::Activity ActivityCell::read(TimePoint now) const {
  const uint32_t raw_state = state.load(std::memory_order_acquire);
  wire::Activity activity;
  // A peer wrote it: out of range reads as "nothing yet".
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

wire::Activity StatusSlot::read(TimePoint now) const {
  const wire::Activity a = collective.read(now);
  const wire::Activity b = message.read(now);
  const bool a_runs = a.state == wire::ActivityState::kRunning;
  const bool b_runs = b.state == wire::ActivityState::kRunning;
  if (a_runs != b_runs) return a_runs ? a : b;
  if (a.state == wire::ActivityState::kNothingYet) return b;
  if (b.state == wire::ActivityState::kNothingYet) return a;
  return a.age_ns <= b.age_ns ? a : b;
}

size_t StatusPage::bytes_for(int num_slots) {
  return static_cast<size_t>(num_slots) * sizeof(StatusSlot);
}

// All-zero bytes are a valid, idle slot, so every rank may take the view at any time.
StatusPage::StatusPage(std::shared_ptr<os::SharedMemory> segment, int num_slots)
    : segment_(std::move(segment)),
      slots_(reinterpret_cast<StatusSlot*>(segment_->bytes().data())),
      num_slots_(num_slots) {}

StatusPage::StatusPage()
    : own_(std::make_shared<StatusSlot>()), slots_(own_.get()), num_slots_(1) {}

}  // namespace cadre
