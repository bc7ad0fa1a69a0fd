// Checks the options whose value is an output path. Commands do this before they start any worker,
// because a mistyped path must not lose the report of a long job at its end.
//
// Threads: any. Blocking: for the time of the file system. Errors: kInvalidArgument, whose message
// names the option.
#pragma once

#include "cadre/core/base/error.h"
#include "cadre/launch/cli/option_words.h"

namespace cadre::cli {

// Accepts a file in a folder that exists: a new file, or a regular file, which will be replaced.
// Does nothing if `given` is null.
Status check_output_file(const GivenOption* given);

// Accepts a folder, and creates it if it does not exist.
Status check_output_folder(const GivenOption& given);

}  // namespace cadre::cli
