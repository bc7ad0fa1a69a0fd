// The command line of `cadre tune`.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument with the option and what was
// expected.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/tune/measurement.h"

namespace cadre::cli {

inline constexpr std::string_view kTuneCommand = "cadre tune";

struct TuneOptions {
  bool wants_help = false;
  std::string output = "cadre-tuning.toml";
  MeasureOptions measured;
};

// The words of a command line, divided between the options of `cadre tune` and those of `cadre
// run`.
struct TuneWords {
  std::vector<std::string> own;
  std::vector<std::string> of_run;
};

TuneWords divide_words(Words words);
// Parses the words of `cadre tune` itself.
Result<TuneOptions> parse_tune_options(Words own);

}  // namespace cadre::cli
