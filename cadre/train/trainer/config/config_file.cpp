#include "cadre/train/trainer/config/config_file.h"

#include <toml++/toml.h>
#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/core/os/files/file.h"
#include "cadre/train/trainer/config/config_fields.h"

namespace cadre::train {
namespace {

constexpr size_t kMaxConfigBytes = size_t{1} << 20;
constexpr std::string_view kCommandLine = "command line";
constexpr size_t kMaxDots = 1000;  // the largest number of dots that one line may have
// Keys that have been renamed: the name in earlier versions, and the present name.
constexpr std::array<std::pair<std::string_view, std::string_view>, 1> kRenamedKeys = {
    {{"run.batch_size", "run.global_batch_size"}}};

[[noreturn]] void refuse(std::string_view place, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, cadre::format("{}: {}", place, what));
}

std::optional<std::vector<std::string>> texts_of(const toml::node& node) {
  if (!node.is_array()) return std::nullopt;
  std::vector<std::string> texts;
  for (const toml::node& item : *node.as_array()) {
    const auto text = item.value_exact<std::string>();
    if (!text) return std::nullopt;
    texts.push_back(*text);
  }
  return texts;
}

// Assigns the node's value to the field. Returns false if the node has another type; an integer is
// accepted as a number.
bool assign(const ConfigField& field, const toml::node& node) {
  return std::visit(
      [&](auto* target) {
        using Value = std::remove_cvref_t<decltype(*target)>;
        std::optional<Value> value;
        if constexpr (std::is_same_v<Value, std::vector<std::string>>) {
          value = texts_of(node);
        } else if constexpr (std::is_same_v<Value, double>) {
          if (node.is_number()) value = node.value<double>();
        } else {
          value = node.value_exact<Value>();
        }
        if (value) *target = *value;
        return value.has_value();
      },
      field.value);
}

// Returns the number of the first line with a dotted key of too many parts, or 0. The TOML parser
// recurses for each part of a dotted key, so such a key would overflow the stack.
size_t line_of_overlong_key(const std::string& text) {
  size_t line = 1;
  size_t num_dots = 0;
  for (const char c : text) {
    if (c == '.' && ++num_dots > kMaxDots) return line;
    if (c == '\n') {
      ++line;
      num_dots = 0;
    }
  }
  return 0;
}

// What to do with a key of an earlier version. kRead accepts it: it comes from a snapshot. kRefused
// throws an error that gives the present name: it comes from a user's file.
enum class FormerKeys { kRead, kRefused };

// Assigns values to the fields. Remembers for each field where it was set, for messages.
class ConfigReader {
 public:
  ConfigReader(Config& config, FormerKeys former_keys)
      : fields_(config_fields(config)), former_keys_(former_keys) {}

  void read_file(const std::string& path) {
    read_text(os::read_file(path, kMaxConfigBytes).value_or_throw(), path);
  }

  void read_text(const std::string& text, const std::string& path) {
    toml::table table;
    if (const size_t line = line_of_overlong_key(text); line > 0) {
      refuse(cadre::format("{}:{}", path, line), "a key has too many parts");
    }
    try {
      table = toml::parse(text, path);
    } catch (const toml::parse_error& error) {
      refuse(cadre::format("{}:{}", path, error.source().begin.line),
             std::string(error.description()));
    }
    for (const auto& [section, node] : table) {
      if (!node.is_table()) {
        refuse_table_as_key(section.str(), place_of(path, node));
        read_key(std::string(section.str()), node, place_of(path, node));
        continue;
      }
      for (const auto& [key, value] : *node.as_table()) {
        read_key(cadre::format("{}.{}", section.str(), key.str()), value, place_of(path, value));
      }
    }
  }

  void read_override(const std::string& text) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos) {
      refuse(kCommandLine, cadre::format("'{}' is not an override; expected key=value", text));
    }
    const std::string key = text.substr(0, equals);
    const std::string value = text.substr(equals + 1);
    const ConfigField& field = find(key, kCommandLine);
    places_[key] = kCommandLine;
    if (!is_utf8(value)) {
      refuse(kCommandLine,
             cadre::format("the value of {} is not valid UTF-8, which snapshots and metrics cannot "
                           "contain: use a text or a path in UTF-8",
                           key));
    }
    if (auto* const* target = std::get_if<std::string*>(&field.value)) {
      **target = value;  // used without parsing, because the shell has removed its quotes
    } else {
      read_value(field, value);
    }
    check(field, kCommandLine);
  }

  // Sets each optimizer key that the user has not set to the default of the optimizer's kind.
  void complete(Config& config) {
    const OptimizerConfig defaults = default_optimizer(config.optimizer.kind);
    Config other;
    other.optimizer = defaults;
    const std::vector<ConfigField> values = config_fields(other);
    for (size_t i = 0; i < fields_.size(); ++i) {
      if (!fields_[i].name.starts_with("optimizer.") || places_.contains(fields_[i].name)) continue;
      std::visit([&](auto* target) { *target = *std::get<decltype(target)>(values[i].value); },
                 fields_[i].value);
    }
  }

  // Returns the place where the field was set, such as "file:line"; for a default value, the file.
  std::string place_of_field(const std::string& name, const std::string& path) const {
    const auto found = places_.find(name);
    return found == places_.end() ? path : found->second;
  }

 private:
  static std::string place_of(const std::string& path, const toml::node& node) {
    return cadre::format("{}:{}", path, node.source().begin.line);
  }

  void refuse_table_as_key(std::string_view key, const std::string& place) const {
    const std::string prefix = cadre::format("{}.", key);
    const bool is_table = std::ranges::any_of(
        fields_, [&](const ConfigField& field) { return field.name.starts_with(prefix); });
    if (!is_table) return;
    refuse(place, cadre::format(
                      "{0} is a table: write [{0}] on a line of its own, and its keys below", key));
  }

  const ConfigField& find(const std::string& key, std::string_view place) const {
    const auto renamed =
        std::ranges::find(kRenamedKeys, key, [](const auto& keys) { return keys.first; });
    const bool is_former = renamed != kRenamedKeys.end();
    if (is_former && former_keys_ == FormerKeys::kRefused) {
      refuse(place, cadre::format("{} is now named {}", key, renamed->second));
    }
    const auto found = std::ranges::find(
        fields_, is_former ? renamed->second : std::string_view(key), &ConfigField::name);
    if (found == fields_.end()) {
      refuse(place, cadre::format("unknown key '{}'; did you mean '{}'?", printable(key),
                                  nearest_key(fields_, key)));
    }
    return *found;
  }

  void read_key(const std::string& key, const toml::node& node, const std::string& place) {
    const ConfigField& field = find(key, place);
    places_[key] = place;
    if (!assign(field, node)) {
      refuse(place, cadre::format("{} must be {}", key, type_name(field)));
    }
    check(field, place);
  }

  void read_value(const ConfigField& field, const std::string& value) {
    try {
      toml::table table;
      if (line_of_overlong_key(value) == 0) table = toml::parse(cadre::format("value = {}", value));
      if (table.size() == 1 && assign(field, *table.get("value"))) return;
    } catch (const toml::parse_error&) {
      // The error is reported below, together with the text of the override.
    }
    refuse(kCommandLine,
           cadre::format("{} must be {}, is '{}'", field.name, type_name(field), value));
  }

  // Values of a snapshot are not checked again: they were valid when it was written, perhaps by a
  // version with other bounds.
  void check(const ConfigField& field, std::string_view place) const {
    if (former_keys_ == FormerKeys::kRead) return;
    const std::string problem = check_value(field);
    if (!problem.empty()) refuse(place, cadre::format("{} {}", field.name, problem));
  }

  std::vector<ConfigField> fields_;
  FormerKeys former_keys_;
  std::map<std::string, std::string> places_;
};

std::string bounds_text(const ConfigField& field) {
  if (field.min && field.max) {
    return cadre::format(" ({} to {})", *field.min, *field.max);
  }
  std::string choices;
  for (const std::string& choice : field.choices) choices += (choices.empty() ? "" : ", ") + choice;
  return choices.empty() ? "" : cadre::format(" ({})", choices);
}

}  // namespace

Config load_config(const std::string& path, const std::vector<std::string>& overrides) {
  Config config;
  ConfigReader reader(config, FormerKeys::kRefused);
  reader.read_file(path);
  for (const std::string& text : overrides) reader.read_override(text);
  reader.complete(config);
  if (const auto conflict = find_conflict(config)) {
    refuse(reader.place_of_field(conflict->field, path),
           cadre::format("{} {}", conflict->field, conflict->reason));
  }
  return config;
}

Config parse_config(const std::string& text, const std::string& origin) {
  Config config;
  ConfigReader(config, FormerKeys::kRead).read_text(text, origin);
  return config;
}

std::string config_text(const Config& config, const ConfigTextOptions& options) {
  Config copy = config;
  std::string text;
  std::string section;
  for (const ConfigField& field : config_fields(copy)) {
    const size_t dot = field.name.find('.');
    if (field.name.substr(0, dot) != section) {
      text += section.empty() ? "" : "\n";
      section = field.name.substr(0, dot);
      text += cadre::format("[{}]\n", section);
    }
    if (options.explain) text += cadre::format("# {}{}\n", field.meaning, bounds_text(field));
    text += cadre::format("{} = {}\n", field.name.substr(dot + 1), value_text(field));
  }
  return text;
}

}  // namespace cadre::train
