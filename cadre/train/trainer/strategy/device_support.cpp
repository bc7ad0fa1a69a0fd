#include "cadre/train/trainer/strategy/device_support.h"

#include <c10/core/DeviceType.h>

#include <array>
#include <string>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::train {
namespace {

struct Refusal {
  std::string_view key;
  bool (*applies)(const Config& config);
  std::string_view remedy;  // a value with which the run works on a device
};

constexpr std::array<Refusal, 2> kRefusals = {
    {{"parallel.offload",
      [](const Config& config) {
        return has_units(data_strategy(config.parallel)) && config.parallel.offload != "none";
      },
      "none"},
     {"parallel.form",
      [](const Config& config) {
        return has_units(data_strategy(config.parallel)) && config.parallel.form == "mapped";
      },
      "auto"}}};

}  // namespace

std::string type_name(const c10::Device& device) {
  return c10::DeviceTypeName(device.type(), /*lower_case=*/true);
}

std::string problem_on(const Config& config, const c10::Device& device) {
  if (device.is_cpu()) return {};
  for (const Refusal& refusal : kRefusals) {
    if (!refusal.applies(config)) continue;
    return cadre::format(
        "{}: the value in this configuration works on the CPU only, and the "
        "run uses {}: set {}, or run.device=cpu",
        refusal.key, device.str(), refusal.remedy);
  }
  return {};
}

void check_device(const Config& config, const c10::Device& device) {
  const std::string problem = problem_on(config, device);
  if (!problem.empty()) throw Error(ErrorCode::kInvalidArgument, problem);
}

}  // namespace cadre::train
