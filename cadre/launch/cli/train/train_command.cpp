// `cadre train`: starts the trainer, a separate program that links libtorch, as the ranks of a job.
#include <array>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/machine.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/launch_job.h"
#include "cadre/launch/cli/option_words.h"
#include "cadre/launch/cli/path_options.h"
#include "cadre/launch/cli/run_options.h"
#include "cadre/launch/cli/train/trainer_program.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kTrainCommand = "cadre train";

constexpr std::string_view kTrainHelp =
    R"(cadre train CONFIG.toml [key=value ...] [--nproc-per-node N] [options of cadre run]

Trains the model that CONFIG.toml describes, on N processes of this host or of each of several hosts.
Values on the command line go before those of the file; a dotted key names a table's entry.

  cadre train examples/gpt.toml                             one process
  cadre train examples/gpt.toml --nproc-per-node 2          two processes, with the same result
  cadre train examples/gpt.toml run.steps=500 data.path=corpus.txt
  cadre train examples/gpt.toml --nproc-per-node 8 --plan   which strategy fits

Two hosts, of which node0 is one: this line on each of them. All must share the disk of run.folder.
  cadre train examples/gpt.toml --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d \
      --rdzv-endpoint node0:29400 --token-file job.token

  --nproc-per-node N   processes of this host: a number, auto, gpu or cpu (default 1)
  --max-restarts N     how often all processes are started again after one of them has failed
                       (default 0); they continue from the last snapshot that the run has written
  --plan               print what each of the N processes would hold in memory and what a step
                       would transfer, under every strategy, and exit; does not train or open data,
                       and needs no memory for the model
  --json FILE          with --plan: also write it to FILE, as JSON in bytes and with every unit
  --print-config       print every key of the run and its value, and exit
  --help               this text
  All other options of cadre run about the job, its hosts and its output are accepted, too, with the
  same meaning (cadre run --help); not -m, --no-python and --run-path, as the program is the trainer.

On a terminal rank 0 rewrites one line in place; the lines of other ranks begin with their rank.
On Ctrl-C and on the signals of schedulers (SIGTERM, SIGUSR1, SIGUSR2) the trainer writes a snapshot
and ends, after a scheduler's signal with exit code 75; the same command with run.resume=auto resumes
from it.

)";

constexpr std::string_view kKeysTitle = "Every key that CONFIG.toml or key=value may set:\n\n";

constexpr std::array kOwnOptions{OptionSpec{"--plan", ""}, OptionSpec{"--json", "FILE"},
                                 OptionSpec{"--print-config", ""}};

// Prints the options of the command. The trainer then prints the keys of the configuration, which
// only it knows.
int print_help(const Result<std::string>& trainer, const os::Inherited& inherited) {
  const Status can_run = trainer.ok() ? check_libraries(*trainer) : trainer.error();
  if (!can_run.ok()) {
    return print(cadre::format("{}The trainer, which lists the keys, is not available: {}\n",
                               kTrainHelp, can_run.error().message()));
  }
  if (const int failed = print(cadre::format("{}{}", kTrainHelp, kKeysTitle)); failed != 0)
    return failed;
  return run_trainer({.command = kTrainCommand,
                      .trainer = *trainer,
                      .words = {"--print-keys"},
                      .job = make_job(inherited)});
}

// Checks the options of this command and the words for the trainer.
Status check(const RunOptions& options) {
  const GivenOption* const plan = options.given.find("--plan");
  const GivenOption* const json = options.given.find("--json");
  if (json != nullptr && plan == nullptr) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("{} needs --plan; add --plan, or leave it out", json->text()));
  }
  if (plan != nullptr && options.max_hosts > 1) {
    return Error(
        ErrorCode::kInvalidArgument,
        cadre::format("--plan computes the memory of processes on one host, and not of {}: "
                      "give --nnodes 1",
                      options.max_hosts));
  }
  CADRE_RETURN_IF_ERROR(check_output_file(json));
  return check_configuration(kTrainCommand, options.program);
}

// Completes the run: one process prints the configuration or the plan, or a job trains.
Status configure(const RunOptions& options, TrainerRun& run) {
  if (options.given.find("--print-config") != nullptr) {
    run.words.emplace_back("--print-config");
    return {};
  }
  if (options.given.find("--plan") == nullptr) {
    run.is_dry_run = options.is_dry_run;
    return configure_job(kTrainCommand, options, run.job);
  }
  const auto num_workers =
      num_workers_of(options.num_workers, os::read_machine_info(run.job.environment));
  if (!num_workers.ok()) return num_workers.error();
  run.words.push_back(cadre::format("--plan={}", *num_workers));
  const GivenOption* const json = options.given.find("--json");
  if (json != nullptr) run.words.push_back("--json=" + json->value);
  return {};
}

}  // namespace

int train_command(Words words, const os::Inherited& inherited) {
  const auto refuse = [](const Error& error) {
    return fail(kTrainCommand, error.message(), kUsageExitCode);
  };
  TrainerRun run = {.command = kTrainCommand, .job = make_job(inherited)};
  auto options = parse_run_options(
      words, run.job.environment,
      {.name = kTrainCommand, .own_options = kOwnOptions, .takes_program = false});
  if (!options.ok()) return refuse(options.error());
  const auto trainer = find_trainer();
  if (options->wants_help) return print_help(trainer, inherited);
  for (const std::string& warning : options->warnings) fail(kTrainCommand, warning, 0);
  if (const Status checked = check(*options); !checked.ok()) return refuse(checked.error());
  run.words = options->program;
  if (const Status configured = configure(*options, run); !configured.ok()) {
    return refuse(configured.error());
  }
  if (!trainer.ok()) return fail(kTrainCommand, trainer.error().message(), kNotFoundExitCode);
  run.trainer = *trainer;
  return run_trainer(std::move(run));
}

}  // namespace cadre::cli
