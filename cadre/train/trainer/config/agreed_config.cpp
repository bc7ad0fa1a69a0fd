#include "cadre/train/trainer/config/agreed_config.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "cadre/train/trainer/config/config_fields.h"

namespace cadre::train {
namespace {

constexpr std::array<std::string_view, 4> kPaths = {"data.path", "model.weights", "run.folder",
                                                    "run.resume"};

}  // namespace

std::vector<AgreedField> agreed_config(Config config) {
  if (config.parallel.offload != "none") config.parallel.offload = "a folder";
  std::vector<AgreedField> agreed;
  for (const ConfigField& field : config_fields(config)) {
    if (std::ranges::find(kPaths, field.name) != kPaths.end()) continue;
    agreed.push_back({.name = field.name, .value = value_text(field)});
  }
  return agreed;
}

}  // namespace cadre::train
