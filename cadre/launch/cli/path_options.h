// Options whose value is a path that a command or its workers write, checked before anything runs:
// the report of a long job must not be lost to a mistyped name at its end.
//
// Threads: any. Blocking: looks at the file system. Errors: kInvalidArgument with the option.
#pragma once

#include "cadre/core/base/error.h"
#include "cadre/launch/cli/option_words.h"

namespace cadre::cli {

// A file in a folder that exists: a new one, or a regular file, which is replaced. `given` may be
// null: then there is nothing to check.
Status check_output_file(const GivenOption* given);

// A folder, which is created if it is missing.
Status check_output_folder(const GivenOption& given);

}  // namespace cadre::cli
