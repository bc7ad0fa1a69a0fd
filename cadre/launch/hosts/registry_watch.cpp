#include "cadre/launch/hosts/registry_watch.h"

#include <array>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre::launch {

RegistryWatch::RegistryWatch(os::System& system, Options options, os::Event& wake_up, LogSink& log)
    : system_(system),
      options_(std::move(options)),
      wake_up_(wake_up),
      log_(log),
      has_wish_(system.make_event()),
      wish_(options_.first_wish) {
  thread_ = system_.spawn("cadre-registry", [this] { run(); });
}

RegistryWatch::~RegistryWatch() {
  {
    std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  has_wish_->notify();
  thread_->join();
}

void RegistryWatch::wish(const Wish& wish) {
  {
    std::lock_guard lock(mutex_);
    if (wish == wish_) return;
    wish_ = wish;
    const bool gives_up = wish.kind != Wish::Kind::kClaim && claim_;
    if (gives_up && claim_->agent == options_.agent) claim_.reset();
  }
  has_wish_->notify();
}

std::optional<std::string> RegistryWatch::answer(TimePoint now) const {
  std::lock_guard lock(mutex_);
  if (!has_answer_) return std::nullopt;
  const bool is_uncertain = claim_ && claim_->agent == options_.agent && now >= certain_until_;
  return claim_ && !is_uncertain ? claim_->address : "";
}

void RegistryWatch::run() {
  while (true) {
    Wish wish;
    {
      std::lock_guard lock(mutex_);
      if (is_stopping_) break;
      wish = wish_;
    }
    if (wish.kind != Wish::Kind::kNone) ask(wish);
    if (wish.kind != Wish::Kind::kClaim && may_have_claim_) release();
    std::array items = {os::PollItem{.target = has_wish_.get(), .want_read = true}};
    system_.poll(items, system_.deadline_in(options_.interval));
    has_wish_->clear();
  }
  if (may_have_claim_) release();
}

void RegistryWatch::ask(const Wish& wish) {
  const TimePoint began = system_.now();
  const Deadline deadline(began + options_.call_timeout);
  if (wish.kind == Wish::Kind::kClaim) {
    may_have_claim_ = true;
    take(options_.registry->claim(wish.own, deadline), began);
  } else {
    take(options_.registry->find(deadline), began);
  }
}

void RegistryWatch::take(const Result<std::optional<Claim>>& result, TimePoint began) {
  say(result.ok() ? Status() : result.error());
  if (!result.ok()) return;
  {
    std::lock_guard lock(mutex_);
    const bool is_own = *result && (*result)->agent == options_.agent;
    if (is_own && wish_.kind != Wish::Kind::kClaim) return;  // it is removed next
    if (is_own) certain_until_ = began + options_.registry->validity();
    if (has_answer_ && claim_ == *result && !is_own) return;
    has_answer_ = true;
    claim_ = *result;
  }
  wake_up_.notify();
}

void RegistryWatch::release() {
  const Status released =
      options_.registry->release(options_.agent, system_.deadline_in(options_.call_timeout));
  may_have_claim_ = !released.ok();
  say(released);
}

void RegistryWatch::say(const Status& status) {
  if (status.ok() && is_silent_) {
    log_.write(LogLevel::kWarning, "agent", cadre::format("{} answers again", options_.name));
  } else if (!status.ok() && !is_silent_) {
    log_.write(
        LogLevel::kWarning, "agent",
        cadre::format("{}: {}; hosts that come now may not find the job; this host asks "
                      "again every {} s",
                      options_.name, status.error().message(),
                      std::chrono::duration_cast<std::chrono::seconds>(options_.interval).count()));
  }
  is_silent_ = !status.ok();
}

}  // namespace cadre::launch
