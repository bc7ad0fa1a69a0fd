#include "cadre/core/comm/checks.h"

#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator_impl.h"

namespace cadre {

Error refusal_of(const Communicator& group, std::string_view call, std::string_view problem) {
  ErrorDetails details;
  details.operation = call;
  details.group = group.name();
  return Error(ErrorCode::kInvalidArgument,
               format("{} on group \"{}\", rank {}: {}", call, group.name(), group.rank(), problem))
      .with_details(std::move(details));
}

void check_elements(const Communicator& group, std::string_view call, ConstBytes bytes,
                    DType dtype) {
  if (bytes.size() % size_of(dtype) == 0) return;
  throw refusal_of(group, call,
                   format("{} bytes are not a whole number of {} elements of {} bytes",
                          bytes.size(), dtype, size_of(dtype)));
}

void check_peer(const Communicator& group, std::string_view call, Rank peer) {
  if (peer < 0 || peer >= group.world_size()) {
    throw refusal_of(
        group, call,
        format("the peer {} is not in the group of {} ranks", peer, group.world_size()));
  }
  if (peer != group.rank()) return;
  throw refusal_of(group, call,
                   format("the peer {} is this rank itself; copy the data instead", peer));
}

void check_has_peers(const Communicator& group, std::string_view call, std::string_view remedy) {
  if (!CommunicatorParts::impl_of(group).is_lone()) return;
  throw refusal_of(group, call,
                   format("the other ranks of this group do not exist: its engine computes "
                          "collectives without them, but no messages; {}",
                          remedy));
}

}  // namespace cadre
