#include "cadre/core/comm/checks.h"

#include <chrono>
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

Deadline deadline_of(const Communicator& group, std::string_view call, Duration timeout) {
  if (timeout > Duration(0)) return group.system().deadline_in(timeout);
  const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(timeout);
  throw refusal_of(
      group, call,
      format("the timeout is {} ms; pass a positive one, or leave it out for the default",
             limit.count()));
}

std::optional<Deadline> deadline_of(const Communicator& group, std::string_view call,
                                    const CollectiveOptions& options) {
  if (!options.timeout) return options.deadline;
  if (!options.deadline) return deadline_of(group, call, *options.timeout);
  throw refusal_of(group, call, "the options have a deadline and a timeout; pass one of them");
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
