// The keys of the configuration as data: name, explanation, address of the value, allowed values.
//
// Threads: plain values. Blocking: never. Lifetime: fields point into the Config from which they
// were made. Errors: check_value() and find_conflict() return texts without file and line, which
// the caller adds.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "cadre/train/trainer/config/config.h"

namespace cadre::train {

struct ConfigField {
  std::string name;  // section and key, such as "model.width"
  std::string meaning;
  std::variant<int64_t*, double*, bool*, std::string*, std::vector<std::string>*> value;
  std::optional<double> min = {};
  std::optional<double> max = {};
  std::vector<std::string> choices = {};  // the allowed texts; if empty, any text is allowed
  bool may_be_empty = true;               // whether an empty text is allowed
};

std::vector<ConfigField> config_fields(Config& config);

// Returns what is wrong with the field's present value, such as "must be at least 1, is 0"; an
// empty text if it is valid.
std::string check_value(const ConfigField& field);

// A contradiction between fields: the field that has to be changed, and the reason.
struct ConfigConflict {
  std::string field;
  std::string reason;
};
std::optional<ConfigConflict> find_conflict(const Config& config);
// Returns a conflict between keys that divide the model among processes. find_conflict() calls it,
// too.
std::optional<ConfigConflict> find_layout_conflict(const Config& config);

// Returns whether the key has an effect, given the values of the other keys. For example,
// optimizer.momentum has no effect if optimizer.kind is adamw.
bool has_effect(std::string_view key, const Config& config);

// Returns the key that is most similar to `unknown`, by edit distance.
std::string nearest_key(const std::vector<ConfigField>& fields, std::string_view unknown);

// Returns the value in TOML, such as `0.001`, `"adamw"` or `[".py"]`.
std::string value_text(const ConfigField& field);

// Returns the type of the field's value for messages, such as "an integer" or "a text".
std::string_view type_name(const ConfigField& field);

}  // namespace cadre::train
