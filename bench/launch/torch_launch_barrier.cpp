// A program on libtorch: joins the job, does one barrier, leaves. What is measured beside the
// launcher and the rendezvous is the loading of libtorch's libraries.
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
