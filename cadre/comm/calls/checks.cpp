#include "cadre/comm/calls/checks.h"

#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"

namespace cadre {

void refuse_call(std::string message) {
  throw Error(ErrorCode::kInvalidArgument, std::move(message));
}

void check_elements(std::string_view call, ConstBytes bytes, DType dtype) {
  if (bytes.size() % size_of(dtype) == 0) return;
  refuse_call(format("{}: {} bytes are not a whole number of {} elements of {} bytes", call,
                     bytes.size(), dtype, size_of(dtype)));
}

void check_rank(std::string_view call, std::string_view what, Rank rank, int world_size) {
  if (rank >= 0 && rank < world_size) return;
  refuse_call(format("{}: {} {} is not in the group of {} ranks", call, what, rank, world_size));
}

void check_peer(std::string_view call, Rank peer, Rank self, int world_size) {
  check_rank(call, "the peer", peer, world_size);
  if (peer != self) return;
  refuse_call(format("{}: rank {} is this rank itself; copy the data instead", call, peer));
}

}  // namespace cadre
