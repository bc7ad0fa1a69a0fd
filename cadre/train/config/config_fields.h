// The keys of the configuration as data: name, meaning, where the value goes, what it may be.
//
// Threads: plain values. Blocking: never. Lifetime: fields point into the Config they were made of.
// Errors: check_value() and check_config() say what is wrong, without a place: the caller knows it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "cadre/train/config/config.h"

namespace cadre::train {

struct ConfigField {
  std::string name;  // "model.width"
  std::string meaning;
  std::variant<int64_t*, double*, bool*, std::string*, std::vector<std::string>*> value;
  std::optional<double> min = {};
  std::optional<double> max = {};
  std::vector<std::string> choices = {};  // of a text; any when empty
};

std::vector<ConfigField> config_fields(Config& config);

// What is wrong with the field's present value: "must be at least 1, is 0"; empty when it is fine.
std::string check_value(const ConfigField& field);

// A contradiction between fields: the name of the field to change, and why. Empty when there is
// none.
struct ConfigConflict {
  std::string field;
  std::string reason;
};
std::optional<ConfigConflict> find_conflict(const Config& config);

// The key that was probably meant: the nearest by edit distance.
std::string nearest_key(const std::vector<ConfigField>& fields, std::string_view unknown);

// As it would stand in a TOML file: `0.001`, `"adamw"`, `[".py"]`.
std::string value_text(const ConfigField& field);

// "an integer", "a text", ...: for messages.
std::string_view type_name(const ConfigField& field);

}  // namespace cadre::train
