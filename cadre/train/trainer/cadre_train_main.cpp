// The program cadre-train CONFIG.toml [key=value ...]: one process of a training run. `cadre train`
// starts several of them; a process that was started alone is a group of one rank.
#include <ATen/Context.h>
#include <c10/core/Device.h>
#include <signal.h>

#include <CLI/CLI.hpp>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/preemption/preemption.h"
#include "cadre/core/comm/recovery/recovery.h"
#include "cadre/core/os/defaults.h"
#include "cadre/core/os/files/durable_file.h"
#include "cadre/core/os/proc/fork/prepare_restart.h"
#include "cadre/core/os/proc/output_stream.h"
#include "cadre/core/os/proc/signals.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/job_environment.h"
#include "cadre/launch/job/exit_meaning.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/tensor/device/local_device.h"
#include "cadre/tensor/group/caught_error.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/train/trainer/config/agreed_config.h"
#include "cadre/train/trainer/config/common_error.h"
#include "cadre/train/trainer/config/config_file.h"
#include "cadre/train/trainer/planning/config_plan.h"
#include "cadre/train/trainer/planning/plan_report.h"
#include "cadre/train/trainer/strategy/device_support.h"
#include "cadre/train/trainer/strategy/run_layout.h"
#include "cadre/train/trainer/trainer.h"
#include "cadre/train/trainer/verify/verify_config.h"

namespace cadre {
namespace {

// Exit codes that tell the launcher that this process has already printed the error, so that it
// does not print which ranks failed.
constexpr int kUsageExitCode = launch::kReportedUsageExitCode;
constexpr int kReportedExitCode = launch::kReportedFailureExitCode;
constexpr int kDeviationExitCode = launch::kReportedDeviationExitCode;
constexpr int kUsualColumns = 80;
// The longest time between the failure of a rank and the start of the next round: the other ranks
// come to wait, and those that do not are stopped.
constexpr Duration kRecoveryTimeout = std::chrono::minutes(5);
constexpr std::array kStopSignals{SIGINT, SIGHUP};

constexpr const char* kHelp =
    "Trains a model on text or images.\n\n"
    "  cadre train examples/gpt.toml --nproc-per-node 2\n"
    "  cadre train examples/gpt.toml data.path=/home/me/books model.width=256\n"
    "  cadre train examples/gpt.toml run.resume=auto\n"
    "  cadre train examples/mnist.toml data.path=/home/me/mnist\n\n"
    "The results are written to run.folder/run.name: metrics.jsonl, and a folder for each "
    "snapshot.\nCtrl-C, SIGHUP and the signals of schedulers (SIGTERM, SIGUSR1, SIGUSR2) end the "
    "run with a snapshot;\nthe exit code is 75 after a scheduler's. The same command with "
    "run.resume=auto resumes from it. Every key that a file or key=value may set:\n\n";

void print(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

// Returns whether progress is shown on a terminal. If this process writes to a pipe of the
// launcher, the launcher sets CADRE_PROGRESS to say whether its own output is a terminal.
bool shows_on_terminal() {
  const char* progress = std::getenv("CADRE_PROGRESS");
  if (progress != nullptr) return std::string_view(progress) == "terminal";
  using os::OutputStream;
  return OutputStream(OutputStream::Target::kStandardOutput).is_terminal();
}

struct CommandLine {
  std::string config_path;
  std::vector<std::string> overrides;
  bool print_config = false;
  int num_planned = 0;  // the number of processes of --plan; 0 without --plan
  bool verify = false;
  train::VerifyRequest request;
};

int exit_code_of(const Error& error) {
  return error.code() == ErrorCode::kInvalidArgument ? kUsageExitCode : kReportedExitCode;
}

void report(const std::exception& error) {
  std::fprintf(stderr, "cadre-train: %s\n", error.what());
}

// What a process keeps when another one has failed (run.recovery=in_place).
struct Survival {
  std::optional<Recovery> recovery;  // made as soon as the configuration is known
  // The trainer of the failed group, which has the state of its last step; null if there is none.
  std::unique_ptr<train::Trainer> failed;
};

// Writes the newest state that a survivor has in memory as a snapshot, from which all ranks then
// resume as after a restart. Collective.
void rescue_newest_state(const ProcessGroup& world, Survival& survival) {
  const auto& failed = survival.failed;
  const auto newest =
      find_newest_state(world.communicator(), failed ? failed->step_in_memory() : std::nullopt);
  if (newest && newest->rank == world.rank()) {
    try {
      failed->save_state_in_memory();
    } catch (...) {  // the run continues from an earlier snapshot
      std::fprintf(stderr, "cadre-train: warning: the state of step %lld is lost: %s\n",
                   static_cast<long long>(newest->step), caught_error().what());
    }
  }
  survival.failed.reset();
  world.barrier();
}

// Returns the device that run.device names, and makes it the current one.
c10::Device device_of(const train::RunConfig& run) {
  if (run.device == "cpu") return c10::Device(c10::DeviceType::CPU);
  const c10::Device device = local_device();
  if (run.device == "auto" || !device.is_cpu()) return device;
  throw Error(ErrorCode::kUnavailable,
              cadre::format("run.device is cuda, but {}; or set run.device=cpu",
                            device::find_devices(c10::DeviceType::CUDA).reason));
}

// Returns the device for the group. The group is made before the ranks load the configuration
// together, so errors are left to them.
c10::Device device_of_group(const CommandLine& command) {
  try {
    return device_of(train::load_config(command.config_path, command.overrides).run);
  } catch (const std::exception&) {
    // All ranks join the group first; the same call inside it reports the problem on all of them.
    return c10::Device(c10::DeviceType::CPU);
  }
}

// Returns the exit code. After a failure of the group `survival` has what this process keeps.
int train_as_rank_of(const ProcessGroup& world, const CommandLine& command,
                     const os::PendingSignal& stop, Preemption& preemption, os::System& system,
                     Survival& survival) {
  train::Config config;
  c10::Device device(c10::DeviceType::CPU);
  train::on_all_ranks(world, [&] {
    config = train::load_config(command.config_path, command.overrides);
    device = device_of(config.run);
  });
  at::manual_seed(static_cast<uint64_t>(config.run.seed + world.rank()));
  const JobEnvironment job = read_job_environment().value_or_throw();
  if (job.max_restarts > 0) {
    // All ranks recover in the same manner, or none does.
    train::check_common(world, [&] { return train::agreed_config(config); });
    if (config.run.recovery == "in_place") {
      if (!survival.recovery) {
        survival.recovery.emplace(system,
                                  RecoveryOptions{.comes_within = kDefaultOperationTimeout});
      }
      rescue_newest_state(world, survival);
    }
  }
  auto trainer = std::make_unique<train::Trainer>(
      config,
      train::TrainerContext{
          .world = world,
          .system = system,
          .time_in_communication = [world] { return world.communicator().time_in_operations(); },
          .stop_is_requested = [&] { return stop.has_arrived(); },
          .print = print,
          .is_terminal = shows_on_terminal(),
          .num_columns = os::terminal_columns(kUsualColumns),
          .job = job.job_id.empty() ? job.run_id : job.job_id,
          .attempt = job.attempt,
          .device = device,
          .is_preempted = [&] { return preemption.is_requested(); }});
  try {
    const train::TrainResult result = trainer->run();
    return result.was_preempted ? preemption.leave(result.steps) : 0;
  } catch (...) {
    if (survival.recovery && trainer->step_in_memory()) survival.failed = std::move(trainer);
    throw;
  }
}

// Prints the plan (memory and traffic). Runs in one process without a group, and allocates no
// memory for the model.
int run_plan(const CommandLine& command) {
  const train::Config config = train::load_config(command.config_path, command.overrides);
  train::check_layout(config, command.num_planned);
  // A plan of run.device=cuda can be made on a machine without CUDA devices.
  const bool finds_devices = device::find_devices(c10::DeviceType::CUDA).runtime.has_value();
  const train::Processes processes = {
      .count = command.num_planned,
      .per_host = command.num_planned,
      .on_devices = config.run.device == "cuda" || (config.run.device == "auto" && finds_devices)};
  if (processes.on_devices) train::check_device(config, c10::Device(c10::DeviceType::CUDA));
  const ModelSizes model = train::sizes_of_model(config);
  const auto plans = train::plans_of_strategies(config, model, processes);
  print(train::comparison_table(config, model, plans));
  const std::string& path = command.request.json_path;
  if (path.empty()) return 0;
  const std::string json = train::plans_json(config, model, plans);
  const ConstBytes bytes = std::as_bytes(std::span(json));
  const Status written = os::write_file(path, {&bytes, 1});
  if (!written.ok()) throw written.error().with_context("--json");
  return 0;
}

int verify_as_rank_of(const ProcessGroup& world, const CommandLine& command, os::System& system) {
  train::Config config;
  c10::Device device(c10::DeviceType::CPU);
  train::on_all_ranks(world, [&] {
    config = train::load_config(command.config_path, command.overrides);
    device = device_of(config.run);
  });
  train::check_common(world, [&] {
    std::vector<AgreedField> fields = train::agreed_config(config);
    const train::VerifyRequest& request = command.request;
    fields.push_back({"--steps", std::to_string(request.num_steps)});
    fields.push_back({"--dtype", request.dtype});
    for (const std::string& name : request.strategies) fields.push_back({"--strategies", name});
    return fields;
  });
  train::on_all_ranks(
      world, [&] { train::place_replicas(config.parallel, world.communicator().hosts()); });
  const VerifyReport report =
      train::verify_config(config, command.request,
                           {.world = world, .system = system, .print = print, .device = device});
  return report.is_within() ? 0 : kDeviationExitCode;
}

// Runs the command in one group. Returns the exit code; throws the failure of the group.
int run_in_group(const CommandLine& command, const os::PendingSignal& stop, Preemption& preemption,
                 os::System& system, Survival& survival) {
  const ProcessGroup world = init_process_group({.device = device_of_group(command)});
  int exit_code = 0;
  try {
    if (command.verify) {
      exit_code = verify_as_rank_of(world, command, system);
      world.barrier();  // see the barrier below
    } else {
      exit_code = train_as_rank_of(world, command, stop, preemption, system, survival);
    }
  } catch (const train::CommonError& error) {
    if (world.rank() == 0) report(error);
    exit_code = exit_code_of(error);
    // No rank may end before the report is written: the launcher would then end the job.
    world.barrier();
  }
  world.close();
  return exit_code;
}

int run_training(const CommandLine& command) {
  if (command.print_config) {
    print(train::config_text(train::load_config(command.config_path, command.overrides)));
    return 0;
  }
  const os::PendingSignal stop(kStopSignals);
  Preemption preemption;
  const auto system = os::make_native_system();
  Survival survival;
  while (true) {
    try {
      return run_in_group(command, stop, preemption, *system, survival);
    } catch (const Error& error) {
      const bool may_recover = survival.recovery && train::is_group_failure(error) &&
                               survival.recovery->can_recover(error) && !preemption.is_requested();
      if (!may_recover) throw;
      report(error);
    }
    survival.recovery->wait_for_membership(system->deadline_in(kRecoveryTimeout));
  }
}

}  // namespace
}  // namespace cadre

int main(int argc, char** argv) {
  cadre::prepare_restart();
  cadre::CommandLine command;
  CLI::App app(cadre::kHelp + cadre::train::config_text({}, {.explain = true}), "cadre-train");
  app.add_option("config", command.config_path, "a TOML file")->required();
  app.add_option("overrides", command.overrides, "key=value: replaces a value of the file");
  app.add_flag("--print-config", command.print_config, "print every key and its value, and exit");
  app.add_option("--plan", command.num_planned,
                 "print what each of this many processes would hold and what a "
                 "step would transfer, under every strategy, and exit")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--json", command.request.json_path,
                 "with --plan: also write it to this file, as JSON in bytes");
  app.add_flag_callback(
         "--print-keys",
         [] {
           cadre::print(cadre::train::config_text({}, {.explain = true}));
           throw CLI::Success();
         },
         "print every key with its meaning and its default, and exit")
      ->trigger_on_parse();  // runs before CLI11 reports the missing configuration
  app.add_flag("--verify", command.verify, "compare every strategy with one process, and exit")
      ->group("");  // hidden: `cadre verify` passes it, and its help explains it
  app.add_option("--steps", command.request.num_steps)->group("");
  app.add_option("--dtype", command.request.dtype)->group("");
  app.add_option("--strategies", command.request.strategies)->delimiter(',')->group("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : cadre::kUsageExitCode;
  }
  try {
    if (command.num_planned > 0) return cadre::run_plan(command);
    return cadre::run_training(command);
  } catch (const cadre::Error& error) {
    cadre::report(error);
    return command.num_planned > 0 ? cadre::exit_code_of(error) : 1;
  } catch (const std::exception& error) {
    cadre::report(error);
    return 1;
  }
}
