// `cadre verify`: starts the trainer in the mode that trains with every strategy (ddp, fsdp, ...)
// and compares the results with training on one process.
#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/machine.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/launch_job.h"
#include "cadre/launch/cli/option_words.h"
#include "cadre/launch/cli/path_options.h"
#include "cadre/launch/cli/run_options.h"
#include "cadre/launch/cli/train/trainer_program.h"
#include "cadre/launch/job/exit_meaning.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kVerifyCommand = "cadre verify";
constexpr std::string_view kDefaultNumWorkers = "2";

constexpr std::string_view kVerifyHelp =
    R"(cadre verify CONFIG.toml [key=value ...] [--nproc-per-node N]

Verifies that CONFIG.toml trains the same model on N processes as on one: runs a few steps on one
process, then on N processes under every strategy (ddp, zero1, zero2, fsdp with each reshard mode and on
mapped shards, hsdp on each mesh of two axes; each with and without gradient accumulation; for a gpt
also tensor, context and pipeline parallelism, alone and with these), and compares losses, gradients
and parameters of every step. It writes no snapshot and no metrics.

  cadre verify examples/gpt.toml                            two processes
  cadre verify examples/gpt.toml --nproc-per-node 4 --strategies fsdp,hsdp
  cadre verify examples/gpt.toml --dtype float64 --json report.json
  cadre verify my.toml model.layers=2 run.global_batch_size=8   a smaller model is faster

  --nproc-per-node N   processes: a number, auto, gpu or cpu (default 2)
  --steps K            steps of each run (default 5), with the learning rates of the whole run
  --strategies A,B     only these: zero2, fsdp, fsdp/after_forward, hsdp-2x2, ddp/pp-2/tp-2 ...
  --dtype D            float32 (default) or float64, in which rounding is a billion times smaller
  --device D           auto, cpu or cuda, as run.device of the configuration; what is compared with is one
                       process on the same device. Strategies that work on the CPU only are not run there
  --json FILE          write the table to FILE as JSON
  --help               this text

For each strategy the table has the largest difference from one process, in relation to its bound:
of losses relative to the loss, of gradients and parameters relative to the tensor's largest value.
If a bound is exceeded, the table names the parameter, the step and the process. The bounds are 1e-5
in float32 and 1e-10 in float64; in float32 they are larger for runs in which rounding errors grow.
docs/guide/training/verify.md explains the bounds, and how to find the cause of a deviation.

A layout of CONFIG.toml that N processes cannot run is reported as not run. Layouts that a small
change of the model or the batch would allow are named at the end.

Exit code: 0 if every case has run and is within its bounds, 1 if one is not or could not be run, 2 for
an invalid command line or configuration; any other code: the verification could not be completed.
)";

constexpr std::array<OptionSpec, 7> kVerifyOptions{
    OptionSpec{"--nproc-per-node", "N"}, OptionSpec{"--steps", "K"},
    OptionSpec{"--strategies", "A,B"},   OptionSpec{"--dtype", "D"},
    OptionSpec{"--device", "D"},         OptionSpec{"--json", "FILE"},
    OptionSpec{"--help", "", 'h'}};

constexpr int kDeviationExitCode = 1;
constexpr int kUnfinishedExitCode = 3;

Status check_values(const ParsedWords& parsed) {
  if (const GivenOption* steps = parsed.find("--steps")) {
    const auto count = parse_integer(steps->value);
    if (!count || *count < 1) {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("{}: expected a number of steps, at least 1", steps->text()));
    }
  }
  if (const GivenOption* dtype = parsed.find("--dtype")) {
    if (dtype->value != "float32" && dtype->value != "float64") {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("{}: expected float32 or float64", dtype->text()));
    }
  }
  if (const GivenOption* device = parsed.find("--device")) {
    if (device->value != "auto" && device->value != "cpu" && device->value != "cuda") {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("{}: expected auto, cpu or cuda", device->text()));
    }
  }
  const GivenOption* strategies = parsed.find("--strategies");
  if (strategies != nullptr && strategies->value.empty()) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("{} needs a value", strategies->spelling));
  }
  return check_output_file(parsed.find("--json"));
}

// `cadre verify` uses exit code 1 only if a strategy deviates, so a job that ends with 1 for
// another reason gets another code.
int exit_code_of(int job) {
  if (job == launch::kReportedDeviationExitCode) return kDeviationExitCode;
  return job == 1 ? kUnfinishedExitCode : job;
}

}  // namespace

int verify_command(Words words, const os::Inherited& inherited) {
  auto parsed = parse_words(kVerifyCommand, kVerifyOptions, OtherWords::kAmongOptions, words);
  if (!parsed.ok()) return fail(kVerifyCommand, parsed.error().message(), kUsageExitCode);
  if (parsed->find("--help") != nullptr) return print(kVerifyHelp);
  const GivenOption default_count{.name = "--nproc-per-node",
                                  .spelling = "--nproc-per-node",
                                  .value = std::string(kDefaultNumWorkers)};
  const GivenOption* count = parsed->find("--nproc-per-node");
  launch::JobSpec job = make_job(inherited);
  const auto num_workers = num_workers_of(count != nullptr ? *count : default_count,
                                          os::read_machine_info(job.environment));
  if (!num_workers.ok()) return fail(kVerifyCommand, num_workers.error().message(), kUsageExitCode);
  if (const Status checked = check_values(*parsed); !checked.ok()) {
    return fail(kVerifyCommand, checked.error().message(), kUsageExitCode);
  }
  if (const Status checked = check_configuration(kVerifyCommand, parsed->others); !checked.ok()) {
    return fail(kVerifyCommand, checked.error().message(), kUsageExitCode);
  }
  job.num_workers = *num_workers;
  const auto trainer = find_trainer();
  if (!trainer.ok()) return fail(kVerifyCommand, trainer.error().message(), kNotFoundExitCode);
  std::vector<std::string> trainer_words = std::move(parsed->others);
  if (const GivenOption* device = parsed->find("--device")) {
    trainer_words.push_back(cadre::format("run.device={}", device->value));
  }
  trainer_words.emplace_back("--verify");
  for (const char* name : {"--steps", "--strategies", "--dtype", "--json"}) {
    const GivenOption* given = parsed->find(name);
    if (given != nullptr) trainer_words.push_back(cadre::format("{}={}", name, given->value));
  }
  return run_trainer({.command = kVerifyCommand,
                      .trainer = *trainer,
                      .words = std::move(trainer_words),
                      .job = std::move(job),
                      .meaning = exit_code_of});
}

}  // namespace cadre::cli
