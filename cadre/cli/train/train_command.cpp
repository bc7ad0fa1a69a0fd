// `cadre train`: starts the trainer, a program of its own that links libtorch, as one or more
// ranks.
#include <array>

#include "cadre/base/format.h"
#include "cadre/cli/command.h"
#include "cadre/cli/option_words.h"
#include "cadre/cli/train/trainer_program.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kTrainCommand = "cadre train";

constexpr std::string_view kTrainHelp =
    R"(cadre train CONFIG.toml [key=value ...] [--nproc-per-node N]

Trains the model that CONFIG.toml describes, on N processes of this host. Values on the command line
go before those of the file; a dotted key names a table's entry.

  cadre train examples/gpt.toml                             one process
  cadre train examples/gpt.toml --nproc-per-node 2          two, with the same result
  cadre train examples/gpt.toml run.steps=500 data.path=corpus.txt
  cadre train examples/gpt.toml --nproc-per-node 8 --plan   which strategy fits

  --nproc-per-node N   processes (default 1)
  --plan               print what each of the N processes would hold in memory and what a step
                       would move, under every strategy, and end; trains nothing, opens no data,
                       and needs no memory for the model
  --json FILE          with --plan: write it to FILE, too, in bytes and with every part
  --print-config       print every key and value of the run, and end
  --help               this text

On a terminal rank 0 shows one line that rewrites itself; other ranks' lines have their rank before
them. Ctrl-C and SIGTERM let the trainer write a snapshot; the same command with run.resume=auto
goes on from it.

)";

constexpr std::string_view kKeysTitle = "Every key that CONFIG.toml or key=value may set:\n\n";

constexpr std::array<OptionSpec, 5> kTrainOptions{
    OptionSpec{"--nproc-per-node", "N"}, OptionSpec{"--plan", ""}, OptionSpec{"--json", "FILE"},
    OptionSpec{"--print-config", ""}, OptionSpec{"--help", "", 'h'}};

// The trainer alone knows its keys, so the second part of the text is what it prints.
int print_help(const Result<std::string>& trainer) {
  const Status can_run = trainer.ok() ? check_libraries(*trainer) : trainer.error();
  if (!can_run.ok()) {
    return print(cadre::format("{}The list of keys is the trainer's: {}\n", kTrainHelp,
                               can_run.error().message()));
  }
  if (const int failed = print(cadre::format("{}{}", kTrainHelp, kKeysTitle)); failed != 0)
    return failed;
  return run_trainer(kTrainCommand, *trainer, {"--print-keys"}, 1);
}

}  // namespace

int train_command(Words words) {
  auto parsed = parse_words(kTrainCommand, kTrainOptions, OtherWords::kAmongOptions, words);
  if (!parsed.ok()) return fail(kTrainCommand, parsed.error().message(), kUsageExitCode);
  const auto num_workers = parse_num_workers(parsed->find("--nproc-per-node"));
  if (!num_workers.ok()) return fail(kTrainCommand, num_workers.error().message(), kUsageExitCode);
  const auto trainer = find_trainer();
  if (parsed->find("--help") != nullptr) return print_help(trainer);
  std::vector<std::string>& trainer_words = parsed->others;
  const GivenOption* const json = parsed->find("--json");
  if (json != nullptr && parsed->find("--plan") == nullptr) {
    return fail(kTrainCommand,
                cadre::format("{} is for --plan; add that, or leave it out", json->text()),
                kUsageExitCode);
  }
  if (const Status checked = check_configuration(kTrainCommand, trainer_words); !checked.ok()) {
    return fail(kTrainCommand, checked.error().message(), kUsageExitCode);
  }
  if (!trainer.ok()) return fail(kTrainCommand, trainer.error().message(), kNotFoundExitCode);
  if (parsed->find("--print-config") != nullptr) {  // the same for any number of processes
    trainer_words.push_back("--print-config");
    return run_trainer(kTrainCommand, *trainer, trainer_words, 1);
  }
  if (parsed->find("--plan") != nullptr) {  // one process works it out for all
    trainer_words.push_back(cadre::format("--plan={}", *num_workers));
    if (json != nullptr) trainer_words.push_back("--json=" + json->value);
    return run_trainer(kTrainCommand, *trainer, trainer_words, 1);
  }
  return run_trainer(kTrainCommand, *trainer, trainer_words, *num_workers);
}

}  // namespace cadre::cli
