#include "cadre/core/transport/wait_error.h"

#include <string>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

// Returns a text such as "to send to rank 1, to receive from rank 2".
std::string describe(std::span<const ChannelInterest> interests) {
  std::string text;
  const auto add = [&](std::string_view verb, Rank peer) {
    text += cadre::format("{}{} rank {}", text.empty() ? "" : ", ", verb, peer);
  };
  for (const ChannelInterest& interest : interests) {
    if (interest.want_send) add("to send to", interest.peer);
    if (interest.want_recv) add("to receive from", interest.peer);
  }
  return text.empty() ? "for nothing" : text;
}

}  // namespace

Error timeout_error(Rank rank, std::span<const ChannelInterest> interests) {
  return Error(ErrorCode::kTimeout,
               cadre::format("rank {}: the deadline passed while waiting {}; see whether the peer "
                             "hangs, or allow more time",
                             rank, describe(interests)));
}

Error interrupted_error(Rank rank, std::span<const ChannelInterest> interests) {
  return Error(ErrorCode::kAborted,
               cadre::format("rank {}: the group was interrupted while waiting {}; look at the "
                             "group's first failure",
                             rank, describe(interests)));
}

}  // namespace cadre
