// Hands outputs to the next stage and gradients to the stage before: by messages if another rank
// holds that stage, directly if this rank does.
//
// The receiver has to know what comes. In a step with headers every message of a forward is
// preceded by a header of fixed length (tensor_header.h), which both sides remember for this
// microbatch. In a step without headers a message has the form that it had in the last step with
// headers, and a sender whose stage returns something else throws and does not send it. Gradients
// have the form of the outputs that require grad, so they need no header, only a message with one
// byte for each, which says whether the gradient is defined. An output that the loss does not use
// has no gradient, as in one process, and then neither have the parameters that only this output
// depends on. Zeros are sent in place of such a gradient.
//
// The messages are in a space of their own (tensor/group/messages/private_messages.h), so that
// neither the program's messages on the group nor those of another pipeline are taken for them.
//
// Receives from a rank are posted in the order of its sends, which is the order of the schedule
// (ReceivePlacement::kAsSent), so that no message waits behind one that no receive expects yet.
//
// Threads: one. Blocking: take(), and post_receive() in a step with headers, until the group's
// deadline or the timeout of the step; finish(). Sends do not block; a Work keeps their tensors,
// which nothing may write meanwhile (values/stage_values.h). Lifetime: keeps the group. Errors: as
// ProcessGroup; kCorruption for a header that is none; kInvalidArgument for an output of other
// shapes than announced.
#pragma once

#include <ATen/core/Tensor.h>

#include <compare>
#include <map>
#include <optional>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/comm/queue/work.h"
#include "cadre/parallel/pp/tensor_header.h"
#include "cadre/tensor/group/messages/private_messages.h"

namespace cadre::parallel {

class StageMessages {
 public:
  enum class Kind { kForward, kBackward };
  // Identifies a message; `stage` is the stage that receives it.
  struct Id {
    Kind kind;
    int stage;
    int microbatch;
    friend auto operator<=>(const Id&, const Id&) = default;
  };

  struct Layout {
    std::vector<int> rank_of_stage;
    int num_microbatches = 1;
  };
  StageMessages(PrivateMessages messages, Layout layout);
  // Throws if there are more messages than tags.
  static void check_num_messages(const Layout& layout);

  struct StepKind {
    bool is_training = true;
    bool has_headers = true;
    // The limit of each message; the default is that of the group.
    std::optional<Duration> timeout = {};
  };
  void begin(const StepKind& step);

  // Passes tensors to another stage of this rank, without a message.
  void put(const Id& id, std::vector<at::Tensor> tensors);
  // kForward: the tensors are leaves, and the receiver learns which of them require grad.
  // kBackward: a tensor is undefined if its input has no gradient.
  void send(const Id& id, const std::vector<at::Tensor>& tensors);
  void post_receive(const Id& id);
  // Waits for the message. kForward: returns leaves. kBackward: returns a gradient for each output
  // of the stage, undefined if the output has none.
  std::vector<at::Tensor> take(const Id& id);

  // Waits for all sends.
  void finish();
  // Drops all messages of the step.
  void clear();

 private:
  struct Arriving {
    std::vector<at::Tensor> tensors;
    std::vector<Work> works = {};
    at::Tensor are_defined = {};  // says which gradients of another rank are defined
  };
  // Headers of training and of evaluation differ, because an evaluation has no gradients.
  struct HeaderId {
    bool is_training;
    int sender;
    int microbatch;
    friend auto operator<=>(const HeaderId&, const HeaderId&) = default;
  };

  int sender_of(const Id& id) const;
  int tag_of(const Id& id) const;
  HeaderId header_id_of(const Id& id) const;
  // Sends the header, or checks that the receiver expects it.
  void announce(const Id& id, const std::vector<at::Tensor>& tensors);
  const TensorHeader& header_for_receive(const Id& id);
  void send_gradients(const Id& id, const std::vector<at::Tensor>& gradients);
  void send(const Id& id, const at::Tensor& tensor);
  Work receive(const Id& id, const at::Tensor& tensor) const;

  PrivateMessages messages_;
  Layout layout_;
  StepKind step_;
  std::map<HeaderId, TensorHeader> headers_;
  std::map<Id, Arriving> arriving_;
  std::vector<Work> sends_;
};

}  // namespace cadre::parallel
