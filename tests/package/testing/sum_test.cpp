// Tests a sum of two ranks without torch and without a test framework: with ranks that are threads,
// in the simulator with a rank that is killed, and in a fake group of which only one rank exists.
#include <cadre/testing.h>

#include <cstdio>
#include <span>
#include <string>

namespace testing = cadre::testing;
namespace sim = cadre::sim;

namespace {

int sum_over(cadre::Communicator& group, int value) {
  const auto bytes = std::as_writable_bytes(std::span(&value, 1));
  group.all_reduce(bytes, bytes, cadre::DType::kInt32, cadre::ReduceOp::kSum);
  return value;
}

void rank_main(testing::RankContext& context) {
  const auto group = testing::connect_ranks(context);
  for (int step = 0; step < 10; ++step) {
    testing::require(sum_over(*group, context.rank.value + 1) == 3, "the sum over both ranks");
  }
  context.output = "rank " + std::to_string(context.rank.value);
  group->close(context.system.deadline_in(testing::kRankTimeout));
}

bool repeats_and_names_a_killed_rank() {
  const auto whole = testing::run_ranks_in_simulator(7, {}, 2, rank_main);
  const auto again = testing::run_ranks_in_simulator(7, {}, 2, rank_main);
  if (!whole.ok() || whole.sim.history_hash != again.sim.history_hash) return false;
  const int64_t middle = whole.sim.ranks[1].num_points / 2;
  const auto kill = sim::Fault::kill(1, sim::When::at_point(1, middle));
  const auto killed = testing::run_ranks_in_simulator(7, {.faults = {kill}}, 2, rank_main);
  return killed.ranks[1].failure == "killed" &&
         killed.ranks[0].failure.find("rank 1") != std::string::npos;
}

}  // namespace

int main() {
  const testing::RanksResult threads = testing::run_ranks_as_threads(2, rank_main);
  const auto fake = testing::make_fake_communicator(1000, {.rank = 7});
  if (!threads.ok()) std::printf("%s", threads.failures().c_str());
  std::printf("%s, %s; simulator %s; rank %d of %d has %d\n", threads.ranks[0].output.c_str(),
              threads.ranks[1].output.c_str(),
              repeats_and_names_a_killed_rank() ? "right" : "wrong", fake->rank().value,
              fake->world_size(), sum_over(*fake, 5));
}
