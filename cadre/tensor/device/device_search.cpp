#include "cadre/tensor/device/device_search.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <dlfcn.h>
#include <torch/version.h>

#include <string_view>
#include <typeinfo>

#include "cadre/core/base/format.h"

namespace cadre::device {
namespace {

struct LoadedTorch {
  std::string folder;
  std::string failure;
};

LoadedTorch load_torch() {
  LoadedTorch loaded;
  Dl_info c10_library{};
  if (dladdr(reinterpret_cast<const void*>(&c10::impl::registerDeviceGuard), &c10_library) == 0) {
    loaded.failure = "the folder of libc10.so is not known";
    return loaded;
  }
  const std::string path = c10_library.dli_fname;
  loaded.folder = path.substr(0, path.rfind('/'));
  // The library stays loaded until the process ends: libtorch keeps pointers into it.
  if (dlopen((loaded.folder + "/libtorch.so").c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    loaded.failure = dlerror();
  }
  return loaded;
}

// Loading is an act of the process, so its result is kept for the process.
const LoadedTorch& loaded_torch() {
  static const LoadedTorch once = load_torch();
  return once;
}

// Returns 0 for the placeholder that replaces the guard of a CUDA build without devices when the
// program makes fake tensors, and that counts eight devices. The types are compared by name,
// because a library that hides its symbols has its own std::type_info of the template, which
// dynamic_cast may take for another type.
int count_devices(const c10::impl::DeviceGuardImplInterface& guard) {
  using Placeholder = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;
  const std::string_view type = typeid(guard).name();
  return type == typeid(Placeholder).name() ? 0 : guard.deviceCount();
}

bool is_accelerator(c10::DeviceType type) {
  return type != c10::DeviceType::CPU && type != c10::DeviceType::Meta;
}

}  // namespace

DeviceFacts search_devices(c10::DeviceType type) {
  DeviceFacts facts{.type = type};
  if (!is_accelerator(type)) return facts;
  facts.torch_folder = loaded_torch().folder;
  facts.load_failure = loaded_torch().failure;
  if (!c10::impl::hasDeviceGuardImpl(type)) return facts;
  facts.guard = c10::impl::getDeviceGuardImpl(type);
  facts.num_devices = count_devices(*facts.guard);
  if (type == c10::DeviceType::CUDA) {
    facts.is_known_to_aten = at::detail::getCUDAHooks().hasCUDA();
  }
  return facts;
}

std::vector<c10::DeviceType> loaded_device_types() {
  std::vector<c10::DeviceType> types;
  for (const auto type : {c10::DeviceType::CUDA, c10::DeviceType::PrivateUse1}) {
    if (c10::impl::hasDeviceGuardImpl(type)) types.push_back(type);
  }
  return types;
}

std::string why_none(const DeviceFacts& facts) {
  const std::string name = c10::DeviceTypeName(facts.type, /*lower_case=*/true);
  if (!is_accelerator(facts.type)) return format("{} is not an accelerator", name);
  if (facts.guard == nullptr && !facts.load_failure.empty()) {
    return format("libtorch.so of torch {}, which has the {} devices, was not loaded: {}",
                  TORCH_VERSION, name, facts.load_failure);
  }
  if (facts.guard == nullptr) {
    return format(
        "torch {} in {} is a build without {} devices: install a build that has them, of "
        "the same version",
        TORCH_VERSION, facts.torch_folder, name);
  }
  if (facts.num_devices == 0) {
    return format(
        "torch {} finds no {} device: check its driver, and which devices this process "
        "may see{}",
        TORCH_VERSION, name,
        facts.type == c10::DeviceType::CUDA ? " (nvidia-smi, CUDA_VISIBLE_DEVICES)" : "");
  }
  if (!facts.is_known_to_aten) {
    return format(
        "libtorch looked for {0} devices before Cadre had loaded their library, and does "
        "not look again: search for the {0} devices before torch::manual_seed(), "
        "torch::cuda::is_available(), the first pinned tensor and the first backward",
        name);
  }
  return {};
}

}  // namespace cadre::device
