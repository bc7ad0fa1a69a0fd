// Sends and receives a wrapper's tensors on a group that it shares with the program. The wrapper
// has its own space of tags, so its messages never match those of the program or of another
// wrapper.
//
// Threads, blocking, tensors (also on devices): as ProcessGroup::send and recv. Lifetime: a cheap
// value that keeps the group. Errors: those of send and recv, with the wrapper's name and the tag.
// The constructor is a collective of the group, so every rank constructs the object at the same
// point in its sequence of operations. If the ranks pass different users, all throw the same
// kInvalidArgument.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

#include "cadre/core/base/types.h"
#include "cadre/core/comm/messages/message_space.h"
#include "cadre/core/comm/queue/work.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

class PrivateMessages {
 public:
  // `user`: the name of the wrapper, static text such as "cadre::Pipeline".
  PrivateMessages(ProcessGroup group, std::string_view user);

  const ProcessGroup& group() const { return group_; }

  void send(const at::Tensor& tensor, int destination, const MessageOptions& options = {}) const;
  Work send_async(const at::Tensor& tensor, int destination,
                  const MessageOptions& options = {}) const;
  void recv(const at::Tensor& tensor, int source, const MessageOptions& options = {}) const;
  Work recv_async(const at::Tensor& tensor, int source, const MessageOptions& options = {}) const;
  int recv_from_any(const at::Tensor& tensor, const MessageOptions& options = {}) const;
  Work batch_send_recv_async(const std::vector<P2POp>& ops, const BatchOptions& options = {}) const;

 private:
  ProcessGroup group_;
  MessageSpace space_;
};

}  // namespace cadre
