// Sends messages between pairs of ranks, in a ring: cadre run --nproc-per-node 3 ./point_to_point
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <iostream>
#include <string>
#include <utility>

// Sends a token once around the ring with blocking send and recv; each rank adds its number plus
// one.
static int64_t pass_token(const cadre::ProcessGroup& world) {
  const int rank = world.rank();
  const int size = world.world_size();
  auto token = torch::zeros({1}, torch::kInt64);
  if (rank > 0) world.recv(token, rank - 1);
  token += rank + 1;
  if (size > 1) world.send(token, (rank + 1) % size);
  if (size > 1 && rank == 0) world.recv(token, size - 1);
  return token.item<int64_t>();
}

// Sends the tensors of all ranks around the ring at the same time; every rank adds up the tensors
// that it receives. send() of a message of this size blocks until the receiver takes it, so a ring
// of blocking sends would deadlock: use send_async.
static torch::Tensor sum_around(const cadre::ProcessGroup& world, const torch::Tensor& mine) {
  const int rank = world.rank();
  const int size = world.world_size();
  auto sum = mine.clone();
  auto passing = mine.clone();
  auto arriving = torch::empty_like(mine);
  for (int step = 1; step < size; ++step) {
    auto sending = world.send_async(passing, (rank + 1) % size, {.tag = step});
    auto receiving = world.recv_async(arriving, (rank + size - 1) % size, {.tag = step});
    sending.wait();
    receiving.wait();
    sum += arriving;
    std::swap(passing, arriving);
  }
  return sum;
}

int main() try {
  auto world = cadre::init_process_group();
  const int64_t token = pass_token(world);
  const auto sum = sum_around(world, torch::full({100'000}, world.rank() + 1, torch::kInt64));
  std::cout << "rank " + std::to_string(world.rank()) + ": token " + std::to_string(token) +
                   ", sums " + std::to_string(sum.min().item<int64_t>()) + " to " +
                   std::to_string(sum.max().item<int64_t>()) + "\n"
            << std::flush;
  world.barrier();  // no rank may leave while others still exchange messages
  world.close();
} catch (const cadre::Error& error) {
  std::cerr << "point_to_point: " << error.what() << std::endl;
  return 1;
}
