// A program that needs libtorch: it joins the job, runs one barrier and leaves. It measures the
// time of the launcher, of the rendezvous, and of loading libtorch's libraries.
#include <cadre/cadre.h>

#include <cstdio>

int main() {
  try {
    const auto world = cadre::init_process_group();
    world.barrier();
    world.close();
    return 0;
  } catch (const cadre::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
