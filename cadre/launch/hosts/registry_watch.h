// Asks the registry of a job again and again in a thread of its own, because a registry may take
// seconds to answer and the agent has to send its beat.
//
// Threads: wish(), answer() and the destructor from one owner's thread; "cadre-registry" for the
// calls of the registry. Blocking: the destructor, until the present call and the removal of the
// claim have ended, each after `call_timeout` at most. Lifetime: borrows the System, the event and
// the log. Errors: the constructor throws the Error of System::spawn(); an error of the registry is
// one log line, until it answers again.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "cadre/core/base/log.h"
#include "cadre/core/os/system.h"
#include "cadre/launch/hosts/registry.h"

namespace cadre::launch {

class RegistryWatch {
 public:
  // What the registry is asked for: to bring `own` into force, for the claim in force, or nothing.
  // Without kClaim, a claim of this agent is removed.
  struct Wish {
    enum class Kind : uint8_t { kNone, kFind, kClaim };
    Kind kind = Kind::kNone;
    Claim own{};  // kClaim

    friend bool operator==(const Wish&, const Wish&) = default;
  };
  struct Options {
    AgentId agent = 0;
    std::string name;  // the registry in log lines
    std::unique_ptr<CoordinatorRegistry> registry;
    Wish first_wish{};
    Duration interval = std::chrono::seconds(1);
    Duration call_timeout = std::chrono::seconds(2);
  };

  // `wake_up` is notified when there is another answer.
  RegistryWatch(os::System& system, Options options, os::Event& wake_up, LogSink& log);
  ~RegistryWatch();
  RegistryWatch(const RegistryWatch&) = delete;
  RegistryWatch& operator=(const RegistryWatch&) = delete;

  void wish(const Wish& wish);
  // Returns the address in the claim in force, as far as it is known; empty if there is no claim,
  // or if it was this agent's and is not certain any more; nullopt before the first answer.
  std::optional<std::string> answer(TimePoint now) const;

 private:
  void run();
  // Asks the registry once.
  void ask(const Wish& wish);
  void take(const Result<std::optional<Claim>>& result, TimePoint began);
  void release();
  void say(const Status& status);

  os::System& system_;
  Options options_;
  os::Event& wake_up_;
  LogSink& log_;
  const std::unique_ptr<os::Event> has_wish_;

  mutable std::mutex mutex_;  // guards the next five members
  Wish wish_;
  std::optional<Claim> claim_;  // the last answer
  bool has_answer_ = false;
  TimePoint certain_until_;  // an own claim is in force until then
  bool is_stopping_ = false;

  // The members from here on belong to the thread.
  bool may_have_claim_ = true;
  bool is_silent_ = false;  // the registry did not answer the last call

  std::unique_ptr<os::Thread> thread_;
};

}  // namespace cadre::launch
