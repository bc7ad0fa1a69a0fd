// Compares the order of additions and the rounding, bit for bit, with a sequential reference that
// follows docs/decisions/0039-hierarchical-engine.md, and counts the bytes that leave a host.
#include "cadre/core/collective/hierarchical/hierarchical_engine.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <numeric>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/engine_rank.h"
#include "cadre/testing/core/equal_bytes.h"
#include "cadre/testing/core/hierarchical_ranks.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using testing::equal_bytes;
using testing::require;

using Placement = std::vector<int>;  // the host of each rank

constexpr uint64_t kCount = 1003;
constexpr CrossoverTable kAlwaysRing = {.all_reduce_ring_bytes = 0,
                                        .broadcast_chain_bytes = 0,
                                        .all_gather_ring_bytes = 0,
                                        .chain_segment_bytes = 1000};
constexpr CrossoverTable kNeverRing = {.all_reduce_ring_bytes = 1 << 30};

const std::vector<Placement>& placements() {
  static const std::vector<Placement> all = {{0, 0, 1, 1},
                                             {0, 1, 0, 1},
                                             {0, 1, 1},
                                             {0, 1, 1, 2, 2, 2},
                                             {2, 0, 1, 1, 0, 2, 2},
                                             {0, 0, 1, 1, 2, 2},
                                             {0, 0, 0, 1, 1, 1, 2, 2, 2},
                                             {0, 1, 2, 3, 3, 4, 4}};
  return all;
}

std::string text_of(const Placement& placement) {
  std::string text = "hosts";
  for (const int host : placement) text += format(" {}", host);
  return text;
}

// Returns the sums of the hosts, in the order of their lowest ranks. Each adds in rank order.
std::vector<float> host_sums(const Placement& placement, uint64_t index, DType dtype) {
  std::vector<int> hosts;
  std::vector<float> sums;
  for (size_t rank = 0; rank < placement.size(); ++rank) {
    const float value = uneven_element(static_cast<int>(rank), index, dtype);
    const auto known = std::ranges::find(hosts, placement[rank]);
    if (known == hosts.end()) {
      hosts.push_back(placement[rank]);
      sums.push_back(value);
    } else {
      sums[static_cast<size_t>(known - hosts.begin())] += value;
    }
  }
  return sums;
}

// Returns which of `num_parts` parts of `count` elements has the element, and moves `index` and
// `count` to that part. The first count % num_parts parts have one element more.
int part_with(uint64_t& index, uint64_t& count, int num_parts) {
  const auto parts = static_cast<uint64_t>(num_parts);
  for (int part = 0;; ++part) {
    const uint64_t size = count / parts + (static_cast<uint64_t>(part) < count % parts ? 1 : 0);
    if (index < size) {
      count = size;
      return part;
    }
    index -= size;
  }
}

int fewest_ranks(const Placement& placement) {
  auto fewest = static_cast<int64_t>(placement.size());
  for (const int host : placement) fewest = std::min(fewest, std::ranges::count(placement, host));
  return static_cast<int>(fewest);
}

// Adds the sums of the hosts beginning after `last`.
float ring_sum(const std::vector<float>& sums, int last) {
  const auto num_hosts = static_cast<int>(sums.size());
  float sum = sums[static_cast<size_t>((last + 1) % num_hosts)];
  for (int i = 2; i <= num_hosts; ++i) sum += sums[static_cast<size_t>((last + i) % num_hosts)];
  return sum;
}

// The vector is divided into pieces, each of them among the ranks of a host, and each of their
// slices among the hosts.
float sum_of_pieces(const Placement& placement, uint64_t index, DType dtype, uint64_t num_pieces) {
  const std::vector<float> sums = host_sums(placement, index, dtype);
  uint64_t count = kCount;
  part_with(index, count, static_cast<int>(num_pieces));
  part_with(index, count, fewest_ranks(placement));
  return ring_sum(sums, part_with(index, count, static_cast<int>(sums.size())));
}

float large_sum(const Placement& placement, uint64_t index, DType dtype) {
  return sum_of_pieces(placement, index, dtype, 1);
}

constexpr uint64_t kPieceBytes = 700;

// The elements of every dtype are summed as float32.
float pieced_sum(const Placement& placement, uint64_t index, DType dtype) {
  const uint64_t most =
      kPieceBytes * static_cast<uint64_t>(fewest_ranks(placement)) / sizeof(float);
  return sum_of_pieces(placement, index, dtype, (kCount + most - 1) / most);
}

// Adds the sums of the hosts in a tree: first the pairs that are combined because the number of
// hosts is no power of two.
float small_sum(const Placement& placement, uint64_t index, DType dtype) {
  const std::vector<float> of_hosts = host_sums(placement, index, dtype);
  size_t size = 1;
  while (2 * size <= of_hosts.size()) size *= 2;
  const size_t extra = of_hosts.size() - size;
  std::vector<float> sums;
  for (size_t host = 0; host < of_hosts.size(); ++host) {
    float value = of_hosts[host];
    if (host < 2 * extra) value += of_hosts[++host];
    sums.push_back(value);
  }
  for (; sums.size() > 1; sums.resize(sums.size() / 2)) {
    for (size_t i = 0; i < sums.size() / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  }
  return sums[0];
}

std::vector<std::byte> input_of(int rank, DType dtype, uint64_t count = kCount) {
  std::vector<std::byte> bytes;
  for (uint64_t i = 0; i < count; ++i) append_element(bytes, dtype, uneven_element(rank, i));
  return bytes;
}

using ReferenceSum = float (*)(const Placement& placement, uint64_t index, DType dtype);

struct NumericsCase {
  CrossoverTable table;
  ReferenceSum reference;
  const char* name;
  uint64_t piece_bytes = HierarchicalEngineSetup().piece_bytes;
};

class HierarchicalNumericsTest : public ::testing::TestWithParam<NumericsCase> {};

INSTANTIATE_TEST_SUITE_P(All, HierarchicalNumericsTest,
                         ::testing::Values(NumericsCase{kAlwaysRing, large_sum, "Large"},
                                           NumericsCase{kAlwaysRing, pieced_sum, "InPieces",
                                                        kPieceBytes},
                                           NumericsCase{kNeverRing, small_sum, "Small"}),
                         [](const auto& test) { return test.param.name; });

// A result of a 16-bit dtype is rounded by append_element() and nowhere else.
TEST_P(HierarchicalNumericsTest, BitsFollowTheDocumentedOrderOnAllRanks) {
  const auto system = os::make_native_system();
  for (const Placement& placement : placements()) {
    const auto world_size = static_cast<int>(placement.size());
    HostedGroup group(*system, placement);
    group.set_piece_bytes(GetParam().piece_bytes);
    const std::string failures =
        group.run(GetParam().table, [&](HierarchicalRank& engine, Rank rank) {
          for (const DType dtype : {DType::kFloat32, DType::kBfloat16, DType::kFloat16}) {
            for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
              std::vector<std::byte> expected;
              for (uint64_t i = 0; i < kCount; ++i) {
                const float sum = GetParam().reference(placement, i, dtype);
                const float divisor = op == ReduceOp::kAvg ? static_cast<float>(world_size) : 1.0F;
                append_element(expected, dtype, sum / divisor);
              }
              const auto in = input_of(rank, dtype);
              std::vector<std::byte> out(in.size());
              engine.all_reduce(in, out, {dtype, op}).value_or_throw();
              require(out == expected, format("{} of {}: other bits", op, dtype));
              require(in == input_of(rank, dtype), "the input has changed");
              auto in_place = in;
              engine.all_reduce(in_place, in_place, {dtype, op}).value_or_throw();
              require(in_place == expected, format("{} of {} in place: other bits", op, dtype));
              for (int root = 0; root < world_size; ++root) {
                std::vector<std::byte> at_root(rank == root ? in.size() : 0);
                engine.reduce(in, at_root, {dtype, op}, root).value_or_throw();
                require(rank != root || at_root == expected,
                        format("reduce, {} of {} to {}: other bits", op, dtype, root));
              }
            }
          }
        });
    EXPECT_EQ(failures, "") << text_of(placement) << ", seed " << kElementSeed;
  }
}

// The part of a rank is added in ring order, beginning with the host after its own.
TEST(HierarchicalEngineTest, ReduceScatterFollowsTheDocumentedOrder) {
  constexpr uint64_t kPart = 117;
  const auto system = os::make_native_system();
  for (const Placement& placement : placements()) {
    const uint64_t count = kPart * placement.size();
    HostedGroup group(*system, placement);
    const std::string failures = group.run({}, [&](HierarchicalRank& engine, Rank rank) {
      for (const DType dtype : {DType::kFloat32, DType::kBfloat16}) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
          std::vector<std::byte> expected;
          for (uint64_t i = 0; i < kPart; ++i) {
            const uint64_t index = static_cast<uint64_t>(rank.value) * kPart + i;
            const float sum =
                ring_sum(host_sums(placement, index, dtype), group.hosts().host_of(rank));
            const auto divisor = op == ReduceOp::kAvg ? static_cast<float>(placement.size()) : 1.0F;
            append_element(expected, dtype, sum / divisor);
          }
          auto in = input_of(rank, dtype, count);
          std::vector<std::byte> out(kPart * size_of(dtype));
          engine.reduce_scatter(in, out, {dtype, op}).value_or_throw();
          require(out == expected, format("{} of {}: other bits", op, dtype));
          const Bytes own =
              Bytes(in).subspan(static_cast<size_t>(rank.value) * out.size(), out.size());
          engine.reduce_scatter(in, own, {dtype, op}).value_or_throw();
          require(equal_bytes(own, expected), format("{} of {} in place: other bits", op, dtype));
        }
      }
    });
    EXPECT_EQ(failures, "") << text_of(placement) << ", seed " << kElementSeed;
  }
}

// Returns the bytes that each host sends to others in one call of `body`, without the exchange of
// the first operation and without headers.
std::vector<uint64_t> sent_by_hosts(const Placement& placement,
                                    const std::function<void(HierarchicalRank&, Rank)>& body) {
  const auto system = os::make_native_system();
  HostedGroup group(*system, placement);
  std::vector<std::atomic<uint64_t>> sent(static_cast<size_t>(group.hosts().num_hosts()));
  const std::string failures = group.run({}, [&](HierarchicalRank& engine, Rank rank) {
    engine.barrier().value_or_throw();
    const uint64_t before = engine.num_sent_across();
    body(engine, rank);
    sent[static_cast<size_t>(group.hosts().host_of(rank))] += engine.num_sent_across() - before;
  });
  EXPECT_EQ(failures, "");
  return {sent.begin(), sent.end()};
}

// Headers of a few messages are all that a host may send in addition to its data.
constexpr uint64_t kHeaders = 2'000;

TEST(HierarchicalEngineTest, AHostSendsItsDataOnce) {
  constexpr uint64_t kBytes = 4 << 20;
  const std::vector<Placement> all = {
      {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1, 1, 1}, {0, 0, 1, 1, 2, 2}};
  for (const Placement& placement : all) {
    const auto num_hosts = static_cast<uint64_t>(*std::ranges::max_element(placement) + 1);
    const uint64_t part = kBytes / placement.size();
    const auto expect = [&](std::string_view call, const std::vector<uint64_t>& sent,
                            uint64_t bytes) {
      for (const uint64_t of_host : sent) {
        EXPECT_GE(of_host, bytes) << call << ", " << text_of(placement);
        EXPECT_LE(of_host, bytes + kHeaders) << call << ", " << text_of(placement);
      }
    };
    expect("all_reduce",
           sent_by_hosts(placement,
                         [](HierarchicalRank& engine, Rank) {
                           std::vector<std::byte> data(kBytes);
                           engine.all_reduce(data, data, kFloatSum).value_or_throw();
                         }),
           2 * kBytes * (num_hosts - 1) / num_hosts);
    expect("all_gather",
           sent_by_hosts(placement,
                         [&](HierarchicalRank& engine, Rank rank) {
                           std::vector<std::byte> out(part * placement.size());
                           const auto own = static_cast<size_t>(rank.value) * part;
                           engine.all_gather(Bytes(out).subspan(own, part), out).value_or_throw();
                         }),
           part * placement.size() / num_hosts * (num_hosts - 1));
    expect("reduce_scatter",
           sent_by_hosts(placement,
                         [&](HierarchicalRank& engine, Rank) {
                           const uint64_t own = part / sizeof(float) * sizeof(float);
                           std::vector<std::byte> in(own * placement.size());
                           std::vector<std::byte> out(own);
                           engine.reduce_scatter(in, out, kFloatSum).value_or_throw();
                         }),
           part / sizeof(float) * sizeof(float) * placement.size() / num_hosts * (num_hosts - 1));
  }
}

// Hosts whose ranks share no memory are only known to their own ranks.
TEST(HierarchicalEngineTest, RanksOfAHostWithoutSharedMemoryCountAsHosts) {
  const auto system = os::make_native_system();
  HostedGroup group(*system, {0, 0, 1, 1, 1}, {1});
  const std::string failures = group.run(kAlwaysRing, [&](HierarchicalRank& engine, Rank rank) {
    const Placement as_hosts = {0, 0, 1, 2, 3};
    std::vector<std::byte> expected;
    for (uint64_t i = 0; i < kCount; ++i) {
      append_element(expected, DType::kFloat32, large_sum(as_hosts, i, DType::kFloat32));
    }
    auto data = input_of(rank, DType::kFloat32);
    engine.all_reduce(data, data, kFloatSum).value_or_throw();
    require(data == expected, "other bits");
  });
  EXPECT_EQ(failures, "");
}

TEST(HierarchicalEngineTest, WithoutAnySharedMemoryTheNetEngineRuns) {
  const auto system = os::make_native_system();
  HostedGroup group(*system, {0, 0, 1, 1}, {0, 1});
  const std::string failures = group.run({}, [&](HierarchicalRank& engine, Rank rank) {
    std::vector<int32_t> data = {rank.value, 1};
    engine
        .all_reduce(std::as_bytes(std::span(data)), std::as_writable_bytes(std::span(data)),
                    {DType::kInt32, ReduceOp::kSum})
        .value_or_throw();
    require(data == std::vector<int32_t>{6, 4}, "wrong sum");
  });
  EXPECT_EQ(failures, "");
}

// Rank 1 sends nothing before rank 0 has done its work, so a rank 0 that waits first never ends.
TEST(HierarchicalEngineTest, ARunDoesItsIdleWorkBeforeItWaits) {
  const auto system = os::make_native_system();
  const testing::TransportGroup group(*system, testing::TransportKind::kTcp, 2);
  std::atomic<int> num_calls = 0;
  const std::string failures = group.run([&](Transport& transport) {
    const bool works = transport.rank() == Rank(0);
    const Deadline deadline = system->deadline_in(std::chrono::seconds(20));
    NetEngine net(*system, transport);
    OpProgress progress;
    Collective barrier = Collective::barrier();
    const Fingerprint fingerprint = validate(barrier, transport.rank(), 2)->fingerprint();
    const OpContext op{1, {&fingerprint, 1}, deadline, progress};
    const Schedule schedule = make_schedule({.algorithm = Algorithm::kDissemination,
                                             .kind = OpKind::kBarrier,
                                             .rank = transport.rank(),
                                             .world_size = 2});
    IdleWork idle;
    if (works) {
      idle = [&]() -> Status {
        ++num_calls;
        return {};
      };
    }
    while (!works && num_calls == 0) {
      require(system->deadline_in({}) < deadline, "rank 0 waits and has not done its work");
    }
    net.begin(op, Algorithm::kDissemination);
    net.run_among(op, {.schedule = schedule,
                       .end = schedule.steps.size(),
                       .kind = {DType::kUint8},
                       .idle = &idle})
        .value_or_throw();
    require(!idle, "the work is not marked as done");
  });
  EXPECT_EQ(failures, "");
  EXPECT_EQ(num_calls, 1);
}

}  // namespace
}  // namespace cadre
