#include "cadre/parallel/layers/attention/ring_attention.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/parallel/layers/attention/attention_blocks.h"
#include "cadre/parallel/layers/recorded_backward.h"
#include "cadre/tensor/group/messages/private_messages.h"

namespace cadre {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Tags of the messages between neighbours in the ring.
constexpr int kBlockTag = 0;
constexpr int kGradientTag = 1;

// Returns a key and a value as one flat tensor ("numbers"), which is sent as one message.
at::Tensor packed(const at::Tensor& key, const at::Tensor& value) {
  return at::cat({key.reshape({-1}), value.reshape({-1})});
}

// Sends and receives the messages between neighbours, and knows the shapes of their tensors.
class Ring {
 public:
  Ring(ContextParallel context, const at::Tensor& key, const at::Tensor& value)
      : context_(std::move(context)),
        batch_(key.size(0)),
        heads_(key.size(1)),
        key_dim_(key.size(-1)),
        value_dim_(value.size(-1)) {}

  int size() const { return context_.group().world_size(); }
  // Returns the rank that owns the tokens of the block that this rank has in the given step.
  int source(int step) const { return (context_.group().rank() + size() - step) % size(); }

  KeyValueBlock block(const at::Tensor& numbers, int step) const {
    const int64_t num_tokens = context_.num_tokens_of(source(step));
    const int64_t num_rows = batch_ * heads_ * num_tokens;
    const at::Tensor key = numbers.narrow(0, 0, num_rows * key_dim_);
    const at::Tensor value = numbers.narrow(0, num_rows * key_dim_, num_rows * value_dim_);
    return {.key = key.view({batch_, heads_, num_tokens, key_dim_}),
            .value = value.view({batch_, heads_, num_tokens, value_dim_}),
            .runs = context_.runs(source(step))};
  }

  // Returns an uninitialized tensor to receive the block that this rank has in the given step.
  at::Tensor empty(int step, const at::TensorOptions& options) const {
    return at::empty(
        {batch_ * heads_ * context_.num_tokens_of(source(step)) * (key_dim_ + value_dim_)},
        options);
  }

  void add_messages(std::vector<P2POp>& messages, const at::Tensor& sent,
                    const at::Tensor& received, int tag) const {
    const int rank = context_.group().rank();
    messages.push_back(P2POp::send(sent, (rank + 1) % size(), tag));
    messages.push_back(P2POp::recv(received, (rank + size() - 1) % size(), tag));
  }
  Work start(const std::vector<P2POp>& messages) const {
    return context_.messages().batch_send_recv_async(messages);
  }

  const ContextParallel& context() const { return context_; }

 private:
  ContextParallel context_;
  int64_t batch_, heads_, key_dim_, value_dim_;
};

struct Call final : torch::CustomClassHolder {
  Call(Ring given_ring, AttentionOptions given_options)
      : ring(std::move(given_ring)), options(std::move(given_options)) {}

  QueryRows rows(const at::Tensor& query, const at::Tensor& key) const {
    const ContextParallel& context = ring.context();
    return {.query = query,
            .runs = context.runs(context.group().rank()),
            .num_key_value_heads = key.size(1),
            .num_tokens = context.options().num_tokens,
            .options = options};
  }

  Ring ring;
  AttentionOptions options;
};
using CallPointer = c10::intrusive_ptr<Call>;

// Disables autocast in a scope, so that sums keep the dtype that this file has chosen for them.
class WithoutAutocast {
 private:
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::autocast_dispatch_keyset};
};

AttentionForward attend(const Call& call, const variable_list& inputs) {
  const Ring& ring = call.ring;
  AttentionForward rows(call.rows(inputs[0], inputs[1]), inputs[2].size(-1));
  at::Tensor held = packed(inputs[1], inputs[2]);
  for (int step = 0; step < ring.size(); ++step) {
    at::Tensor next;
    std::optional<Work> transfer;
    if (step + 1 < ring.size()) {
      next = ring.empty(step + 1, held.options());
      std::vector<P2POp> messages;
      ring.add_messages(messages, held, next, kBlockTag);
      transfer = ring.start(messages);
    }
    rows.add(ring.block(held, step));
    if (transfer) transfer->wait();
    held = next;
  }
  return rows;
}

struct Saved {
  at::Tensor query, key, value, output, log_sum_exp;
};

// Returns the gradients of query, key and value.
variable_list gradients_of(const Call& call, const Saved& saved, const at::Tensor& gradient) {
  const Ring& ring = call.ring;
  AttentionBackward rows(
      call.rows(saved.query, saved.key),
      {.output = saved.output, .log_sum_exp = saved.log_sum_exp, .gradient = gradient});
  at::Tensor held = packed(saved.key, saved.value);
  at::Tensor sum;  // the gradient of the block of the previous step, summed over the ranks so far
  for (int step = 0; step < ring.size(); ++step) {
    at::Tensor next, received;
    std::vector<P2POp> messages;
    if (step + 1 < ring.size()) {
      next = ring.empty(step + 1, held.options());
      ring.add_messages(messages, held, next, kBlockTag);
    }
    if (step > 0) {
      received = ring.empty(step, sum.options());
      ring.add_messages(messages, sum, received, kGradientTag);
    }
    Work transfer = ring.start(messages);
    const auto own = rows.add(ring.block(held, step));
    transfer.wait();
    sum = packed(own.key, own.value);
    if (step > 0) sum.add_(received);
    held = next;
  }
  const at::Tensor complete = ring.empty(0, sum.options());
  std::vector<P2POp> messages;
  ring.add_messages(messages, sum, complete, kGradientTag);
  ring.start(messages).wait();
  const KeyValueBlock of_own = ring.block(complete, 0);
  return {rows.query_gradient().to(saved.query.scalar_type()),
          of_own.key.to(saved.key.scalar_type()), of_own.value.to(saved.value.scalar_type())};
}

struct RingFunction : torch::autograd::Function<RingFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& query,
                            const at::Tensor& key, const at::Tensor& value,
                            const CallPointer& call) {
    const WithoutAutocast without_autocast;
    const AttentionForward rows = attend(*call, {query, key, value});
    at::Tensor output = rows.output().to(query.scalar_type());
    context->save_for_backward({query, key, value, output, rows.log_sum_exp()});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return in_backward_of("ring attention", [&]() -> variable_list {
      if (at::GradMode::is_enabled()) {
        throw Error(ErrorCode::kInvalidArgument,
                    "it has no second derivative, which create_graph needs; ContextForm::kAllToAll "
                    "has one");
      }
      const WithoutAutocast without_autocast;
      const auto call =
          c10::static_intrusive_pointer_cast<Call>(context->saved_data["call"].toCapsule());
      const variable_list saved = context->get_saved_variables();
      variable_list results = gradients_of(*call,
                                           {.query = saved[0],
                                            .key = saved[1],
                                            .value = saved[2],
                                            .output = saved[3],
                                            .log_sum_exp = saved[4]},
                                           gradients[0]);
      results.emplace_back();
      return results;
    });
  }
};

// Copies the stream into the options, so that the backward drops the same weights as the forward
// even if the program changes its stream in between.
AttentionOptions with_own_stream(const AttentionOptions& options) {
  AttentionOptions own = options;
  if (own.dropout) {
    own.dropout->stream = std::make_shared<const DropoutStream>(*options.dropout->stream);
  }
  return own;
}

}  // namespace

at::Tensor ring_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const ContextParallel& context, const AttentionOptions& options) {
  return RingFunction::apply(
      query, key, value,
      c10::make_intrusive<Call>(Ring(context, key, value), with_own_stream(options)));
}

}  // namespace cadre
