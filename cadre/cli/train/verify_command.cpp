// `cadre verify`: starts the trainer in its mode that compares every strategy with one process.
#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/base/format.h"
#include "cadre/cli/command.h"
#include "cadre/cli/option_words.h"
#include "cadre/cli/train/trainer_program.h"
#include "cadre/launch/exit_meaning.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kVerifyCommand = "cadre verify";
constexpr std::string_view kDefaultNumWorkers = "2";

constexpr std::string_view kVerifyHelp =
    R"(cadre verify CONFIG.toml [key=value ...] [--nproc-per-node N]

Shows that CONFIG.toml trains the same model on N processes as on one: runs a few steps of the run on
one process, then on N under every strategy (ddp, zero1, zero2, fsdp with each reshard mode and on
mapped shards, hsdp on each mesh of two axes; each with and without gradient accumulation), and
compares losses, gradients and parameters of every step. It writes no snapshot and no metrics.

  cadre verify examples/gpt.toml                            two processes
  cadre verify examples/gpt.toml --nproc-per-node 4 --strategies fsdp,hsdp
  cadre verify examples/gpt.toml --dtype float64 --json report.json
  cadre verify my.toml model.layers=2 run.batch_size=8      a smaller model, to be faster

  --nproc-per-node N   processes (default 2)
  --steps K            steps of each run (default 5); the learning rates are those of the whole run
  --strategies A,B     only these: zero2, fsdp, fsdp/after_forward, hsdp-2x2, ddp/accumulate ...
  --dtype D            float32 (default) or float64, in which rounding is a billion times smaller
  --json FILE          the table for programs
  --help               this text

The table has, for each strategy, the difference from one process that comes nearest to its bound: of
a loss as a share of it, of a gradient or parameter as a share of the tensor's largest value. Where a
bound is exceeded, the parameter, the step and the process are named. Bounds: 1e-5 in float32, 1e-10
in float64; in float32 more where training itself enlarges rounding. docs/guide/verify.md explains
them, and what to look for when a strategy deviates.

Exit code: 0 if every strategy is within its bounds, 1 if one is not, 2 for a command line or a
configuration that makes no sense; anything else: the verification could not be finished.
)";

constexpr std::array<OptionSpec, 6> kVerifyOptions{
    OptionSpec{"--nproc-per-node", "N"}, OptionSpec{"--steps", "K"},
    OptionSpec{"--strategies", "A,B"},   OptionSpec{"--dtype", "D"},
    OptionSpec{"--json", "FILE"},        OptionSpec{"--help", "", 'h'}};

constexpr int kDeviationExitCode = 1;
constexpr int kUnfinishedExitCode = 3;

Status check_values(const ParsedWords& parsed) {
  if (const GivenOption* steps = parsed.find("--steps")) {
    const auto count = parse_integer(steps->value);
    if (!count || *count < 1) {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("{}: expected a number of steps from 1 on", steps->text()));
    }
  }
  if (const GivenOption* dtype = parsed.find("--dtype")) {
    if (dtype->value != "float32" && dtype->value != "float64") {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("{}: expected float32 or float64", dtype->text()));
    }
  }
  for (const char* name : {"--strategies", "--json"}) {
    const GivenOption* given = parsed.find(name);
    if (given == nullptr || !given->value.empty()) continue;
    return Error(ErrorCode::kInvalidArgument, cadre::format("{} needs a value", given->spelling));
  }
  return {};
}

// 1 is for a deviation alone.
int exit_code_of(int job) {
  if (job == launch::kReportedDeviationExitCode) return kDeviationExitCode;
  return job == 1 ? kUnfinishedExitCode : job;
}

}  // namespace

int verify_command(Words words) {
  auto parsed = parse_words(kVerifyCommand, kVerifyOptions, OtherWords::kAmongOptions, words);
  if (!parsed.ok()) return fail(kVerifyCommand, parsed.error().message(), kUsageExitCode);
  if (parsed->find("--help") != nullptr) return print(kVerifyHelp);
  const GivenOption default_count{.name = "--nproc-per-node",
                                  .spelling = "--nproc-per-node",
                                  .value = std::string(kDefaultNumWorkers)};
  const GivenOption* count = parsed->find("--nproc-per-node");
  const auto num_workers = parse_num_workers(count != nullptr ? count : &default_count);
  if (!num_workers.ok()) return fail(kVerifyCommand, num_workers.error().message(), kUsageExitCode);
  if (const Status checked = check_values(*parsed); !checked.ok()) {
    return fail(kVerifyCommand, checked.error().message(), kUsageExitCode);
  }
  if (const Status checked = check_configuration(kVerifyCommand, parsed->others); !checked.ok()) {
    return fail(kVerifyCommand, checked.error().message(), kUsageExitCode);
  }
  const auto trainer = find_trainer();
  if (!trainer.ok()) return fail(kVerifyCommand, trainer.error().message(), kNotFoundExitCode);
  std::vector<std::string> trainer_words = parsed->others;
  trainer_words.emplace_back("--verify");
  for (const char* name : {"--steps", "--strategies", "--dtype", "--json"}) {
    const GivenOption* given = parsed->find(name);
    if (given != nullptr) trainer_words.push_back(cadre::format("{}={}", name, given->value));
  }
  return run_trainer(kVerifyCommand, *trainer, std::move(trainer_words), *num_workers,
                     exit_code_of);
}

}  // namespace cadre::cli
