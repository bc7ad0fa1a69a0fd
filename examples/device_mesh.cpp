// A matrix product on a grid of ranks: the rows of x are divided along "dp", the columns of the
// weight along "tp".  cadre run --nproc-per-node 4 ./device_mesh
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <iostream>

using cadre::DTensor, cadre::Partial, cadre::Replicate, cadre::Shard;

int main() {
  auto world = cadre::init_process_group();
  const int tp = world.world_size() % 2 == 0 ? 2 : 1;
  const cadre::DeviceMesh mesh(world, {{"dp", world.world_size() / tp}, {"tp", tp}});
  const auto weights = torch::arange(6.0).view({2, 3}).requires_grad_(true);
  auto x = DTensor::distribute(torch::arange(12.0).view({6, 2}), mesh, {Shard(0), Replicate()});
  auto weight = DTensor::distribute(weights, mesh, {Replicate(), Shard(1)});

  const auto product = torch::matmul(x.local(), weight.local());  // this rank's block of y
  auto y = DTensor::from_local(product, mesh, {Shard(0), Shard(1)}, {6, 3});
  // The loss is computed from the whole y, so it is equal on every rank.
  const auto loss = y.full_tensor().square().sum() / 2;
  loss.backward();

  // Each rank has computed the gradient of its columns from its rows only, so it is a partial sum
  // along "dp".
  auto gradient =
      DTensor::from_local(weight.local().grad(), mesh, {Partial(), Shard(1)}, {2, 3}).full_tensor();
  std::cout << "rank " + std::to_string(world.rank()) + " at (" +
                   std::to_string(mesh.coordinate("dp")) + ", " +
                   std::to_string(mesh.coordinate("tp")) + "): loss " +
                   std::to_string(loss.item<int64_t>()) + ", gradient " +
                   std::to_string(gradient[0][0].item<int64_t>()) + " to " +
                   std::to_string(gradient[1][2].item<int64_t>()) + "\n"
            << std::flush;
  mesh.close();
  world.close();
}
