#include "cadre/tensor/hooks/device_check.h"

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/agreement.h"

namespace cadre::wrap {
namespace {

bool has_memory(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_meta();
}

}  // namespace

std::optional<std::string> beyond_reach(std::optional<c10::Device> of_group,
                                        std::span<const NamedTensor> tensors) {
  for (const NamedTensor& named : tensors) {
    if (!has_memory(named.tensor)) continue;
    const c10::Device device = named.tensor.device();
    if (device.is_cpu() || device == of_group) continue;
    return format(
        "\"{}\" is on {}, but this rank's device in the group is {}; move the module there, or "
        "initialize the group with InitOptions::device",
        named.name, device.str(), of_group ? of_group->str() : "the CPU");
  }
  return std::nullopt;
}

std::optional<std::string> not_on_one_device(std::span<const NamedTensor> tensors) {
  const NamedTensor* first = nullptr;
  for (const NamedTensor& named : tensors) {
    if (!has_memory(named.tensor)) continue;
    if (first == nullptr) first = &named;
    if (named.tensor.device() == first->tensor.device()) continue;
    return format(
        "\"{}\" is on {} and \"{}\" on {}; move the module to one device with "
        "module->to(device), or wrap its parts",
        first->name, first->tensor.device().str(), named.name, named.tensor.device().str());
  }
  return std::nullopt;
}

void check_devices(std::string_view what, std::span<const NamedTensor> tensors,
                   std::optional<c10::Device> of_group) {
  std::optional<std::string> problem = beyond_reach(of_group, tensors);
  if (!problem) problem = not_on_one_device(tensors);
  if (problem) throw Error(ErrorCode::kInvalidArgument, format("{}: {}", what, *problem));
}

void make_on_all_ranks(const ProcessGroup& group, std::string_view call, c10::Device device,
                       const std::function<void()>& make) {
  if (device.is_cpu()) return make();
  AgreementSubject subject("");
  subject.call = call;
  check_on_all_ranks(group, subject, make);
}

}  // namespace cadre::wrap
