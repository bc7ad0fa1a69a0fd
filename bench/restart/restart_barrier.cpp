// A program on the core alone, without torch: in each of two attempts of a job it joins and runs
// one barrier.
#include <cadre/core.h>

#include <cstdio>
#include <memory>

#include "restart_times.h"

int main() {
  cadre::prepare_restart();
  try {
    auto system = cadre::os::make_native_system();
    auto world = cadre::connect_from_environment(
        *system, {}, system->deadline_in(cadre::kDefaultConnectTimeout));
    world->barrier();
    restart_times::note_or_die(world->rank());
    world->close(system->deadline_in(cadre::kDefaultCloseTimeout));
    return 0;
  } catch (const cadre::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
