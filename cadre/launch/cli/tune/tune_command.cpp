// `cadre tune`: starts a job whose ranks measure the algorithms of collectives and write a tuning
// file.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/executable.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/launch_job.h"
#include "cadre/launch/cli/run_options.h"
#include "cadre/launch/cli/tune/tune_options.h"
#include "cadre/launch/job/dry_run.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kTuneHelp = R"(cadre tune --nproc-per-node N [options]

Measures all_reduce, broadcast, all_gather and gather with each of their two algorithms, on the hosts
and ranks of a job, and writes the sizes from which the second one is better to a tuning file. Groups
on several hosts use these sizes between the hosts; ranks of one host that share memory need none.

  cadre tune --nproc-per-node 8 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29400 \
             --token-file FILE                     on each host
  CADRE_TUNING_FILE=cadre-tuning.toml cadre run ...    uses the file

Run it with the hosts and the number of ranks that jobs will have, while nothing else uses the
network. It takes about a minute. Only rank 0 reads the file and gives it to the other ranks, so it is
needed on the host of rank 0 alone. A job of another shape uses it, too, after a warning.

Each size is measured several times, with the two algorithms in turn; a time is the median of the
maximum over the ranks. The size that is chosen loses the least: the sum, over all measured sizes, of
the relative time that the other algorithm would save beyond 5%. If the times of an operation differ by
less at every size, its default stays.

Options
  --output FILE      the tuning file, on the host of rank 0 (default: cadre-tuning.toml)
  --sizes SIZES      the sizes in bytes to measure, ascending, such as 1K,64K,1M (default: the powers of
                     two from 1K to 16M)
  --repetitions N    how often each size is measured at most (default 15; fewer if it takes over 1 s)
  --help             this text
and the options of cadre run that say where the ranks run, such as --nproc-per-node and --nnodes:
see cadre run --help.

With all ranks on one host it measures TCP on this host, for groups with the transport kTcp.
The exit code is 0 if the file was written, 2 for an invalid command line, else that of cadre run.
)";

// Returns the words after which the program `cadre` runs a rank with the options of `cadre tune`.
std::vector<std::string> words_of_rank(const ParsedWords& given) {
  std::vector<std::string> words = {std::string(kTuneWorker)};
  for (const GivenOption& option : given.options) {
    if (std::ranges::find(kTuneOptions, option.name, &OptionSpec::name) != kTuneOptions.end()) {
      words.push_back(cadre::format("{}={}", option.name, option.value));
    }
  }
  return words;
}

// Sets the options of the job, and its program: this one, as a rank.
Status configure(RunOptions options, launch::JobSpec& job) {
  if (!options.program.empty()) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("\"{}\" is no option; cadre tune starts no other program",
                               options.program.front()));
  }
  CADRE_RETURN_IF_ERROR(parse_tune_options(options.given));
  auto executable = os::own_executable();
  if (!executable.ok()) return executable.error();
  job.executable = *std::move(executable);
  job.arguments = words_of_rank(options.given);
  job.arguments.insert(job.arguments.begin(), job.executable);
  options.default_prefix = "";
  return configure_job(kTuneCommand, options, job);
}

}  // namespace

int tune_command(Words words, const os::Inherited& inherited) {
  launch::JobSpec job = make_job(inherited);
  const auto options = parse_run_options(
      words, job.environment,
      {.name = kTuneCommand, .own_options = kTuneOptions, .takes_program = false});
  if (!options.ok()) return fail(kTuneCommand, options.error().message(), kUsageExitCode);
  if (options->wants_help) return print(kTuneHelp);
  for (const std::string& warning : options->warnings) fail(kTuneCommand, warning, 0);
  if (const Status configured = configure(*options, job); !configured.ok()) {
    return fail(kTuneCommand, configured.error().message(), kUsageExitCode);
  }
  if (options->is_dry_run) return print(launch::dry_run_text(job));
  return launch_job(kTuneCommand, std::move(job));
}

}  // namespace cadre::cli
