#include <cadre/core.h>

#include <cstdio>
#include <span>

int main() {
  const auto system = cadre::os::make_native_system();
  const auto group = cadre::connect_from_environment(
      *system, {}, system->deadline_in(cadre::kDefaultConnectTimeout));
  float sum = static_cast<float>(group->rank() + 1);
  const auto bytes = std::as_writable_bytes(std::span(&sum, 1));
  group->all_reduce(bytes, bytes, cadre::DType::kFloat32, cadre::ReduceOp::kSum);
  std::printf("sum %g on %d ranks\n", static_cast<double>(sum), group->world_size());
  group->close(system->deadline_in(cadre::kDefaultCloseTimeout));
}
