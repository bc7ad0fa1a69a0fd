// Reads a configuration from a TOML file and from `key=value` overrides.
//
// Threads: any. Blocking: reads one file. Errors: kInvalidArgument with "file:line: " (or "command
// line: ") before what is wrong and, for an unknown key, the nearest right one.
#pragma once

#include <string>
#include <vector>

#include "cadre/train/config/config.h"

namespace cadre::train {

// Overrides win over the file, later ones over earlier ones: "model.width=256", "data.path=/tmp/a".
// A text needs no quotes in an override.
Config load_config(const std::string& path, const std::vector<std::string>& overrides);

// Of what config_text() gave; `origin` stands for the file in errors.
Config parse_config(const std::string& text, const std::string& origin);

// All keys and values as a TOML file that load_config reads back; with `explain`, each key has its
// meaning and its bounds above it.
struct ConfigTextOptions {
  bool explain = false;
};
std::string config_text(const Config& config, const ConfigTextOptions& options = {});

}  // namespace cadre::train
