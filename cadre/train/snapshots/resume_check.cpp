#include "cadre/train/snapshots/resume_check.h"

#include <map>
#include <set>
#include <string_view>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/train/config/config_fields.h"

namespace cadre::train {
namespace {

using Reasons = std::map<std::string_view, std::string_view>;

const Reasons kRefused = {
    {"data.held_out", "what was held out may have been learned from, or would be"},
    {"optimizer.kind", "the optimizer's states are another's"},
    {"model.kind", "the weights are another model's"},
    {"model.heads", "the same weights in other heads are another model"}};
const Reasons kDoubtful = {
    {"run.seed",
     "the rest of this epoch comes in another order, so samples may come twice or never"},
    {"model.context", "samples are cut anew, so the place in the data is another"}};
const std::set<std::string_view> kOfNoMatter = {"run.name", "run.folder", "run.resume"};

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
    if (then == present || kOfNoMatter.contains(key)) continue;
    if (key == "model.heads" && now.model.kind != "gpt") continue;
    if (const auto refused = kRefused.find(key); refused != kRefused.end()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          cadre::format("{} was {} when the snapshot was written and is {} now: {}; restore "
                        "it, or start anew with run.resume=none",
                        key, then, present, refused->second));
    }
    changes += cadre::format("{}{} {} -> {}", changes.empty() ? "" : ", ", key, then, present);
    if (const auto doubt = kDoubtful.find(key); doubt != kDoubtful.end()) {
      warnings.push_back(cadre::format("warning: {} has changed: {}", key, doubt->second));
    }
  }
  if (!changes.empty()) warnings.insert(warnings.begin(), "changed since: " + changes);
  return warnings;
}

}  // namespace cadre::train
