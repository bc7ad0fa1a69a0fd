// Tests code with tensors, without a test framework: with ranks that are threads, in the simulator,
// and in a fake group of which only one rank exists.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <cadre/testing_groups.h>

#include <cstdio>
#include <string>

namespace testing = cadre::testing;

namespace {

void average(const cadre::ProcessGroup& group, std::string& output) {
  const auto tensor = at::full({3}, group.rank() + 1.0);
  group.all_reduce(tensor, {.op = cadre::ReduceOp::kAvg});
  testing::require(tensor[2].item<double>() == 1.5, "the average over both ranks");
  output = "rank " + std::to_string(group.rank());
}

}  // namespace

int main() {
  const auto threads = testing::run_groups(2, average);
  const auto simulated = testing::run_groups_in_simulator(7, {}, 2, average);
  std::printf("%s%s", threads.failures().c_str(), simulated.failures().c_str());
  const auto fake = testing::make_fake_group(8, {.rank = 3});
  const auto all = at::zeros({8, 3});
  fake.all_gather(all, at::full({3}, 2.0));
  const auto half = fake.new_group({1, 3, 5, 7});
  std::printf("%s, %s; fake: sum %g, rank %d of %d\n", threads.ranks[0].output.c_str(),
              simulated.ranks[1].output.c_str(), all.sum().item<double>(), half->rank(),
              half->world_size());
}
