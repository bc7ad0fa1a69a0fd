#include "cadre/core/collective/net/incoming.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "cadre/core/collective/net/elementwise.h"

namespace cadre {

Result<size_t> Incoming::advance(Link& from, const OperationHeader& operation, size_t num_sent) {
  if (place_.combine == Combine::kStore) return store(from, operation);
  const size_t missing = place_.target.size() - num_done_ - num_staged_;
  const size_t room = std::min(staging_.size() - num_staged_, missing);
  size_t received = 0;
  if (room > 0 || !from.has_header()) {
    const auto result = from.receive(operation, staging_.subspan(num_staged_, room));
    if (!result.ok()) return result;
    received = *result;
    num_staged_ += received;
  }
  return received + add_staged(num_sent);
}

Result<size_t> Incoming::store(Link& from, const OperationHeader& operation) {
  const auto received = from.receive(operation, place_.target.subspan(num_done_));
  if (received.ok()) num_done_ += *received;
  return received;
}

size_t Incoming::add_staged(size_t num_sent) {
  size_t size = num_staged_;
  if (place_.target_is_sent) size = std::min(size, num_sent - num_done_);
  size -= size % size_of(place_.kind.dtype);
  if (size == 0) return 0;
  std::byte* target = place_.target.data() + num_done_;
  std::array<const std::byte*, 2> operands = {staging_.data(), place_.local + num_done_};
  if (place_.combine == Combine::kLocalFirst) std::swap(operands[0], operands[1]);
  const size_t count = size / size_of(place_.kind.dtype);
  reduce(target, operands, count, place_.kind);
  if (place_.divisor != 1) divide(target, count, place_.kind.dtype, place_.divisor);
  num_done_ += size;
  num_staged_ -= size;
  if (num_staged_ > 0) std::memmove(staging_.data(), staging_.data() + size, num_staged_);
  return size;
}

}  // namespace cadre
