#include "cadre/core/comm/messages/message_space.h"

#include "cadre/core/base/format.h"

namespace cadre {

std::string MessageSpace::describe(int tag) const {
  if (number_ == 0) return format("tag {}", tag);
  if (user_.empty()) return format("tag {} of wrapper {} of the group", tag, number_);
  return format("tag {} of {}", tag, user_);
}

}  // namespace cadre
