// Reads a configuration from a TOML file and from `key=value` overrides.
//
// Threads: any. Blocking: reads one file. Errors: kInvalidArgument that begins with "file:line: "
// or "command line: "; for an unknown key it names the most similar one.
#pragma once

#include <string>
#include <vector>

#include "cadre/train/trainer/config/config.h"

namespace cadre::train {

// Overrides such as "model.width=256" or "data.path=/tmp/a" replace values of the file, and later
// overrides replace earlier ones. A text needs no quotes in an override. A key of an earlier
// version is an error, which gives its present name.
Config load_config(const std::string& path, const std::vector<std::string>& overrides);

// Parses the text of a snapshot. config_text() wrote it, perhaps in an earlier version that had
// other names for some keys. `origin` replaces the file's name in errors.
Config parse_config(const std::string& text, const std::string& origin);

// Returns all keys and values as a TOML file that load_config() can read. With `explain`, comments
// give the meaning and the bounds of each key.
struct ConfigTextOptions {
  bool explain = false;
};
std::string config_text(const Config& config, const ConfigTextOptions& options = {});

}  // namespace cadre::train
