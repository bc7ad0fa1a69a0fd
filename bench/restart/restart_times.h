// What the programs of this bench have in common: rank 1 of the first attempt kills itself, and
// rank 0 of the next one notes when all ranks are connected again.
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

// Appends a line with the monotonic clock, which all processes of a machine share, to the file that
// the bench names.
inline void note(const char* what) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const long long ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  std::FILE* const file = std::fopen(std::getenv("RESTART_TIMES"), "a");
  std::fprintf(file, "%s %lld\n", what, ns);
  std::fclose(file);
}

// Called after a barrier of all ranks.
inline void note_or_die(int rank) {
  if (is_first_attempt()) {
    if (rank != 1) ::pause();
    note("killed");
    ::kill(::getpid(), SIGKILL);
  }
  if (rank == 0) note("running");
}

}  // namespace restart_times
