// `cadre train`: starts the trainer, a program of its own that links libtorch, as one or more
// ranks.
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/cli/command.h"
#include "cadre/cli/launch_job.h"
#include "cadre/cli/nearest.h"
#include "cadre/cli/torch_finder.h"
#include "cadre/launch/worker_environment.h"
#include "cadre/os/proc/executable.h"
#include "cadre/os/proc/output_stream.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kCommand = "cadre train";
constexpr int kMaxWorkers = 4096;

constexpr std::string_view kHelp = R"(cadre train CONFIG.toml [key=value ...] [--nproc-per-node N]

Trains the model that CONFIG.toml describes, on N processes of this host. Values on the command line
go before those of the file; a dotted key names a table's entry.

  cadre train examples/gpt.toml                             one process
  cadre train examples/gpt.toml --nproc-per-node 2          two, with the same result
  cadre train examples/gpt.toml run.steps=500 data.path=corpus.txt

  --nproc-per-node N   processes (default 1)
  --print-config       print every key and value of the run, and end
  --help               this text

On a terminal rank 0 shows one line that rewrites itself; other ranks' lines have their rank before
them. Ctrl-C and SIGTERM let the trainer write a snapshot; the same command with run.resume=auto
goes on from it.

)";

constexpr std::string_view kKeysTitle = "Every key that CONFIG.toml or key=value may set:\n\n";

struct TrainOptions {
  int num_workers = 1;
  bool wants_help = false;
  bool wants_config = false;
  std::vector<std::string> trainer_words;  // the configuration and its overrides
};

Result<int> parse_num_workers(std::string_view text) {
  int count = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), count);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || count < 1 ||
      count > kMaxWorkers) {
    return Error(
        ErrorCode::kInvalidArgument,
        cadre::format("--nproc-per-node {}: expected a number from 1 to {}", text, kMaxWorkers));
  }
  return count;
}

// The options may stand anywhere; the configuration's own words are the trainer's affair.
Result<TrainOptions> parse_train_options(Words words) {
  const std::vector<std::string> known{"--nproc-per-node", "--print-config", "--help"};
  TrainOptions options;
  for (size_t i = 0; i < words.size(); ++i) {
    const size_t equals = words[i].find('=');
    const std::string name = words[i].substr(0, equals);
    if (name == "--help" || name == "-h") {
      options.wants_help = true;
    } else if (name == "--print-config" || name == "--print_config") {
      options.wants_config = true;
    } else if (name == "--nproc-per-node" || name == "--nproc_per_node") {
      if (equals == std::string::npos && i + 1 == words.size()) {
        return Error(ErrorCode::kInvalidArgument, name + " needs a number");
      }
      const auto count =
          parse_num_workers(equals == std::string::npos ? words[++i] : words[i].substr(equals + 1));
      if (!count.ok()) return count.error();
      options.num_workers = *count;
    } else if (name.starts_with('-')) {
      const std::string near = nearest(name, known);
      return Error(ErrorCode::kInvalidArgument,
                   near.empty()
                       ? cadre::format("unknown option {}; settings are written key=value", name)
                       : cadre::format("unknown option {}; did you mean {}?", name, near));
    } else {
      options.trainer_words.push_back(words[i]);
    }
  }
  return options;
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
                 cadre::format("the trainer {} is not there: this build has no libtorch; run "
                               "`make build` with torch installed (tools/setup installs it)",
                               trainer.string()));
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
  if (const auto path = trainer_library_path(spec.environment)) {
    spec.environment.set("LD_LIBRARY_PATH", *path);
  }
  if (os::OutputStream(os::OutputStream::Target::kStandardOutput).is_terminal()) {
    spec.environment.set("CADRE_PROGRESS", "terminal");
  }
  return launch_job(kCommand, std::move(spec));
}

// The trainer alone knows its keys, so the second part of the text is what it prints.
int print_help(const Result<std::string>& trainer) {
  print(kHelp);
  if (!trainer.ok()) {
    print(cadre::format("The list of keys is the trainer's: {}\n", trainer.error().message()));
    return 0;
  }
  print(kKeysTitle);
  std::fflush(stdout);  // before processes start that share it
  return run_trainer(*trainer, {"--print-keys"}, 1);
}

}  // namespace

int train_command(Words words) {
  auto options = parse_train_options(words);
  if (!options.ok()) return fail(kCommand, options.error().message(), kUsageExitCode);
  const auto trainer = find_trainer();
  if (options->wants_help) return print_help(trainer);
  if (options->trainer_words.empty()) {
    return fail(kCommand, "no configuration; for example: cadre train examples/gpt.toml",
                kUsageExitCode);
  }
  if (!trainer.ok()) return fail(kCommand, trainer.error().message(), kNotFoundExitCode);
  if (options->wants_config) {  // the same for any number of processes
    options->trainer_words.push_back("--print-config");
    return run_trainer(*trainer, options->trainer_words, 1);
  }
  return run_trainer(*trainer, options->trainer_words, options->num_workers);
}

}  // namespace cadre::cli
