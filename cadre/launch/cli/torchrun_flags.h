// The flags of torchrun that this launcher does not support: each is refused with the reason and an
// alternative.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument.
// Source: torch/distributed/run.py of torch 2.13.
#pragma once

#include <span>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/launch/cli/option_words.h"

namespace cadre::cli {

struct RefusedFlag {
  OptionSpec option;
  std::string_view harmless;  // the value without effect, which is accepted; an empty one is, too
  std::string_view reason;    // reason of the refusal; follows a colon
};

std::span<const RefusedFlag> refused_torchrun_flags();

// Returns an error unless the flag has its harmless value. REQUIRES: `given` is one of the refused
// flags.
Status check_refused_flag(const GivenOption& given);

// Accepts the keys of --rdzv-conf that have no effect on one host.
Status check_rendezvous_settings(const GivenOption& given);

// Accepts the signals of --signals-to-handle, which this launcher always handles.
Status check_handled_signals(const GivenOption& given);

}  // namespace cadre::cli
