// Uses no symbol of libtorch itself; libcadre.so still needs it when the program starts.
#include <cadre/process_group.h>

int main() {
  const auto world = cadre::init_process_group();
  world.barrier();
  world.close();
}
