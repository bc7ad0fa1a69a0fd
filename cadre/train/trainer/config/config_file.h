// Reads a configuration from a TOML file and from `key=value` overrides.
//
// Threads: any. Blocking: reads one file. Errors: kInvalidArgument that begins with "file:line: "
// or "command line: "; for an unknown key it names the most similar one.
#pragma once

#include <string>
#include <vector>

#include "cadre/train/trainer/config/config.h"

namespace cadre::train {

// Reads the file, then applies the overrides, such as "model.width=256" or "data.path=/tmp/a", in
// their order. A text needs no quotes in an override. A key that has been renamed is an error,
// which gives the present name.
Config load_config(const std::string& path, const std::vector<std::string>& overrides);

// Parses the configuration in a snapshot, which config_text() wrote, perhaps in an earlier version
// with other names for some keys. Errors contain `origin` in place of a file name.
Config parse_config(const std::string& text, const std::string& origin);

// Returns all keys and values as a TOML file that load_config() can read. With `explain`, comments
// give the meaning and the bounds of each key.
struct ConfigTextOptions {
  bool explain = false;
};
std::string config_text(const Config& config, const ConfigTextOptions& options = {});

}  // namespace cadre::train
