// What the checks of cadre_device_check have in common.
//
// Threads: one. For tests only.
#pragma once

#include <c10/core/Device.h>
#include <torch/types.h>

#include <string>

#include "cadre/core/base/format.h"
#include "cadre/tensor/device/device_runtime.h"

namespace cadre::device_check {

struct Check {
  c10::Device device;
  device::DeviceRuntime runtime;
  std::string folder;
  bool is_late = false;

  void synchronize() const { torch::zeros({1}, at::device(device)).cpu(); }
};

// What a check has found.
struct Finding {
  bool is_right = true;
  std::string numbers;

  void expect(bool condition, const std::string& text) {
    is_right = is_right && condition;
    numbers +=
        cadre::format("{}{}{}", numbers.empty() ? "" : ", ", condition ? "" : "WRONG: ", text);
  }
};

}  // namespace cadre::device_check
