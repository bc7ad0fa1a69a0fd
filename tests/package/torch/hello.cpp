// <cadre/cadre.h> has all topics that use libtorch; the headers of single topics compile faster.
#include <ATen/ops/full.h>
#include <cadre/error.h>
#include <cadre/process_group.h>

#include <cstdio>

int main() try {
  const auto world = cadre::init_process_group();
  const auto tensor = at::full({3}, world.rank() + 1.0);
  world.all_reduce(tensor, {.op = cadre::ReduceOp::kAvg});
  std::printf("average %g on %d ranks\n", tensor.data_ptr<float>()[2], world.world_size());
  world.close();
} catch (const cadre::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
