// Sends and receives messages in the message space of one wrapper (messages/message_space.h).
//
// Threads: as for operations of the group. Blocking: reserve_message_space() and run_message(),
// until the deadline. Errors: those of the group; reserve_message_space() throws the same
// kInvalidArgument on all ranks if they reserve for different users.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/messages/message_call.h"
#include "cadre/core/comm/messages/message_space.h"
#include "cadre/core/comm/messages/send_gate.h"
#include "cadre/core/comm/queue/work.h"

namespace cadre {

// Collective. Returns a space that no other user of the group has or had before. `user` is static
// text that names the wrapper in errors; equal on all ranks.
CADRE_EXPORT MessageSpace reserve_message_space(Communicator& group, std::string_view user,
                                                const CollectiveOptions& options = {});
// Do the same as Communicator::send, recv, recv_from_any and issue() of messages, in a space. The
// bytes of the sends are read when `is_written` returns true.
CADRE_EXPORT Rank run_message(const Communicator& group, const MessageSpace& space,
                              const MessageCall& message, const CollectiveOptions& options,
                              SendGate is_written = {});
CADRE_EXPORT std::vector<Work> issue_messages(const Communicator& group, const MessageSpace& space,
                                              std::span<const MessageCall> messages,
                                              const CollectiveOptions& options,
                                              const SendGate& is_written = {});

}  // namespace cadre
