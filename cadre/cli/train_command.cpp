// `cadre train`: starts the trainer, a program of its own that links libtorch, as one or more
// ranks.
#include <array>
#include <filesystem>
#include <system_error>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/cli/command.h"
#include "cadre/cli/launch_job.h"
#include "cadre/cli/option_words.h"
#include "cadre/cli/torch_finder.h"
#include "cadre/launch/exit_meaning.h"
#include "cadre/launch/worker_environment.h"
#include "cadre/os/proc/executable.h"
#include "cadre/os/proc/output_stream.h"

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

constexpr std::string_view kNotBuilt =
    "this build has no libtorch; run `make build` with torch installed (tools/setup installs it)";
constexpr std::string_view kNotInstalled =
    "only a part of Cadre was built or installed; install all of it (cmake --install without "
    "--component core)";

Result<int> parse_num_workers(const GivenOption* given) {
  if (given == nullptr) return 1;
  const auto count = parse_integer(given->value);
  if (count && *count >= 1 && *count <= kMaxWorkers) return *count;
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("{}: expected a number from 1 to {}", given->text(), kMaxWorkers));
}

// `words` are the trainer's: the configuration and its overrides. Looked at here, so that a
// mistyped name is one sentence and not the failure of a job.
Status check_configuration(const std::vector<std::string>& words) {
  if (words.empty()) {
    return Error(ErrorCode::kInvalidArgument,
                 "no configuration; for example: cadre train examples/gpt.toml");
  }
  const std::string& path = words.front();
  std::error_code failure;
  const auto status = std::filesystem::status(path, failure);
  if (std::filesystem::is_directory(status)) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("\"{}\" is a folder, not a configuration file", path));
  }
  if (std::filesystem::exists(status)) return {};
  if (path.find('=') != std::string::npos) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("no configuration before {0}; for example: cadre train "
                               "examples/gpt.toml {0}",
                               path));
  }
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("there is no configuration file \"{}\"", path));
}

// Beside the folder of this command, in the build tree as in an installed one.
Result<std::string> find_trainer() {
  const auto self = os::own_executable();
  if (!self.ok()) return self.error();
  const auto trainer =
      std::filesystem::path(*self).parent_path().parent_path() / "libexec/cadre/cadre-train";
  std::error_code failure;
  if (!std::filesystem::exists(trainer, failure)) {
    return Error(ErrorCode::kUnavailable,
                 cadre::format("the trainer {} is not there: {}", trainer.string(),
                               built_with_torch() ? kNotInstalled : kNotBuilt));
  }
  return trainer.string();
}

// `words` are the trainer's own.
int run_trainer(const std::string& trainer, std::vector<std::string> words, int num_workers) {
  launch::JobSpec spec;
  spec.executable = trainer;
  spec.arguments = std::move(words);
  spec.arguments.insert(spec.arguments.begin(), "cadre-train");
  spec.environment = os::read_environment();
  launch::keep_freed_memory(spec.environment);
  spec.num_workers = num_workers;
  spec.is_rank0_raw = true;
  spec.reported_exit_codes = {launch::kReportedUsageExitCode, launch::kReportedFailureExitCode};
  const auto library_path = trainer_library_path(trainer, spec.environment);
  if (!library_path.ok())
    return fail(kTrainCommand, library_path.error().message(), kNotFoundExitCode);
  if (*library_path) spec.environment.set("LD_LIBRARY_PATH", **library_path);
  if (os::OutputStream(os::OutputStream::Target::kStandardOutput).is_terminal()) {
    spec.environment.set("CADRE_PROGRESS", "terminal");
  }
  return launch_job(kTrainCommand, std::move(spec));
}

Status check_libraries(const std::string& trainer) {
  const auto library_path = trainer_library_path(trainer, os::read_environment());
  return library_path.ok() ? Status() : library_path.error();
}

// The trainer alone knows its keys, so the second part of the text is what it prints.
int print_help(const Result<std::string>& trainer) {
  const Status can_run = trainer.ok() ? check_libraries(*trainer) : trainer.error();
  if (!can_run.ok()) {
    return print(cadre::format("{}The list of keys is the trainer's: {}\n", kTrainHelp,
                               can_run.error().message()));
  }
  if (const int failed = print(cadre::format("{}{}", kTrainHelp, kKeysTitle)); failed != 0)
    return failed;
  return run_trainer(*trainer, {"--print-keys"}, 1);
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
  if (const Status checked = check_configuration(trainer_words); !checked.ok()) {
    return fail(kTrainCommand, checked.error().message(), kUsageExitCode);
  }
  if (!trainer.ok()) return fail(kTrainCommand, trainer.error().message(), kNotFoundExitCode);
  if (parsed->find("--print-config") != nullptr) {  // the same for any number of processes
    trainer_words.push_back("--print-config");
    return run_trainer(*trainer, trainer_words, 1);
  }
  if (parsed->find("--plan") != nullptr) {  // one process works it out for all
    trainer_words.push_back(cadre::format("--plan={}", *num_workers));
    if (json != nullptr) trainer_words.push_back("--json=" + json->value);
    return run_trainer(*trainer, trainer_words, 1);
  }
  return run_trainer(*trainer, trainer_words, *num_workers);
}

}  // namespace cadre::cli
