// Tests the graph of control connections for many layouts.
#include "cadre/core/fabric/plane/topology.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"

namespace cadre {
namespace {

Layout layout_of(const std::vector<int>& ranks_per_host) {
  std::vector<wire::RankAddress> rank_addresses;
  for (size_t host = 0; host < ranks_per_host.size(); ++host) {
    for (int i = 0; i < ranks_per_host[host]; ++i) {
      wire::RankAddress& rank_address = rank_addresses.emplace_back();
      rank_address.boot_id = format("boot-{}", host);
    }
  }
  return Layout(std::move(rank_addresses));
}

// The list of the neighbours of each rank, which is empty for an absent rank.
using Graph = std::vector<std::vector<int>>;

Graph graph_of(const Layout& layout, const std::vector<bool>& is_present) {
  Graph graph(is_present.size());
  for (size_t rank = 0; rank < graph.size(); ++rank) {
    if (is_present[rank]) graph[rank] = neighbours(layout, is_present, static_cast<int>(rank));
  }
  return graph;
}

// Returns whether the ranks in `is_there` can all reach each other.
bool is_connected(const Graph& graph, std::vector<bool> is_there) {
  const auto first = std::ranges::find(is_there, true);
  if (first == is_there.end()) return true;
  std::vector<int> reached = {static_cast<int>(first - is_there.begin())};
  *first = false;
  for (size_t i = 0; i < reached.size(); ++i) {
    for (const int next : graph[static_cast<size_t>(reached[i])]) {
      if (!is_there[static_cast<size_t>(next)]) continue;
      is_there[static_cast<size_t>(next)] = false;
      reached.push_back(next);
    }
  }
  return std::ranges::find(is_there, true) == is_there.end();
}

struct Case {
  Layout layout;
  std::vector<bool> is_present;
};

Case random_case(Random& random) {
  std::vector<int> ranks_per_host(1 + random.below(20));
  for (int& num : ranks_per_host) num = 1 + static_cast<int>(random.below(9));
  Case result{layout_of(ranks_per_host), {}};
  result.is_present.assign(static_cast<size_t>(result.layout.num_ranks()), true);
  const double absent = random.below(3) == 0 ? 0.0 : random.unit();
  for (size_t rank = 0; rank < result.is_present.size(); ++rank) {
    result.is_present[rank] = random.unit() >= absent;
  }
  return result;
}

TEST(Topology, IsSymmetricAndHasOnlyRanksThatArePresent) {
  Random random(1);
  for (int i = 0; i < 300; ++i) {
    const Case one = random_case(random);
    const Graph graph = graph_of(one.layout, one.is_present);
    for (size_t a = 0; a < graph.size(); ++a) {
      EXPECT_TRUE(std::ranges::is_sorted(graph[a]));
      for (const int b : graph[a]) {
        ASSERT_TRUE(one.is_present[static_cast<size_t>(b)]);
        ASSERT_NE(b, static_cast<int>(a));
        ASSERT_TRUE(std::ranges::binary_search(graph[static_cast<size_t>(b)], static_cast<int>(a)))
            << a << " has " << b << " in case " << i;
      }
    }
  }
}

TEST(Topology, IsConnectedAlsoWithoutAnyOneRankOrHost) {
  Random random(2);
  for (int i = 0; i < 300; ++i) {
    const Case one = random_case(random);
    const Graph graph = graph_of(one.layout, one.is_present);
    ASSERT_TRUE(is_connected(graph, one.is_present)) << "case " << i;
    for (size_t gone = 0; gone < graph.size(); ++gone) {
      std::vector<bool> others = one.is_present;
      others[gone] = false;
      ASSERT_TRUE(is_connected(graph, others)) << "case " << i << " without rank " << gone;
    }
    for (const std::vector<int>& host : one.layout.ranks_of_host) {
      std::vector<bool> others = one.is_present;
      for (const int gone : host) others[static_cast<size_t>(gone)] = false;
      ASSERT_TRUE(is_connected(graph, others)) << "case " << i << " without one host";
    }
  }
}

TEST(Topology, AHostHasFewConnectionsToOthersSpreadOverItsRanks) {
  for (const int num_hosts : {2, 3, 5, 8, 100, 128}) {
    for (const int per_host : {1, 2, 8}) {
      const std::vector<int> shape(static_cast<size_t>(num_hosts), per_host);
      const Layout layout = layout_of(shape);
      const std::vector<bool> all(static_cast<size_t>(layout.num_ranks()), true);
      const int exponents = std::bit_width(static_cast<unsigned>(num_hosts - 1));
      int of_host = 0;
      for (int rank = 0; rank < per_host; ++rank) {
        const int degree = static_cast<int>(neighbours(layout, all, rank).size()) - (per_host - 1);
        of_host += degree;
        // The edges of a host are numbered 0 .. k, where k is the number of exponents, and are
        // spread over its R ranks. So a rank has at most ceil((k + 1) / R) of them.
        const int places = (exponents + per_host) / per_host;
        EXPECT_LE(degree, 2 * 2 * places) << num_hosts << " hosts of " << per_host;
      }
      EXPECT_LE(of_host, 4 * exponents) << num_hosts << " hosts of " << per_host;
    }
  }
}

TEST(Topology, OfOneHostAndOfOneRank) {
  const std::vector<bool> three(3, true);
  EXPECT_EQ(neighbours(layout_of({3}), three, 1), (std::vector<int>{0, 2}));
  EXPECT_EQ(neighbours(layout_of({1}), {true}, 0), std::vector<int>{});
  // Rank 3, the only rank of the second host, is connected to two ranks of the first host, so it
  // stays connected if one of them is lost.
  EXPECT_EQ(neighbours(layout_of({3, 1}), {true, true, true, true}, 3), (std::vector<int>{0, 1}));
}

}  // namespace
}  // namespace cadre
