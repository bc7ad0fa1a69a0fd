#include "cadre/parallel/deferred/deferred_init.h"

#include <torch/nn/module.h>

#include <vector>

#include "cadre/parallel/deferred/materialize.h"
#include "cadre/parallel/deferred/recorder.h"
#include "cadre/parallel/deferred/tape.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {

DeferredScope::DeferredScope()
    : outer_(Tape::joined(tape_of_scope())), includes_(c10::DispatchKey::DeferredInit) {
  install_recorder();
  tape_ = outer_ ? outer_ : std::make_shared<Tape>();
  tape_of_scope() = tape_;
}

DeferredScope::~DeferredScope() {
  tape_of_scope() = outer_;
}

void DeferredScope::finish() {
  if (!outer_) Tape::joined(tape_)->end_direct_writes();
}

bool is_deferred(const at::Tensor& tensor) {
  return Tape::storage_of(tensor) != nullptr;
}

namespace {

std::vector<NamedTensor> tensors_of(const torch::nn::Module& module) {
  std::vector<NamedTensor> tensors = distinct_parameters(module);
  for (NamedTensor& buffer : distinct_buffers(module)) tensors.push_back(std::move(buffer));
  return tensors;
}

}  // namespace

void materialize(const torch::nn::Module& module) {
  materialize_tensors("materialize()", tensors_of(module));
}

void materialize(const torch::nn::Module& module, c10::Device device) {
  materialize(module);
  move_tensors(tensors_of(module), device);
}

}  // namespace cadre
