// Computes the expected results of gather, scatter and all_to_all, for the tests of the net engine
// and of the host engine. The value of each byte depends on the sender, the receiver and the index,
// so that misplaced bytes are found.
#pragma once

#include <cstdint>
#include <vector>

#include "cadre/core/base/random.h"
#include "cadre/core/base/types.h"

namespace cadre {

// Returns byte `index` of the data that rank `from` sends to rank `to`.
inline std::byte exchanged_byte(int from, int to, size_t index) {
  return static_cast<std::byte>(
      (static_cast<size_t>(from) * 37 + static_cast<size_t>(to) * 101 + index * 7 + index / 256) %
      251);
}

inline void append_part(std::vector<std::byte>& bytes, int from, int to, size_t size) {
  bytes.resize(bytes.size() + size);
  std::byte* part = bytes.data() + bytes.size() - size;
  for (size_t i = 0; i < size; ++i) part[i] = exchanged_byte(from, to, i);
}

// sizes[i][j] is the number of bytes from rank i to rank j.
using SizeMatrix = std::vector<std::vector<uint64_t>>;

inline SizeMatrix even_sizes(int world_size, uint64_t size) {
  const auto num_ranks = static_cast<size_t>(world_size);
  return SizeMatrix(num_ranks, std::vector<uint64_t>(num_ranks, size));
}

// Returns random sizes below `limit`, about a third of which are 0.
inline SizeMatrix random_sizes(int world_size, uint64_t limit, uint64_t seed) {
  Random random(seed);
  SizeMatrix sizes = even_sizes(world_size, 0);
  for (auto& row : sizes) {
    for (uint64_t& size : row) size = random.below(3) == 0 ? 0 : random.below(limit);
  }
  return sizes;
}

inline std::vector<uint64_t> received_sizes(const SizeMatrix& sizes, int rank) {
  std::vector<uint64_t> column;
  for (const auto& row : sizes) column.push_back(row[static_cast<size_t>(rank)]);
  return column;
}

inline std::vector<std::byte> exchange_input(const SizeMatrix& sizes, int rank) {
  std::vector<std::byte> bytes;
  const auto& row = sizes[static_cast<size_t>(rank)];
  for (size_t to = 0; to < row.size(); ++to) {
    append_part(bytes, rank, static_cast<int>(to), row[to]);
  }
  return bytes;
}

inline std::vector<std::byte> exchange_output(const SizeMatrix& sizes, int rank) {
  std::vector<std::byte> bytes;
  for (size_t from = 0; from < sizes.size(); ++from) {
    append_part(bytes, static_cast<int>(from), rank, sizes[from][static_cast<size_t>(rank)]);
  }
  return bytes;
}

// Returns the part that rank `from` sends to rank `to` in a gather (where `to` is the root) or in a
// scatter (where `from` is the root).
inline std::vector<std::byte> part_between(int from, int to, size_t size) {
  std::vector<std::byte> bytes;
  append_part(bytes, from, to, size);
  return bytes;
}

// gathered() returns the root's output of a gather, and to_be_scattered() the root's input of a
// scatter.
inline std::vector<std::byte> gathered(int world_size, int root, size_t size) {
  std::vector<std::byte> bytes;
  for (int rank = 0; rank < world_size; ++rank) append_part(bytes, rank, root, size);
  return bytes;
}
inline std::vector<std::byte> to_be_scattered(int world_size, int root, size_t size) {
  std::vector<std::byte> bytes;
  for (int rank = 0; rank < world_size; ++rank) append_part(bytes, root, rank, size);
  return bytes;
}

}  // namespace cadre
