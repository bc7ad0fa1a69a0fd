// A program on libtorch: in each of two attempts of a job it joins and runs one barrier.
#include <cadre/cadre.h>
#include <cadre/launch.h>

#include <cstdio>

#include "restart_times.h"

int main() {
  cadre::prepare_restart();
  try {
    const auto world = cadre::init_process_group();
    world.barrier();
    restart_times::note_or_die(world.rank());
    world.close();
    return 0;
  } catch (const cadre::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
