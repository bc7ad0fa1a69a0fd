// Separates the messages of a group's users. Each wrapper of a group sends and receives in a space
// of its own, so its tags never match equal tags of the program or of another wrapper.
//
// A plain value, which is valid as long as its group; comm/message_calls.h reserves one. A message
// is received only by a receive of its own space, also by a receive from any rank. Programs cannot
// name a space: Communicator's own calls use the first. Source: the context of an MPI communicator
// (MPI_Comm_dup), for messages only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cadre/core/base/export.h"

namespace cadre {

class CADRE_EXPORT MessageSpace {
 public:
  // The space of the program's own messages.
  MessageSpace() = default;
  // Makes the space of a reservation, or of a header that was received, in which case the user is
  // not known. `user` is static text that names the wrapper in errors.
  static MessageSpace of_number(uint32_t number, std::string_view user = {}) {
    return MessageSpace(number, user);
  }

  uint32_t number() const { return number_; }
  // Returns text such as "tag 7" or "tag 7 of cadre::Pipeline".
  std::string describe(int tag) const;
  friend bool operator==(const MessageSpace& a, const MessageSpace& b) {
    return a.number_ == b.number_;
  }

 private:
  MessageSpace(uint32_t number, std::string_view user) : number_(number), user_(user) {}

  uint32_t number_ = 0;
  std::string_view user_;  // empty if the program uses the space, or if the user is not known
};

}  // namespace cadre
