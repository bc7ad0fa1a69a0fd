// The flags of torchrun that this launcher does not support: each is an error that names the reason
// and an alternative.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument.
// Source: torch/distributed/run.py of torch 2.13.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/launch/cli/option_words.h"
#include "cadre/launch/cli/run_options.h"

namespace cadre::cli {

struct RefusedFlag {
  OptionSpec option;
  // The value that has no effect in torchrun either. It is accepted, and so is an empty value.
  std::string_view harmless;
  std::string_view reason;  // says why the flag is not supported; follows a colon
};

std::span<const RefusedFlag> refused_torchrun_flags();

// Returns an error unless the flag has its harmless value. REQUIRES: `given` is one of the
// unsupported flags.
Status check_refused_flag(const GivenOption& given);

// Accepts the keys of --rdzv-conf that have no effect on one host.
Status check_rendezvous_settings(const GivenOption& given);

// Reads the settings of --rdzv-conf for a job on several hosts: times in seconds, is_host, and
// on_half=stop|continue, which torchrun does not have; with --rdzv-backend etcd also how to reach
// it. Settings of torchrun that have no meaning here are ignored.
Status take_rendezvous_settings(const GivenOption& given, RunOptions& options);

// Parses the value of --signals-to-handle.
Result<std::vector<int>> parse_stop_signals(const GivenOption& given);

}  // namespace cadre::cli
