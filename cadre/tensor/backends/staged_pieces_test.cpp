// Runs the pieces of a collective on all ranks as the staged engine does, with a formula in place
// of the host's engine, and compares the result with the formula on the whole buffers.
#include "cadre/tensor/backends/staged_pieces.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/collective.h"

namespace cadre::staged {
namespace {

constexpr Rank kRoot = 1;
constexpr float kUntouched = -99;

using Floats = std::vector<float>;

// The input and output of one rank's collective.
struct Operands {
  std::span<const float> in;
  std::span<float> out;
};

float sum_at(const std::vector<Operands>& ranks, size_t element) {
  float sum = 0;
  for (const Operands& rank : ranks) sum += rank.in[element];
  return sum;
}

// Returns what the collective writes to each rank's output.
std::vector<Floats> results_of(OpKind kind, const std::vector<Operands>& ranks, size_t root) {
  std::vector<Floats> results(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    const size_t size = ranks[r].out.size();
    for (size_t i = 0; i < size; ++i) {
      const size_t part = size / ranks.size();
      switch (kind) {
        case OpKind::kAllReduce:
        case OpKind::kReduce:
          results[r].push_back(sum_at(ranks, i));
          break;
        case OpKind::kReduceScatter:
          results[r].push_back(sum_at(ranks, r * size + i));
          break;
        case OpKind::kBroadcast:
          results[r].push_back(ranks[root].in[i]);
          break;
        case OpKind::kScatter:
          results[r].push_back(ranks[root].in[r * size + i]);
          break;
        case OpKind::kAllToAll:
          results[r].push_back(ranks[i / part].in[r * part + i % part]);
          break;
        default:  // all_gather and gather
          results[r].push_back(ranks[i / part].in[i % part]);
      }
    }
  }
  return results;
}

// The memory of the device of one rank, and the collective on it.
struct RankOnDevice {
  Floats in;
  Floats out;
  Collective collective;
};

Bytes bytes_of(Floats& floats) {
  return std::as_writable_bytes(std::span(floats));
}

Collective collective_of(OpKind kind, Floats& in, Floats& out) {
  const ConstBytes from = bytes_of(in);
  const Bytes to = bytes_of(out);
  constexpr DType kDtype = DType::kFloat32;
  switch (kind) {
    case OpKind::kAllReduce:
      return Collective::all_reduce(from, to, kDtype, ReduceOp::kSum);
    case OpKind::kReduce:
      return Collective::reduce(from, to, kDtype, ReduceOp::kSum, kRoot);
    case OpKind::kReduceScatter:
      return Collective::reduce_scatter(from, to, kDtype, ReduceOp::kSum);
    case OpKind::kBroadcast:
      return Collective::broadcast(to, kDtype, kRoot);
    case OpKind::kAllGather:
      return Collective::all_gather(from, to, kDtype);
    case OpKind::kGather:
      return Collective::gather(from, to, kDtype, kRoot);
    case OpKind::kScatter:
      return Collective::scatter(from, to, kDtype, kRoot);
    default:
      return Collective::all_to_all(from, to, kDtype);
  }
}

std::vector<RankOnDevice> ranks_of(OpKind kind, size_t num_ranks, size_t count) {
  const bool in_is_large =
      kind == OpKind::kReduceScatter || kind == OpKind::kScatter || kind == OpKind::kAllToAll;
  const bool out_is_large =
      kind == OpKind::kAllGather || kind == OpKind::kGather || kind == OpKind::kAllToAll;
  std::vector<RankOnDevice> ranks(num_ranks);
  for (size_t r = 0; r < num_ranks; ++r) {
    RankOnDevice& rank = ranks[r];
    rank.in.resize(in_is_large ? num_ranks * count : count);
    std::iota(rank.in.begin(), rank.in.end(), static_cast<float>(1000 * r + 1));
    rank.out.assign(out_is_large ? num_ranks * count : count, kUntouched);
    if (kind == OpKind::kBroadcast) rank.out = rank.in;
    rank.collective = collective_of(kind, rank.in, rank.out);
    const auto checked =
        validate(rank.collective, static_cast<int>(r), static_cast<int>(num_ranks));
    EXPECT_TRUE(checked.ok());
  }
  return ranks;
}

std::span<const float> floats_of(ConstBytes bytes) {
  return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
}
std::span<float> floats_of(Bytes bytes) {
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}

// Runs piece `index` of all ranks.
void run_piece(OpKind kind, std::vector<RankOnDevice>& ranks,
               const std::vector<std::vector<Piece>>& pieces, size_t index) {
  std::vector<Floats> memory;
  std::vector<Operands> operands;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const Piece& piece = pieces[r][index];
    memory.emplace_back(piece.num_bytes / sizeof(float), kUntouched);
    for (const Copy& copy : piece.to_host) {
      ASSERT_LE(copy.offset + copy.num_bytes, piece.num_bytes);
      std::memcpy(bytes_of(memory[r]).data() + copy.offset, copy.on_device, copy.num_bytes);
    }
  }
  for (size_t r = 0; r < ranks.size(); ++r) {
    const Piece& piece = pieces[r][index];
    const Bytes all = bytes_of(memory[r]);
    operands.push_back({floats_of(ConstBytes(all.subspan(piece.in.offset, piece.in.num_bytes))),
                        floats_of(all.subspan(piece.out.offset, piece.out.num_bytes))});
  }
  const std::vector<Floats> results =
      results_of(kind, operands, static_cast<size_t>(kRoot.value) % ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    std::ranges::copy(results[r], operands[r].out.begin());
    for (const Copy& copy : pieces[r][index].to_device) {
      ASSERT_LE(copy.offset + copy.num_bytes, pieces[r][index].num_bytes);
      std::memcpy(copy.on_device, bytes_of(memory[r]).data() + copy.offset, copy.num_bytes);
    }
  }
}

TEST(StagedPiecesTest, GiveTheResultOfTheWholeCollective) {
  for (const OpKind kind :
       {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter, OpKind::kBroadcast,
        OpKind::kAllGather, OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll}) {
    for (const size_t num_ranks : {2, 3, 4}) {
      for (const size_t count : {0, 1, 7, 64}) {
        for (const size_t piece_bytes : {1, 4, 40, 1 << 20}) {
          SCOPED_TRACE(format("{} of {} elements on {} ranks in pieces of {} bytes", kind, count,
                              num_ranks, piece_bytes));
          std::vector<RankOnDevice> ranks = ranks_of(kind, num_ranks, count);
          std::vector<Operands> whole;
          std::vector<Floats> inputs;
          std::vector<std::vector<Piece>> pieces;
          for (size_t r = 0; r < num_ranks; ++r) {
            const Collective& c = ranks[r].collective;
            whole.push_back({floats_of(c.in), floats_of(c.out)});
            inputs.push_back(ranks[r].in);
            pieces.push_back(
                pieces_of(c, static_cast<int>(r), static_cast<int>(num_ranks), piece_bytes));
            ASSERT_EQ(pieces[r].size(), pieces[0].size());
          }
          const std::vector<Floats> expected =
              results_of(kind, whole, static_cast<size_t>(kRoot.value));
          for (size_t i = 0; i < pieces[0].size(); ++i) run_piece(kind, ranks, pieces, i);
          for (size_t r = 0; r < num_ranks; ++r) {
            EXPECT_TRUE(std::ranges::equal(floats_of(ranks[r].collective.out), expected[r]))
                << "rank " << r;
            EXPECT_EQ(ranks[r].in, inputs[r]) << "rank " << r;
          }
        }
      }
    }
  }
}

TEST(StagedPiecesTest, AreAsLongAsAskedFor) {
  Floats data(1000);
  Collective sum = Collective::all_reduce(bytes_of(data), bytes_of(data), DType::kFloat32, {});
  const std::vector<Piece> pieces = pieces_of(sum, 0, 2, 402);
  EXPECT_EQ(pieces.size(), 10u);
  for (const Piece& piece : pieces) EXPECT_EQ(piece.num_bytes, 400u);
  Floats parts(4000);
  Collective gathered = Collective::all_gather(bytes_of(data), bytes_of(parts), DType::kFloat32);
  for (const Piece& piece : pieces_of(gathered, 0, 4, 1600)) EXPECT_EQ(piece.num_bytes, 1600u);
}

}  // namespace
}  // namespace cadre::staged
