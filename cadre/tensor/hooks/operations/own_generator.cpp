#include "cadre/tensor/hooks/operations/own_generator.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/os/keep_until_exit.h"

namespace cadre::wrap {
namespace {

// libtorch defines this key for tests of its dispatcher and registers nothing for it.
constexpr c10::DispatchKey kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;
constexpr c10::DispatchKeySet kBelow(c10::DispatchKeySet::FULL_AFTER, kKey);

OwnGenerator*& innermost() {
  // The kernel below, which the dispatcher calls, has no context argument.
  static thread_local OwnGenerator* scope = nullptr;
  return scope;
}

bool is_generator(const c10::Argument& argument) {
  const c10::TypePtr& type = argument.type();
  if (type->kind() == c10::TypeKind::GeneratorType) return true;
  const auto optional = type->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// Returns whether the arguments have a tensor, and all their tensors are on the CPU.
bool is_on_cpu(const torch::jit::Stack& stack, size_t begin) {
  bool has_tensor = false;
  for (size_t i = begin; i < stack.size(); ++i) {
    if (!stack[i].isTensor() || !stack[i].toTensor().defined()) continue;
    if (!stack[i].toTensor().is_cpu()) return false;
    has_tensor = true;
  }
  return has_tensor;
}

// Fills the argument for the generator if the program has left it out.
void draw_from_own(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  const auto& arguments = handle.schema().arguments();
  const size_t begin = stack->size() - arguments.size();
  const auto generator = OwnGenerator::of_thread();
  for (size_t i = 0; generator && i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[begin + i];
    if (is_generator(arguments[i]) && value.isNone() && is_on_cpu(*stack, begin))
      value = *generator;
  }
  handle.redispatchBoxed(keys & kBelow, stack);
}

// Registers the kernel for each operation that takes a generator. All others pass the key at no
// cost.
std::vector<torch::Library> register_kernels() {
  std::vector<torch::Library> libraries;
  libraries.emplace_back(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  libraries.back().fallback(torch::CppFunction::makeFallthrough());
  libraries.emplace_back(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.getNamespace() != "aten") continue;
    const auto handle = c10::Dispatcher::singleton().findSchema(name);
    if (!handle) continue;
    bool draws = false;
    for (const c10::Argument& argument : handle->schema().arguments()) {
      draws = draws || is_generator(argument);
    }
    if (!draws) continue;
    const std::string full =
        name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    libraries.back().impl(full.c_str(),
                          torch::CppFunction::makeFromBoxedFunction<&draw_from_own>());
  }
  return libraries;
}

void install() {
  // The kernels stay until the process ends, because a thread may be inside one at exit.
  static const auto& libraries = os::keep_until_exit(register_kernels());
  static_cast<void>(libraries);
}

}  // namespace

OwnGenerator::OwnGenerator(std::function<at::Generator()> make)
    : make_(std::move(make)), outer_(innermost()), intercepts_((install(), kKey)) {
  innermost() = this;
}

OwnGenerator::~OwnGenerator() {
  innermost() = outer_;
}

const at::Generator& OwnGenerator::generator() {
  if (!generator_) generator_ = make_();
  return *generator_;
}

std::optional<at::Generator> OwnGenerator::of_thread() {
  OwnGenerator* const scope = innermost();
  return scope == nullptr ? std::nullopt : std::optional(scope->generator());
}

}  // namespace cadre::wrap
