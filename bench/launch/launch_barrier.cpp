// A program that needs only the core: it joins the job, runs one barrier and leaves. It measures
// the time of the launcher and the rendezvous.
#include <cadre/core.h>

#include <cstdio>
#include <memory>

int main() {
  try {
    auto system = cadre::os::make_native_system();
    auto world = cadre::connect_from_environment(
        *system, {}, system->deadline_in(cadre::kDefaultConnectTimeout));
    world->barrier();
    world->close(system->deadline_in(cadre::kDefaultCloseTimeout));
    return 0;
  } catch (const cadre::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
