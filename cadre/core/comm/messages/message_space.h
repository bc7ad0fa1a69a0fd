// Whose messages: each wrapper of a group sends and receives in a space of its own, where its tags
// meet neither the program's nor those of another wrapper.
//
// Threads: plain values; reserve() and the calls as operations of the group. Blocking: reserve()
// and run_message(), until the deadline. Lifetime: a space is valid as long as its group. Errors:
// those of the group; reserve() throws the same kInvalidArgument on all ranks when they reserve for
// different users. A message is received only by a receive of its own space, also by one from any
// rank. Programs cannot name a space: Communicator's own calls use the first. Source: the context
// of an MPI communicator (MPI_Comm_dup), for messages only.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/messages/message_call.h"
#include "cadre/core/comm/queue/work.h"

namespace cadre {

class Communicator;

class CADRE_EXPORT MessageSpace {
 public:
  // The program's own messages.
  MessageSpace() = default;
  // Collective: a space that no other user of the group has, and none had before. `user` is static
  // text that names the wrapper in errors; equal on all ranks.
  static MessageSpace reserve(Communicator& group, std::string_view user,
                              const CollectiveOptions& options = {});
  // The space of a header that was received.
  static MessageSpace of_number(uint32_t number) { return MessageSpace(number, {}); }

  uint32_t number() const { return number_; }
  // "tag 7", "tag 7 of cadre::Pipeline".
  std::string describe(int tag) const;
  friend bool operator==(const MessageSpace& a, const MessageSpace& b) {
    return a.number_ == b.number_;
  }

 private:
  MessageSpace(uint32_t number, std::string_view user) : number_(number), user_(user) {}

  uint32_t number_ = 0;
  std::string_view user_;  // empty: the program, or not known
};

// Communicator::send, recv, recv_from_any and issue() of messages, in a space.
CADRE_EXPORT Rank run_message(const Communicator& group, const MessageSpace& space,
                              const MessageCall& message, const CollectiveOptions& options);
CADRE_EXPORT std::vector<Work> issue_messages(const Communicator& group, const MessageSpace& space,
                                              std::span<const MessageCall> messages,
                                              const CollectiveOptions& options);

}  // namespace cadre
