// The command line of `cadre tune`.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument with the option and what was
// expected.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/launch/cli/option_words.h"
#include "cadre/launch/cli/tune/measurement.h"

namespace cadre::cli {

inline constexpr std::string_view kTuneCommand = "cadre tune";

// The options that `cadre tune` has in addition to those of `cadre run`.
inline constexpr std::array kTuneOptions{OptionSpec{"--output", "FILE"},
                                         OptionSpec{"--sizes", "SIZES"},
                                         OptionSpec{"--repetitions", "N"}};

struct TuneOptions {
  std::string output = "cadre-tuning.toml";
  MeasureOptions measured;
};

// Ignores options that are not in kTuneOptions.
Result<TuneOptions> parse_tune_options(const ParsedWords& parsed);

}  // namespace cadre::cli
