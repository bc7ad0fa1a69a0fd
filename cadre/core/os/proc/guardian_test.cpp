#include "cadre/core/os/proc/guardian.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <utility>

#include "cadre/core/os/proc/exit_status.h"
#include "cadre/core/os/proc/pipe.h"
#include "cadre/core/os/system.h"

namespace cadre::os {
namespace {

// Delays the guardian (the parent of the supervisor; guardian.h) until the supervisor has been
// killed, as the scheduler of a busy machine may.
void delay_the_guardian() {
  const auto system = make_native_system();
  system->poll({}, system->deadline_in(std::chrono::milliseconds(200)));
}

// The body of the supervisor: it starts a worker, which holds the write end of the pipe, and dies.
int start_a_worker_and_die(Pollable&) {
  if (::_Fork() == 0) {  // unlike fork(), does not call delay_the_guardian()
    ::alarm(20);         // ends the worker if the guardian does not kill it
    while (true) ::pause();
  }
  ::raise(SIGKILL);
  return 0;
}

TEST(Guardian, KillsTheWorkersOfASupervisorThatDiesBeforeItRuns) {
  auto alive = make_pipe();
  ASSERT_TRUE(alive.ok());
  const int guardian = ::fork();
  if (guardian == 0) {
    ::pthread_atfork(nullptr, delay_the_guardian, nullptr);
    ::_exit(run_guarded(start_a_worker_and_die));
  }
  alive->write_end.close();
  const ExitStatus status = reap(guardian);
  EXPECT_TRUE(status.is_known);
  EXPECT_EQ(status.code, 128 + SIGKILL);

  const auto system = make_native_system();
  PipeReader reader(std::move(alive->read_end));
  std::array items{PollItem{.target = &reader, .want_read = true}};
  system->poll(items, system->deadline_in(std::chrono::seconds(5)));
  EXPECT_TRUE(items[0].can_read) << "the worker is still alive";
}

}  // namespace
}  // namespace cadre::os
