// Finds and runs the trainer, a program of its own that links libtorch: for `cadre train` and
// `cadre verify`.
//
// Threads: the main thread, before any other was started. Blocking: run_trainer() as long as the
// job runs. Errors: kInvalidArgument for the command line, kUnavailable without the trainer or its
// libraries, as one sentence.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/cli/option_words.h"

namespace cadre::cli {

// Of --nproc-per-node; 1 where it is not given.
Result<int> parse_num_workers(const GivenOption* given);

// `words` are the trainer's: the configuration and its overrides. Looked at here, so that a
// mistyped name is one sentence and not the failure of a job. `command`: "cadre train".
Status check_configuration(std::string_view command, const std::vector<std::string>& words);

// Beside the folder of this command, in the build tree as in an installed one.
Result<std::string> find_trainer();
Status check_libraries(const std::string& trainer);

// Returns the exit code. `words` are the trainer's own. `meaning`: see launch_job().
int run_trainer(std::string_view command, const std::string& trainer,
                std::vector<std::string> words, int num_workers,
                const std::function<int(int)>& meaning = {});

}  // namespace cadre::cli
