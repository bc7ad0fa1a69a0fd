// The command line of `cadre run`.
//
// Threads: plain values. Blocking: never. Errors: kInvalidArgument with a sentence that names the
// invalid word or variable and, if there is one, a similar option. Source: torchrun's flags, in
// both spellings, and its PET_ variables and TORCH_ELASTIC_SHUTDOWN_TIMEOUT; a flag takes
// precedence over its variable.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/os/proc/environment.h"
#include "cadre/core/os/proc/machine.h"
#include "cadre/launch/cli/option_words.h"

namespace cadre::cli {

// An option whose value is a host, which must be this one.
struct NamedHost {
  GivenOption given;
  std::string host;
};

struct RunOptions {
  // A number, or auto, gpu, cpu.
  GivenOption num_workers{.name = "--nproc-per-node", .spelling = "--nproc-per-node", .value = "1"};
  bool no_python = false;
  bool is_module = false;
  bool is_python = false;  // for any suffix of the program's name
  bool wants_help = false;
  std::string run_id;
  std::string role = "default";
  uint16_t store_port = 0;  // 0: a free one
  std::vector<NamedHost> hosts;
  std::optional<std::string> prefix_template;
  std::string flight_folder;  // empty: records stay in memory
  std::optional<Duration> shutdown_timeout;
  std::vector<std::string> program;  // and its arguments
  std::vector<std::string> warnings;
};

Result<RunOptions> parse_run_options(Words words, const os::Environment& environment);

// How many workers `--nproc-per-node` means. auto: the GPUs, or the cores where there is no GPU.
Result<int> num_workers_of(const GivenOption& given, const os::MachineInfo& machine);

// The text of `cadre run --help`.
std::string run_help();

}  // namespace cadre::cli
