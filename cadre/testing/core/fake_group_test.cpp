// Tests the groups for dry runs, which are installed with the library: the result of each
// collective, and which calls throw.
#include "cadre/testing/core/fake_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/groups/rejoin_group.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Ints = std::vector<int32_t>;

ConstBytes bytes_of(const Ints& values) {
  return std::as_bytes(std::span(values));
}
Bytes writable(Ints& values) {
  return std::as_writable_bytes(std::span(values));
}

// Makes the group of rank 1 of 3. Before each call the output is filled with nines.
class FakeGroupTest : public ::testing::Test {
 protected:
  Ints output_of(size_t size, const std::function<void(Bytes out)>& call) {
    Ints out(size, 9);
    call(writable(out));
    return out;
  }
  Deadline soon() { return group_->system().deadline_in(seconds(20)); }

  const std::shared_ptr<Communicator> group_ = make_fake_communicator(3, {.rank = 1});
  const Ints two_ = {4, 5};
  const Ints six_ = {1, 2, 3, 4, 5, 6};
};

TEST_F(FakeGroupTest, ReductionsGiveTheOwnInput) {
  EXPECT_EQ(group_->backend_name(), "placeholders");
  EXPECT_THAT(output_of(2,
                        [&](Bytes out) {
                          group_->all_reduce(bytes_of(two_), out, DType::kInt32, ReduceOp::kSum);
                        }),
              ElementsAre(4, 5));
  EXPECT_THAT(output_of(2,
                        [&](Bytes out) {
                          group_->reduce_scatter(bytes_of(six_), out, DType::kInt32,
                                                 ReduceOp::kMax);
                        }),
              ElementsAre(3, 4));
  EXPECT_THAT(
      output_of(
          3,
          [&](Bytes out) {
            group_->reduce_scatter_v(bytes_of(six_), out, DType::kInt32, ReduceOp::kSum, {1, 3, 2});
          }),
      ElementsAre(2, 3, 4));
  float value = 2;
  const Bytes in_place = std::as_writable_bytes(std::span(&value, 1));
  group_->all_reduce(in_place, in_place, DType::kFloat32, Reduction::premul_sum(3));
  EXPECT_EQ(value, 6);
  // This is rank 1. Its output is unchanged if rank 0 is the root, and is its own input if rank 1
  // is the root.
  for (const Rank root : {Rank(0), Rank(1)}) {
    const Ints out = output_of(2, [&](Bytes bytes) {
      group_->reduce(bytes_of(two_), bytes, DType::kInt32, ReduceOp::kSum, root);
    });
    EXPECT_EQ(out, root == 1 ? two_ : Ints({9, 9}));
  }
}

TEST_F(FakeGroupTest, GathersGiveTheOwnInputInEachPlace) {
  EXPECT_THAT(
      output_of(6, [&](Bytes out) { group_->all_gather(bytes_of(two_), out, DType::kInt32); }),
      ElementsAre(4, 5, 4, 5, 4, 5));
  EXPECT_THAT(output_of(6,
                        [&](Bytes out) {
                          group_->all_gather_v(bytes_of(two_), out, DType::kInt32, {1, 2, 3});
                        }),
              ElementsAre(4, 4, 5, 4, 5, 0));
  EXPECT_THAT(
      output_of(6, [&](Bytes out) { group_->gather(bytes_of(two_), out, DType::kInt32, Rank(1)); }),
      ElementsAre(4, 5, 4, 5, 4, 5));
  Ints in_place = {9, 9, 4, 5, 9, 9};
  const Bytes all = writable(in_place);
  group_->all_gather(all.subspan(8, 8), all, DType::kInt32);
  EXPECT_THAT(in_place, ElementsAre(4, 5, 4, 5, 4, 5));
}

TEST_F(FakeGroupTest, ExchangesGiveWhatTheRankSends) {
  EXPECT_THAT(
      output_of(6, [&](Bytes out) { group_->all_to_all(bytes_of(six_), out, DType::kInt32); }),
      ElementsAre(1, 2, 3, 4, 5, 6));
  // This rank sends one, two and three elements to ranks 0, 1 and 2, and expects two elements from
  // each rank.
  EXPECT_THAT(output_of(6,
                        [&](Bytes out) {
                          group_->all_to_all_v(bytes_of(six_), out, DType::kInt32,
                                               {.input = {1, 2, 3}, .output = {2, 2, 2}});
                        }),
              ElementsAre(1, 0, 2, 3, 4, 5));
}

TEST_F(FakeGroupTest, BroadcastsLeaveTheBufferAndScattersGiveZeros) {
  Ints data = {7, 8};
  group_->broadcast(writable(data), DType::kInt32, Rank(0));
  EXPECT_THAT(data, ElementsAre(7, 8));
  for (const Rank root : {Rank(0), Rank(1)}) {
    const Ints out = output_of(2, [&](Bytes bytes) {
      group_->scatter(root == 1 ? bytes_of(six_) : ConstBytes(), bytes, DType::kInt32, root);
    });
    EXPECT_EQ(out, root == 1 ? Ints({3, 4}) : Ints({0, 0}));
  }
  group_->barrier();
}

TEST_F(FakeGroupTest, ChecksCallsAsEveryGroup) {
  Ints out(5);
  const std::string failure =
      failure_of([&] { group_->all_gather(bytes_of(two_), writable(out), DType::kInt32); });
  EXPECT_THAT(failure, HasSubstr("kInvalidArgument: all_gather on group \"fake\", rank 1"));
  EXPECT_FALSE(group_->error().has_value());
}

TEST_F(FakeGroupTest, ItsSubgroupsAreNamedByTheirRanks) {
  const std::vector<Rank> ranks = {Rank(2), Rank(1)};
  for (const auto& half :
       {new_group(*group_, ranks, soon()),
        new_group_over_store(*group_, ranks, {.store = nullptr, .id = "half"}, soon())}) {
    EXPECT_EQ(half->rank(), 1);
    EXPECT_EQ(half->world_size(), 2);
    EXPECT_EQ(half->global_rank(Rank(0)), 2);
    EXPECT_THAT(half->hosts(), ElementsAre(0, 0));
    Ints out(4, 9);
    half->all_gather(bytes_of(two_), writable(out), DType::kInt32);
    EXPECT_THAT(out, ElementsAre(4, 5, 4, 5));
    half->close(soon());
  }
  EXPECT_EQ(new_group(*group_, std::vector<Rank>{Rank(0)}, soon()), nullptr);
  EXPECT_EQ(group_->num_collectives(), 2);
}

TEST_F(FakeGroupTest, RefusesWhatNeedsTheOtherRanks) {
  Ints data = {1};
  const std::string absent = "the other ranks of this group do not exist";
  const std::vector<std::pair<std::string, std::function<void()>>> calls = {
      {"send", [&] { group_->send(bytes_of(data), DType::kInt32, Rank(0), 0); }},
      {"recv", [&] { group_->recv(writable(data), DType::kInt32, Rank(0), 0); }},
      {"recv_from_any", [&] { group_->recv_from_any(writable(data), DType::kInt32, 0); }},
      {"send_async",
       [&] { static_cast<void>(group_->send_async(bytes_of(data), DType::kInt32, Rank(2), 0)); }},
      {"split", [&] { static_cast<void>(split(*group_, {.color = 0}, soon())); }}};
  for (const auto& [name, call] : calls) {
    const std::string failure = failure_of(call);
    EXPECT_THAT(failure, HasSubstr("kInvalidArgument")) << name;
    EXPECT_THAT(failure, HasSubstr(absent)) << name;
  }
  EXPECT_FALSE(group_->error().has_value());
  group_->barrier();
}

TEST_F(FakeGroupTest, CannotBeRejoined) {
  EXPECT_THAT(failure_of([&] {
                static_cast<void>(
                    rejoin_group(*group_, {.agreement = seconds(1), .connection = seconds(1)}));
              }),
              HasSubstr("kInvalidArgument"));
}

TEST(FakeGroup, HasTheRanksOfOneHostWhateverItsSize) {
  const auto last = make_fake_communicator(4096, {.rank = 4095, .name = "large"});
  EXPECT_EQ(last->rank(), 4095);
  EXPECT_EQ(last->name(), "large");
  EXPECT_EQ(last->global_ranks().back(), 4095);
  EXPECT_EQ(last->hosts(), std::vector<int>(4096, 0));
  EXPECT_FALSE(last->shares_memory());
  EXPECT_EQ(make_fake_communicator(1)->world_size(), 1);
}

TEST(FakeGroup, RefusesARankOutsideOfIt) {
  for (const int rank : {-1, 3}) {
    EXPECT_THAT(failure_of([&] { make_fake_communicator(3, {.rank = rank}); }),
                HasSubstr(format("kInvalidArgument: rank {} is not in a world of 3", rank)));
  }
  EXPECT_THAT(failure_of([] { make_fake_communicator(0); }), HasSubstr("kInvalidArgument"));
}

}  // namespace
}  // namespace cadre::testing
