// This program uses no symbol of libtorch, but it needs libtorch at its start, because libcadre.so
// does.
#include <cadre/process_group.h>

int main() {
  const auto world = cadre::init_process_group();
  world.barrier();
  world.close();
}
