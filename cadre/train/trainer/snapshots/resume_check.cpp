#include "cadre/train/trainer/snapshots/resume_check.h"

#include <map>
#include <set>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/train/trainer/config/config_fields.h"

namespace cadre::train {
namespace {

using Reasons = std::map<std::string_view, std::string_view>;

const Reasons kRefused = {
    {"data.held_out", "the model was or would be trained on held-out data"},
    {"optimizer.kind", "the saved states are those of another optimizer"},
    {"model.kind", "the saved parameters are those of another model"},
    {"model.tied", "the saved parameters are those of another model"},
    {"model.heads", "the same parameters with another number of heads are another model"},
    {"model.experts", "the saved parameters are those of another model"},
    {"model.experts_per_token",
     "the same parameters with another number of chosen experts are another model"}};
const Reasons kWarned = {
    {"run.seed",
     "the rest of this epoch has another order, so some samples are used twice and some never"},
    {"model.context", "samples have other boundaries, so the position in the data has changed"}};
const std::set<std::string_view> kIgnored = {"run.name", "run.folder", "run.resume",
                                             "run.recovery"};

bool keeps_momentum(const OptimizerConfig& optimizer) {
  return (optimizer.kind == "sgd" || optimizer.kind == "rmsprop") && optimizer.momentum > 0;
}

// Returns why the run cannot continue after this key has changed; an empty text if it can.
std::string_view refusal_of(const std::string& key, const Config& before, const Config& now) {
  if (key == "optimizer.momentum" &&
      keeps_momentum(before.optimizer) != keeps_momentum(now.optimizer)) {
    return keeps_momentum(now.optimizer)
               ? "the saved states are those of an optimizer without momentum"
               : "the saved states are those of an optimizer with momentum";
  }
  const auto refused = kRefused.find(key);
  return refused == kRefused.end() ? std::string_view() : refused->second;
}

}  // namespace

std::vector<std::string> check_resumed_config(const Config& before, const Config& now) {
  Config old_values = before;
  Config new_values = now;
  const std::vector<ConfigField> old_fields = config_fields(old_values);
  const std::vector<ConfigField> new_fields = config_fields(new_values);
  std::vector<std::string> warnings;
  std::string changes;
  for (size_t i = 0; i < new_fields.size(); ++i) {
    const std::string& key = new_fields[i].name;
    const std::string then = value_text(old_fields[i]);
    const std::string present = value_text(new_fields[i]);
    if (then == present || kIgnored.contains(key)) continue;
    if (!has_effect(key, before) && !has_effect(key, now)) continue;
    if (const std::string_view refusal = refusal_of(key, before, now); !refusal.empty()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          cadre::format("{} was {} when the snapshot was written and is {} now: {}; restore "
                        "it, or start at step 0 with run.resume=none",
                        key, then, present, refusal));
    }
    changes += cadre::format("{}{} {} -> {}", changes.empty() ? "" : ", ", key, then, present);
    if (const auto warned = kWarned.find(key); warned != kWarned.end()) {
      warnings.push_back(cadre::format("warning: {} has changed: {}", key, warned->second));
    }
  }
  if (!changes.empty()) warnings.insert(warnings.begin(), "changed since the snapshot: " + changes);
  return warnings;
}

}  // namespace cadre::train
