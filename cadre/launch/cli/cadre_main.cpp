// The `cadre` command. It links only the core, so it starts in milliseconds; the trainer, which
// needs libtorch, is a separate program that it executes.
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/nearest.h"
#include "cadre/core/os/proc/inherited.h"
#include "cadre/launch/cli/command.h"

namespace {

using cadre::cli::Words;

constexpr std::string_view kHelp = R"(cadre COMMAND [options]

  cadre run --nproc-per-node 4 ./train            start a program as the ranks of one job
  cadre train examples/gpt.toml                   train a model from a configuration file
  cadre verify examples/gpt.toml                  compare several processes with one
  cadre trace records                             where a job stopped, from its flight records
  cadre schedule --list                           schedules of a pipeline, to try before building it
  cadre info                                      properties of this machine and this build
  cadre doctor                                    what keeps jobs from running here, and the remedy
  cadre tune --nproc-per-node 8                   measure from which size which algorithm is faster

Commands
  run        start a C++ or Python program several times, with torchrun's environment
  train      train a model from a configuration file, on one or more processes
  verify     compare training under every strategy with training on one process
  trace      read flight records after a failure or during a hang: which rank the others wait for
  schedule   make, check, simulate and draw a schedule of pipeline parallelism
  stack      functions and lines of a worker that crashed, from its crash file
  info       versions, torch, cores, memory, limits, transports
  doctor     check this host, or the network between two hosts
  tune       measure the algorithms of collectives between hosts, and write a tuning file
  help       this text; cadre help COMMAND explains a command
  --version  the version
)";

const std::vector<std::string> kCommands{"run",   "train", "verify", "trace", "schedule",
                                         "stack", "info",  "doctor", "tune",  "help"};

int dispatch(const std::string& command, Words words, const cadre::os::Inherited& inherited);

bool is_help(const std::string& word) {
  return word == "help" || word == "--help" || word == "-h";
}

// "cadre help run" does the same as "cadre run --help".
int help_command(Words words, const cadre::os::Inherited& inherited) {
  if (words.empty() || is_help(words.front())) {
    return cadre::cli::print(kHelp);
  }
  const std::vector<std::string> wants_help{"--help"};
  return dispatch(words.front(), wants_help, inherited);
}

int dispatch(const std::string& command, Words words, const cadre::os::Inherited& inherited) {
  if (command == "run") return cadre::cli::run_command(words, inherited);
  if (command == "train") return cadre::cli::train_command(words, inherited);
  if (command == "verify") return cadre::cli::verify_command(words, inherited);
  if (command == "trace") return cadre::cli::trace_command(words);
  if (command == "schedule") return cadre::cli::schedule_command(words);
  if (command == "stack") return cadre::cli::stack_command(words);
  if (command == "info") return cadre::cli::info_command(words);
  if (command == "doctor") return cadre::cli::doctor_command(words, inherited);
  if (command == "tune") return cadre::cli::tune_command(words, inherited);
  if (command == cadre::cli::kTuneWorker) return cadre::cli::tune_worker_command(words);
  if (is_help(command)) return help_command(words, inherited);
  if (command == "--version" || command == "version") {
    return cadre::cli::print("cadre " CADRE_VERSION "\n");
  }
  const std::string near = cadre::nearest(command, kCommands);
  return cadre::cli::fail(
      "cadre",
      near.empty() ? cadre::format("unknown command \"{}\"; cadre help lists all", command)
                   : cadre::format("unknown command \"{}\"; did you mean \"{}\"?", command, near),
      cadre::cli::kUsageExitCode);
}

// Returns whether the command was started through a link with the name of torchrun.
bool is_torchrun(std::string_view path) {
  return path.substr(path.rfind('/') + 1) == cadre::cli::kTorchrunName;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const cadre::os::Inherited inherited = cadre::os::take_over_process();
    const std::vector<std::string> words(argv + 1, argv + argc);
    if (argc > 0 && is_torchrun(argv[0])) return cadre::cli::torchrun_command(words, inherited);
    if (words.empty()) {
      cadre::cli::print(kHelp);
      return cadre::cli::kUsageExitCode;
    }
    return dispatch(words.front(), Words(words).subspan(1), inherited);
    // The exception is a cadre::Error, or one of the standard library.
  } catch (const std::exception& error) {
    return cadre::cli::fail("cadre", error.what(), 1);
  }
}
