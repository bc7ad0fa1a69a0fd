// `cadre train`: starts one or more ranks of the trainer, a separate program that links libtorch.
#include <array>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/option_words.h"
#include "cadre/launch/cli/path_options.h"
#include "cadre/launch/cli/run_options.h"
#include "cadre/launch/cli/train/trainer_program.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kTrainCommand = "cadre train";

constexpr std::string_view kTrainHelp =
    R"(cadre train CONFIG.toml [key=value ...] [--nproc-per-node N]

Trains the model that CONFIG.toml describes, on N processes of this host. Values on the command line
go before those of the file; a dotted key names a table's entry.

  cadre train examples/gpt.toml                             one process
  cadre train examples/gpt.toml --nproc-per-node 2          two processes, with the same result
  cadre train examples/gpt.toml run.steps=500 data.path=corpus.txt
  cadre train examples/gpt.toml --nproc-per-node 8 --plan   which strategy fits

  --nproc-per-node N   processes (default 1)
  --max-restarts N     how often all processes are started again after one of them has failed
                       (default 0); they continue from the last snapshot that the run has written
  --plan               print what each of the N processes would hold in memory and what a step
                       would transfer, under every strategy, and exit; does not train or open data,
                       and needs no memory for the model
  --json FILE          with --plan: also write it to FILE, as JSON in bytes and with every unit
  --print-config       print every key of the run and its value, and exit
  --help               this text

On a terminal rank 0 rewrites one line in place; the lines of other ranks begin with their rank.
On Ctrl-C and on the signals of schedulers (SIGTERM, SIGUSR1, SIGUSR2) the trainer writes a snapshot
and ends, after a scheduler's signal with exit code 75; the same command with run.resume=auto resumes
from it.

)";

constexpr std::string_view kKeysTitle = "Every key that CONFIG.toml or key=value may set:\n\n";

constexpr std::array<OptionSpec, 6> kTrainOptions{OptionSpec{"--nproc-per-node", "N"},
                                                  OptionSpec{"--max-restarts", "N"},
                                                  OptionSpec{"--plan", ""},
                                                  OptionSpec{"--json", "FILE"},
                                                  OptionSpec{"--print-config", ""},
                                                  OptionSpec{"--help", "", 'h'}};

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
                      .inherited = inherited,
                      .words = {"--print-keys"}});
}

}  // namespace

int train_command(Words words, const os::Inherited& inherited) {
  auto parsed = parse_words(kTrainCommand, kTrainOptions, OtherWords::kAmongOptions, words);
  if (!parsed.ok()) return fail(kTrainCommand, parsed.error().message(), kUsageExitCode);
  const auto num_workers = parse_num_workers(parsed->find("--nproc-per-node"));
  if (!num_workers.ok()) return fail(kTrainCommand, num_workers.error().message(), kUsageExitCode);
  const GivenOption* const restarts = parsed->find("--max-restarts");
  const auto max_restarts = restarts != nullptr ? parse_max_restarts(*restarts) : 0;
  if (!max_restarts.ok())
    return fail(kTrainCommand, max_restarts.error().message(), kUsageExitCode);
  const auto trainer = find_trainer();
  if (parsed->find("--help") != nullptr) return print_help(trainer, inherited);
  const GivenOption* const json = parsed->find("--json");
  if (json != nullptr && parsed->find("--plan") == nullptr) {
    return fail(kTrainCommand,
                cadre::format("{} needs --plan; add --plan, or leave it out", json->text()),
                kUsageExitCode);
  }
  if (const Status checked = check_output_file(json); !checked.ok()) {
    return fail(kTrainCommand, checked.error().message(), kUsageExitCode);
  }
  if (const Status checked = check_configuration(kTrainCommand, parsed->others); !checked.ok()) {
    return fail(kTrainCommand, checked.error().message(), kUsageExitCode);
  }
  if (!trainer.ok()) return fail(kTrainCommand, trainer.error().message(), kNotFoundExitCode);
  TrainerRun run = {.command = kTrainCommand,
                    .trainer = *trainer,
                    .inherited = inherited,
                    .words = std::move(parsed->others)};
  if (parsed->find("--print-config") != nullptr) {  // one process prints it
    run.words.emplace_back("--print-config");
  } else if (parsed->find("--plan") != nullptr) {  // one process computes it for all
    run.words.push_back(cadre::format("--plan={}", *num_workers));
    if (json != nullptr) run.words.push_back("--json=" + json->value);
  } else {
    run.num_workers = *num_workers;
    run.max_restarts = *max_restarts;
  }
  return run_trainer(std::move(run));
}

}  // namespace cadre::cli
