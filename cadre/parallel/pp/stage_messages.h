// Passes outputs to the next stage and gradients to the previous stage: by messages if another rank
// has that stage, directly if this rank has it.
//
// The receiver must know the dtypes and shapes in advance. In a step with headers every forward
// message is preceded by a header of fixed length (tensor_header.h), which both ranks remember for
// this microbatch. In a step without headers a message has the same dtypes and shapes as in the
// last step with headers; if the sender's stage returns something else, the sender throws instead
// of sending. Gradients have the shapes of the outputs that require grad, so they need no header.
// They are preceded by a message with one byte for each gradient, which says whether the gradient
// is defined: an output that the loss does not use has no gradient, and then the parameters used
// only for this output have none either, as in one process. Zeros are sent in place of an undefined
// gradient.
//
// The messages have their own message space (tensor/group/messages/private_messages.h), so they are
// never confused with the program's messages on the group or with those of another pipeline.
//
// Receives from a rank are posted in the order in which that rank sends, which is the order of the
// schedule (ReceivePlacement::kAsSent). So no message has to wait behind one for which no receive
// is posted yet.
//
// Tensors on devices go through the same messages; a tensor arrives on the receiver's device in the
// group if it is on a device at the sender. Headers and flags are tensors on the CPU, so reading
// them waits for no device.
//
// Threads: one thread. Blocking: take(), post_receive() in a step with headers, and finish(), until
// the group's deadline or the timeout of the step. Sends do not block; a Work keeps their tensors,
// which must not be written until the send has completed (values/stage_values.h). Lifetime: keeps
// the group. Errors: those of ProcessGroup; kCorruption for an invalid header; kInvalidArgument for
// an output whose shape differs from the header.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

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
  // Identifies a message by its kind, the stage that receives it, and its microbatch.
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
  // Throws if the messages of a step need more tags than there are.
  static void check_num_messages(const Layout& layout);

  struct StepKind {
    bool is_training = true;
    bool has_headers = true;
    // The timeout of each message; if nullopt, that of the group.
    std::optional<Duration> timeout = {};
  };
  void begin(const StepKind& step);

  // Passes tensors to another stage on this rank, without a message.
  void put(const Id& id, std::vector<at::Tensor> tensors);
  // Sends tensors. kForward: the tensors are leaves; the header also says which of them require
  // grad. kBackward: a tensor is undefined if the receiver's output has no gradient.
  void send(const Id& id, const std::vector<at::Tensor>& tensors);
  void post_receive(const Id& id);
  // Waits for the message and returns its tensors. kForward: leaves. kBackward: one gradient for
  // each output of the stage, undefined if the output has none.
  std::vector<at::Tensor> take(const Id& id);

  // Waits for all sends.
  void finish();
  // Drops all messages of the step.
  void clear();

 private:
  struct Arriving {
    std::vector<at::Tensor> tensors;
    std::vector<Work> works = {};
    at::Tensor are_defined = {};  // one byte for each gradient: whether it is defined
  };
  // Training and evaluation have different headers, because in an evaluation no tensor requires
  // grad.
  struct HeaderId {
    bool is_training;
    int sender;
    int microbatch;
    friend auto operator<=>(const HeaderId&, const HeaderId&) = default;
  };

  // Returns the device on which this rank receives tensors that the sender has on a device.
  c10::Device own_device() const;
  int sender_of(const Id& id) const;
  int tag_of(const Id& id) const;
  HeaderId header_id_of(const Id& id) const;
  // Sends the header in a step with headers. Otherwise checks that the tensors match the header
  // that the receiver remembers.
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
