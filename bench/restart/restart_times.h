// The common part of the programs of this bench: rank 1 of the first attempt kills itself, and rank
// 0 of the second attempt records when all ranks are connected again.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace restart_times {

inline bool is_first_attempt() {
  return std::strcmp(std::getenv("TORCHELASTIC_RESTART_COUNT"), "0") == 0;
}

// Appends a line with `what` and the monotonic clock, which all processes of a machine share, to
// the file in RESTART_TIMES.
inline void note(const char* what) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const long long ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  std::FILE* const file = std::fopen(std::getenv("RESTART_TIMES"), "a");
  std::fprintf(file, "%s %lld\n", what, ns);
  std::fclose(file);
}

// Is called after a barrier of all ranks. In the first attempt rank 1 records the time and kills
// itself; in the second attempt rank 0 records the time.
inline void note_or_die(int rank) {
  if (is_first_attempt()) {
    if (rank != 1) ::pause();
    note("killed");
    ::kill(::getpid(), SIGKILL);
  }
  if (rank == 0) note("running");
}

}  // namespace restart_times
