// Checks options whose value is a path that a command or its workers write, before anything runs:
// the report of a long job must not be lost at its end because of a mistyped name.
//
// Threads: any. Blocking: for the time of the file system. Errors: kInvalidArgument with the
// option.
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
