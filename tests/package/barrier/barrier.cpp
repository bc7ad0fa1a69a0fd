// Uses no symbol of libtorch itself. The program must still start, although the loader needs
// libtorch for libcadre.so.
#include <cadre/process_group.h>

int main() {
  const auto world = cadre::init_process_group();
  world.barrier();
  world.close();
}
