// Those of torchrun's flags that ask for what one host and this launcher do not give: each is
// known, and refused with the reason and with what to do instead.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument.
// Source: torch/distributed/run.py of torch 2.13.
#pragma once

#include <span>
#include <string_view>

#include "cadre/base/error.h"
#include "cadre/cli/option_words.h"

namespace cadre::cli {

struct RefusedFlag {
  OptionSpec option;
  std::string_view harmless;  // the value that asks for nothing and is accepted, as an empty one is
  std::string_view reason;    // of the refusal; a sentence after a colon
};

std::span<const RefusedFlag> refused_torchrun_flags();

// An error unless it has the harmless value. REQUIRES: `given` names a refused flag.
Status check_refused_flag(const GivenOption& given);

// --rdzv-conf: those of its keys that change nothing on one host.
Status check_rendezvous_settings(const GivenOption& given);

// --signals-to-handle: the signals that this launcher always handles.
Status check_handled_signals(const GivenOption& given);

}  // namespace cadre::cli
