// Checks the options whose value is an output path. Commands do this before they start any worker,
// because a mistyped path must not lose the report of a long job at its end.
//
// Threads: any. Blocking: for the time of the file system. Errors: kInvalidArgument, whose message
// names the option.
#pragma once

#include "cadre/core/base/error.h"
#include "cadre/launch/cli/option_words.h"

namespace cadre::cli {

// Returns an error unless the value names a new or a regular file in an existing folder. A regular
// file will be replaced by the command. Does nothing if `given` is null.
Status check_output_file(const GivenOption* given);

// Accepts a folder, and a path that does not exist, at which the command will create the folder.
// Creates nothing itself.
Status check_output_folder(const GivenOption& given);

}  // namespace cadre::cli
