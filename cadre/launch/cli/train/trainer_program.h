// Finds and runs the trainer, a separate program that links libtorch, for `cadre train` and `cadre
// verify`.
//
// Threads: the main thread, before any other was started. Blocking: run_trainer() as long as the
// job runs. Errors: kInvalidArgument for the command line, kUnavailable without the trainer or its
// libraries, as one sentence.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/launch/job/job.h"

namespace cadre::cli {

// Checks the configuration file among the trainer's `words` (the file and its overrides), so that a
// mistyped name gives an error of one sentence instead of the report of a failed job. `command` is
// for example "cadre train".
Status check_configuration(std::string_view command, const std::vector<std::string>& words);

// Returns the trainer's path. Relative to this command it is the same in the build tree and after
// installation.
Result<std::string> find_trainer();
Status check_libraries(const std::string& trainer);

struct TrainerRun {
  std::string_view command;  // the name of the command, for example "cadre train"
  std::string trainer;       // the path that find_trainer() has returned
  std::vector<std::string> words;
  // The job, to which run_trainer() adds the program. REQUIRES: `job.environment` is set.
  launch::JobSpec job = {};
  bool is_dry_run = false;
  std::function<int(int)> meaning = {};  // see launch_job()
};

// Runs the trainer and returns the exit code.
int run_trainer(TrainerRun run);

}  // namespace cadre::cli
