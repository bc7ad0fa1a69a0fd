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

constexpr std::array<Refusal, 7> kRefusals = {
    {{"parallel.strategy",
      [](const Config& config) {
        const DataStrategy strategy = data_strategy(config.parallel);
        return strategy != DataStrategy::kSingle && strategy != DataStrategy::kDdp;
      },
      "ddp"},
     {"parallel.tensor, .pipeline, .context or .expert",
      [](const Config& config) { return config.parallel.divides_model(); }, "1"},
     {"model.experts", [](const Config& config) { return config.model.experts > 0; }, "0"},
     {"model.dropout_rate",
      [](const Config& config) {
        return config.model.kind == "gpt" && config.model.dropout_rate > 0;
      },
      "0"},
     {"model.checkpoint_activations",
      [](const Config& config) { return config.model.checkpoint_activations != "none"; }, "none"},
     {"run.autocast", [](const Config& config) { return config.run.autocast != "float32"; },
      "float32"},
     {"optimizer.kind", [](const Config& config) { return config.optimizer.kind == "adadelta"; },
      "adamw"}}};

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
