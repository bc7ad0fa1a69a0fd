// Calls each collective once, on small tensors: cadre run --nproc-per-node 3 ./collectives
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <iostream>
#include <sstream>
#include <string>
#include <vector>

// Prints a line such as "rank 1 all_reduce: 33 36" with a single write, because the ranks share the
// terminal.
static void show(int rank, const std::string& what, const torch::Tensor& tensor) {
  std::ostringstream line;
  line << "rank " << rank << ' ' << what << ':';
  const auto flat = tensor.flatten();
  for (int64_t i = 0; i < flat.numel(); ++i) line << ' ' << flat[i].item<int64_t>();
  std::cout << line.str() + '\n' << std::flush;
}

int main() try {
  auto world = cadre::init_process_group();
  const int rank = world.rank();
  const int size = world.world_size();
  const auto mine = torch::tensor({1, 2}) + 10 * rank;  // rank 2 has [21, 22]
  const auto rows =
      mine.repeat({size, 1}) + torch::arange(size).unsqueeze(1) * 100;  // one row for each rank
  const auto nothing = torch::Tensor();  // undefined; passed on all ranks except the root

  // The operation is in place: the result replaces every rank's tensor.
  auto sum = mine.clone();
  world.all_reduce(sum);
  show(rank, "all_reduce", sum);

  auto largest = mine.clone();
  world.all_reduce(largest, {.op = cadre::ReduceOp::kMax});
  show(rank, "all_reduce max", largest);

  auto copy = mine.clone();
  world.broadcast(copy, {.root = size - 1});
  show(rank, "broadcast", copy);

  auto total = mine.clone();
  world.reduce(total, {.root = 0});  // only the root's tensor changes
  show(rank, "reduce", total);

  // The output is the first argument, the input the second.
  auto all = torch::empty({size, 2}, torch::kInt64);
  world.all_gather(all, mine);
  show(rank, "all_gather", all);

  auto gathered = rank == 0 ? torch::empty({size, 2}, torch::kInt64) : nothing;
  world.gather(gathered, mine, {.root = 0});
  if (rank == 0) show(rank, "gather", gathered);

  auto part = torch::empty({2}, torch::kInt64);
  world.scatter(part, rank == 0 ? rows : nothing, {.root = 0});
  show(rank, "scatter", part);

  auto reduced = torch::empty({2}, torch::kInt64);
  world.reduce_scatter(reduced, rows);  // row i of the sum goes to rank i
  show(rank, "reduce_scatter", reduced);

  auto exchanged = torch::empty({size, 2}, torch::kInt64);
  world.all_to_all(exchanged, rows);  // row i of rank j becomes row j of rank i
  show(rank, "all_to_all", exchanged);

  // Parts of different sizes: every rank sends i + 1 elements to rank i.
  std::vector<int64_t> sends;
  for (int i = 0; i < size; ++i) sends.push_back(i + 1);
  const std::vector<int64_t> receives(static_cast<size_t>(size), rank + 1);
  const auto input = torch::arange(size * (size + 1) / 2) + 100 * rank;
  auto output = torch::empty({size * (rank + 1)}, torch::kInt64);
  world.all_to_all(output, input, {.output_split_sizes = receives, .input_split_sizes = sends});
  show(rank, "all_to_all uneven", output);

  // Each collective has an asynchronous form `_async`, which returns a Work. The Work keeps the
  // tensors alive.
  auto later = mine.clone();
  cadre::Work work = world.all_reduce_async(later);
  const auto meanwhile = mine.square();
  work.wait();
  show(rank, "all_reduce_async", later + meanwhile);

  world.barrier();
  world.close();
} catch (const cadre::Error& error) {
  std::cerr << "collectives: " << error.what() << std::endl;
  return 1;
}
