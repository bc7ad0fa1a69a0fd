#include "cadre/tensor/backends/staged_pieces.h"

#include <algorithm>

namespace cadre::staged {
namespace {

constexpr size_t kAlignment = 64;  // the output begins at a multiple of it, as allocators align

std::byte* on_device(ConstBytes bytes, size_t offset) {
  // Copies from the input only read it.
  return const_cast<std::byte*>(bytes.data()) + offset;  // NOLINT
}

// Calls `add(begin, end)` for each part of `num_bytes`, in multiples of an element and about as
// long as `part_bytes`; once with an empty part if there are no bytes.
template <typename Add>
void divide(size_t num_bytes, size_t part_bytes, size_t element_bytes, const Add& add) {
  const size_t step = std::max(part_bytes / element_bytes, size_t{1}) * element_bytes;
  size_t begin = 0;
  do {
    const size_t end = std::min(begin + step, num_bytes);
    add(begin, end);
    begin = end;
  } while (begin < num_bytes);
}

bool is_elementwise(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kBroadcast;
}

// The input and the output are in the same memory of the piece.
Piece elementwise_piece(const Collective& c, Rank rank, size_t begin, size_t end) {
  const bool is_root = rank == c.root;
  const size_t size = end - begin;
  Piece piece{.in = {0, size}, .out = {0, size}, .num_bytes = size};
  if (c.kind != OpKind::kBroadcast || is_root) {
    piece.to_host.push_back({on_device(c.in, begin), 0, size});
  }
  if (c.kind == OpKind::kReduce && !is_root) {
    piece.out = {};
  } else if (c.kind != OpKind::kBroadcast || !is_root) {
    piece.to_device.push_back({c.out.data() + begin, 0, size});
  }
  return piece;
}

// The longer buffer has a part for each rank; the shorter one is this rank's part of it.
Piece parts_piece(const Collective& c, Rank rank, int world_size, size_t begin, size_t end) {
  const size_t size = end - begin;
  const auto num_ranks = static_cast<size_t>(world_size);
  const Range whole{0, num_ranks * size};
  const Range own{static_cast<size_t>(rank.value) * size, size};
  Piece piece{.num_bytes = whole.num_bytes};
  const bool gathers = c.kind == OpKind::kAllGather;
  const size_t stride = gathers ? c.in.size() : c.out.size();
  for (size_t r = 0; r < num_ranks; ++r) {
    if (gathers) {
      piece.to_device.push_back({c.out.data() + r * stride + begin, r * size, size});
    } else {
      piece.to_host.push_back({on_device(c.in, r * stride + begin), r * size, size});
    }
  }
  if (gathers) {
    piece.to_host.push_back({on_device(c.in, begin), own.offset, size});
  } else {
    piece.to_device.push_back({c.out.data() + begin, own.offset, size});
  }
  piece.in = gathers ? own : whole;
  piece.out = gathers ? whole : own;
  return piece;
}

Piece undivided(const Collective& c) {
  const size_t begin_of_out = (c.in.size() + kAlignment - 1) / kAlignment * kAlignment;
  Piece piece{.in = {0, c.in.size()},
              .out = {begin_of_out, c.out.size()},
              .num_bytes = begin_of_out + c.out.size()};
  piece.to_host.push_back({on_device(c.in, 0), 0, c.in.size()});
  piece.to_device.push_back({c.out.data(), begin_of_out, c.out.size()});
  return piece;
}

}  // namespace

std::vector<Piece> pieces_of(const Collective& c, Rank rank, int world_size, size_t piece_bytes) {
  std::vector<Piece> pieces;
  const size_t element_bytes = size_of(c.dtype);
  if (is_elementwise(c.kind)) {
    divide(c.in.size(), piece_bytes, element_bytes, [&](size_t begin, size_t end) {
      pieces.push_back(elementwise_piece(c, rank, begin, end));
    });
  } else if (c.kind == OpKind::kAllGather || c.kind == OpKind::kReduceScatter) {
    const size_t part_bytes = std::min(c.in.size(), c.out.size());
    divide(part_bytes, piece_bytes / static_cast<size_t>(world_size), element_bytes,
           [&](size_t begin, size_t end) {
             pieces.push_back(parts_piece(c, rank, world_size, begin, end));
           });
  } else {
    pieces.push_back(undivided(c));
  }
  return pieces;
}

}  // namespace cadre::staged
