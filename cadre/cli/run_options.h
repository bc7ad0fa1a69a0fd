// The command line of `cadre run`.
//
// Threads: plain values. Blocking: never. Errors: kInvalidArgument with a sentence that names the
// word that is wrong and, where one is near, the right one.
// Source: torchrun's flags, in both spellings (--nproc-per-node, --nproc_per_node).
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/error.h"

namespace cadre::cli {

struct RunOptions {
  std::string num_workers = "1";  // a number, or auto, gpu, cpu
  bool no_python = false;
  bool is_module = false;
  bool wants_help = false;
  std::string run_id;
  std::string role = "default";
  uint16_t master_port = 0;
  std::optional<std::string> prefix_template;
  std::string flight_folder;         // empty: records stay in memory
  double shutdown_timeout_s = -1;    // negative: not given
  std::vector<std::string> program;  // and its arguments
};

Result<RunOptions> parse_run_options(std::span<const std::string> words);

// What `cadre run --help` prints.
std::string_view run_help();

}  // namespace cadre::cli
