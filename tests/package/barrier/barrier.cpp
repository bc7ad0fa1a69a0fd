// This program uses no symbol of libtorch itself, but libcadre.so needs libtorch when the program
// starts.
#include <cadre/process_group.h>

int main() {
  const auto world = cadre::init_process_group();
  world.barrier();
  world.close();
}
