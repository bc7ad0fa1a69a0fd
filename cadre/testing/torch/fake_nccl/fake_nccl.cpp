#include "cadre/testing/torch/fake_nccl/fake_nccl.h"

#include <functional>
#include <memory>

#include "cadre/core/os/proc/shared_library.h"
#include "cadre/testing/core/paths.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/fake_nccl/fake_nccl_control.h"
#include "cadre/testing/torch/late_device/late_device.h"

namespace cadre::testing::fake_nccl {
namespace {

struct Control {
  std::string path;
  AttachFunction attach = nullptr;
  SetFaultsFunction set_faults = nullptr;
  GetCountsFunction get_counts = nullptr;
  FirstMisuseFunction first_misuse = nullptr;
};

Control load_control() {
  Control control{.path = build_path("bin/libcadre_fake_nccl.so")};
  const auto library = os::SharedLibrary::load(control.path, "none");
  require(library.ok(), library.ok() ? "" : library.error().message());
  const auto find = [&](const char* name, auto& function) {
    require(library->find(name, function).ok(), name);
  };
  find("fakeNcclAttach", control.attach);
  find("fakeNcclSetFaults", control.set_faults);
  find("fakeNcclGetCounts", control.get_counts);
  find("fakeNcclFirstMisuse", control.first_misuse);
  static const DeviceFunctions late_device{
      .enqueue =
          [](void* stream, void (*task)(void*), void* argument) {
            late::enqueue_native(stream, [task, argument] { task(argument); });
          },
      .host_address = &late::host_address};
  control.attach(&late_device);
  return control;
}

// The library is loaded once for the process.
const Control& control() {
  static const Control once = load_control();
  return once;
}

}  // namespace

std::string load() {
  late::register_device();
  return control().path;
}

void set_faults(const Faults& faults) {
  control().set_faults(&faults);
}

Counts counts() {
  Counts counts;
  control().get_counts(&counts);
  return counts;
}

std::string first_misuse() {
  return control().first_misuse();
}

}  // namespace cadre::testing::fake_nccl
