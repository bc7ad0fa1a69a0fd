#include "cadre/parallel/pp/stage_messages.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::parallel {
namespace {

at::Tensor words_tensor() {
  return at::empty({static_cast<int64_t>(TensorHeader::kWords)}, at::kLong);
}

// Returns a tensor of one byte for each gradient of a message, which says whether the gradient is
// defined.
at::Tensor flags_tensor(const TensorHeader& header) {
  return at::zeros({static_cast<int64_t>(header.tensors.size())}, at::kByte);
}

bool has_gradients(const TensorHeader& header) {
  return std::ranges::any_of(header.tensors, &TensorHeader::Entry::requires_grad);
}

}  // namespace

StageMessages::StageMessages(PrivateMessages messages, Layout layout)
    : messages_(std::move(messages)), layout_(std::move(layout)) {}

void StageMessages::check_num_messages(const Layout& layout) {
  const int64_t num_tags =
      int64_t{2} * static_cast<int64_t>(layout.rank_of_stage.size()) * layout.num_microbatches;
  if (num_tags > std::numeric_limits<int>::max()) {
    throw Error(ErrorCode::kInvalidArgument,
                format("cadre::Pipeline: {} stages with {} microbatches have {} messages, of which "
                       "each needs a tag of its own, but there are only {} tags",
                       layout.rank_of_stage.size(), layout.num_microbatches, num_tags,
                       std::numeric_limits<int>::max()));
  }
}

void StageMessages::begin(const StepKind& step) {
  clear();
  step_ = step;
  if (!step.has_headers) return;
  std::erase_if(headers_,
                [&](const auto& entry) { return entry.first.is_training == step.is_training; });
}

// A rank whose group has no device receives on the CPU.
c10::Device StageMessages::own_device() const {
  return messages_.group().device().value_or(c10::Device(at::kCPU));
}

int StageMessages::sender_of(const Id& id) const {
  return id.kind == Kind::kForward ? id.stage - 1 : id.stage + 1;
}

int StageMessages::tag_of(const Id& id) const {
  const int num_stages = static_cast<int>(layout_.rank_of_stage.size());
  return 2 * (id.microbatch * num_stages + id.stage) + (id.kind == Kind::kForward ? 0 : 1);
}

StageMessages::HeaderId StageMessages::header_id_of(const Id& id) const {
  return {step_.is_training, id.kind == Kind::kForward ? id.stage - 1 : id.stage, id.microbatch};
}

void StageMessages::put(const Id& id, std::vector<at::Tensor> tensors) {
  arriving_[id] = {.tensors = std::move(tensors)};
}

void StageMessages::announce(const Id& id, const std::vector<at::Tensor>& tensors) {
  TensorHeader header = TensorHeader::of(tensors).value_or_throw();
  if (!step_.has_headers) {
    const auto known = headers_.find(header_id_of(id));
    if (known != headers_.end() && known->second == header) return;
    throw Error(
        ErrorCode::kInvalidArgument,
        format("stage {} returns {} for microbatch {}, where it returned {} for inputs of the same "
               "shapes before; set PipelineOptions::dynamic_shapes if shapes depend on the data",
               id.stage - 1, header.text(), id.microbatch,
               known == headers_.end() ? "nothing" : known->second.text()));
  }
  const at::Tensor words = words_tensor();
  const std::vector<int64_t> encoded = header.encode();
  std::memcpy(words.mutable_data_ptr<int64_t>(), encoded.data(), encoded.size() * sizeof(int64_t));
  send(id, words);
  headers_[header_id_of(id)] = std::move(header);
}

void StageMessages::send(const Id& id, const at::Tensor& tensor) {
  sends_.push_back(messages_.send_async(tensor.detach(), layout_.rank_of_stage[id.stage],
                                        {.tag = tag_of(id), .timeout = step_.timeout}));
}

void StageMessages::send(const Id& id, const std::vector<at::Tensor>& tensors) {
  std::erase_if(sends_, [](const Work& work) { return work.is_completed() && !work.error(); });
  if (id.kind == Kind::kBackward) return send_gradients(id, tensors);
  announce(id, tensors);
  for (const at::Tensor& tensor : tensors) send(id, tensor);
}

void StageMessages::send_gradients(const Id& id, const std::vector<at::Tensor>& gradients) {
  const TensorHeader& header = headers_.at(header_id_of(id));
  if (!has_gradients(header)) return;
  const at::Tensor are_defined = flags_tensor(header);
  for (size_t i = 0; i < gradients.size(); ++i) {
    are_defined.mutable_data_ptr<uint8_t>()[i] = gradients[i].defined() ? 1 : 0;
  }
  send(id, are_defined);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const TensorHeader::Entry& entry = header.tensors[i];
    if (!entry.requires_grad) continue;
    const c10::Device place = entry.is_on_device ? own_device() : c10::Device(at::kCPU);
    send(id, gradients[i].defined()
                 ? gradients[i]
                 : at::zeros(entry.sizes, at::TensorOptions(entry.dtype).device(place)));
  }
}

Work StageMessages::receive(const Id& id, const at::Tensor& tensor) const {
  return messages_.recv_async(tensor, layout_.rank_of_stage[sender_of(id)],
                              {.tag = tag_of(id), .timeout = step_.timeout});
}

const TensorHeader& StageMessages::header_for_receive(const Id& id) {
  const HeaderId header_id = header_id_of(id);
  if (id.kind == Kind::kForward && step_.has_headers) {
    const at::Tensor words = words_tensor();
    receive(id, words).wait();
    headers_[header_id] =
        TensorHeader::decode({words.const_data_ptr<int64_t>(), TensorHeader::kWords})
            .value_or_throw();
  }
  return headers_.at(header_id);
}

void StageMessages::post_receive(const Id& id) {
  const at::NoGradGuard no_grad;
  const TensorHeader& header = header_for_receive(id);
  Arriving arriving{.tensors = header.allocate(own_device())};
  if (id.kind == Kind::kBackward && has_gradients(header)) {
    arriving.are_defined = flags_tensor(header);
    arriving.works.push_back(receive(id, arriving.are_defined));
  }
  for (size_t i = 0; i < header.tensors.size(); ++i) {
    if (id.kind == Kind::kBackward && !header.tensors[i].requires_grad) {
      arriving.tensors[i] = at::Tensor();
      continue;
    }
    arriving.works.push_back(receive(id, arriving.tensors[i]));
  }
  arriving_[id] = std::move(arriving);
}

std::vector<at::Tensor> StageMessages::take(const Id& id) {
  auto node = arriving_.extract(id);
  for (const Work& work : node.mapped().works) work.wait();
  std::vector<at::Tensor> tensors = std::move(node.mapped().tensors);
  if (node.mapped().are_defined.defined()) {
    const auto* const are_defined = node.mapped().are_defined.const_data_ptr<uint8_t>();
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (are_defined[i] == 0) tensors[i] = at::Tensor();
    }
  }
  // Received tensors need requires_grad to be set. Tensors that put() has passed within this rank
  // have it already.
  if (id.kind == Kind::kForward && !node.mapped().works.empty()) {
    const TensorHeader& header = headers_.at(header_id_of(id));
    for (size_t i = 0; i < tensors.size(); ++i) {
      tensors[i].requires_grad_(header.tensors[i].requires_grad);
    }
  }
  return tensors;
}

void StageMessages::finish() {
  for (const Work& work : sends_) work.wait();
  sends_.clear();
}

void StageMessages::clear() {
  arriving_.clear();
  sends_.clear();
}

}  // namespace cadre::parallel
