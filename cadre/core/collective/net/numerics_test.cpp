// Compares the order of additions and the rounding, bit for bit, with a sequential reference that
// follows docs/decisions/0005-net-engine.md.
#include <gtest/gtest.h>

#include <array>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/engine_rank.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/transport_group.h"

namespace cadre {
namespace {

using testing::require;
using testing::TransportGroup;
using testing::TransportKind;

constexpr uint64_t kNumericsCount = 1003;
constexpr int kMaxNumericsRanks = 9;
constexpr CrossoverTable kAlwaysRing = {.all_reduce_ring_bytes = 0};
constexpr CrossoverTable kNeverRing = {.all_reduce_ring_bytes = 1 << 30};

float ring_sum(uint64_t index, int world_size, DType dtype) {
  int owner = 0;
  while (part_of(kNumericsCount, world_size, owner).begin +
             part_of(kNumericsCount, world_size, owner).count <=
         index) {
    ++owner;
  }
  float sum = uneven_element((owner + 1) % world_size, index, dtype);
  for (int i = 2; i <= world_size; ++i)
    sum += uneven_element((owner + i) % world_size, index, dtype);
  return sum;
}

// Adds in the order of recursive doubling: first the pairs of ranks that are combined because the
// number of ranks is no power of two, then a balanced tree.
float tree_sum(uint64_t index, int world_size, DType dtype) {
  int size = 1;
  while (2 * size <= world_size) size *= 2;
  const int extra = world_size - size;
  std::vector<float> sums;
  for (int rank = 0; rank < world_size; ++rank) {
    float value = uneven_element(rank, index, dtype);
    if (rank < 2 * extra) value += uneven_element(++rank, index, dtype);
    sums.push_back(value);
  }
  for (; sums.size() > 1; sums.resize(sums.size() / 2)) {
    for (size_t i = 0; i < sums.size() / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  }
  return sums[0];
}

using ReferenceSum = float (*)(uint64_t index, int world_size, DType dtype);

struct NumericsCase {
  CrossoverTable table;
  ReferenceSum reference;
};

std::vector<std::byte> input_of(int rank, DType dtype) {
  std::vector<std::byte> bytes;
  for (uint64_t i = 0; i < kNumericsCount; ++i)
    append_element(bytes, dtype, uneven_element(rank, i));
  return bytes;
}

class NumericsTest : public ::testing::TestWithParam<NumericsCase> {};

INSTANTIATE_TEST_SUITE_P(All, NumericsTest,
                         ::testing::Values(NumericsCase{kAlwaysRing, ring_sum},
                                           NumericsCase{kNeverRing, tree_sum}),
                         [](const auto& test) {
                           return test.param.reference == ring_sum ? "Ring" : "RecursiveDoubling";
                         });

TEST_P(NumericsTest, BitsFollowTheDocumentedOrderOnAllRanksAndInEveryRun) {
  const auto system = os::make_native_system();
  for (int world_size = 2; world_size <= kMaxNumericsRanks; ++world_size) {
    const TransportGroup group(*system, TransportKind::kShm, world_size);
    const std::string failures = group.run([&](Transport& transport) {
      EngineRank engine(*system, transport, GetParam().table);
      for (const DType dtype : {DType::kFloat32, DType::kBfloat16, DType::kFloat16}) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
          std::vector<std::byte> expected;
          for (uint64_t i = 0; i < kNumericsCount; ++i) {
            const float sum = GetParam().reference(i, world_size, dtype);
            const float divisor = op == ReduceOp::kAvg ? static_cast<float>(world_size) : 1.0F;
            // A result of a 16-bit dtype is rounded here and nowhere else.
            append_element(expected, dtype, sum / divisor);
          }
          for (int run = 0; run < 3; ++run) {
            const auto in = input_of(transport.rank(), dtype);
            std::vector<std::byte> out(in.size());
            engine.all_reduce(in, out, dtype, op).value_or_throw();
            require(out == expected, format("{} of {}, run {}: other bits", op, dtype, run));
            const int root = (world_size - 1 + run) % world_size;
            const bool is_root = transport.rank() == root;
            std::vector<std::byte> at_root(is_root ? in.size() : 0);
            engine.reduce(in, at_root, {dtype, op}, root).value_or_throw();
            require(!is_root || at_root == expected,
                    format("reduce, {} of {} to {}: other bits", op, dtype, root));
          }
        }
      }
    });
    EXPECT_EQ(failures, "") << "world size " << world_size << ", seed " << kElementSeed;
  }
}

// The ring and the tree add in different orders, which must give different bits: otherwise the test
// proves nothing.
TEST(NumericsReferenceTest, TheTwoOrdersRoundDifferently) {
  int num_different = 0;
  for (uint64_t i = 0; i < kNumericsCount; ++i) {
    num_different += ring_sum(i, 7, DType::kFloat32) != tree_sum(i, 7, DType::kFloat32) ? 1 : 0;
  }
  EXPECT_GT(num_different, 100);
}

}  // namespace
}  // namespace cadre
