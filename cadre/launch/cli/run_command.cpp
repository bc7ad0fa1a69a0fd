// Implements `cadre run`: converts its command line to a JobSpec, the description of a job, and
// runs the job.
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/executable.h"
#include "cadre/core/os/proc/machine.h"
#include "cadre/core/os/proc/output_stream.h"
#include "cadre/core/os/system.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/launch_job.h"
#include "cadre/launch/cli/log_options.h"
#include "cadre/launch/cli/run_options.h"
#include "cadre/launch/cli/scheduler/scheduler_environment.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kRunCommand = "cadre run";

// An address belongs to this host if a socket can listen on it.
Status check_is_this_host(const NamedHost& named) {
  if (named.host == "localhost") return {};
  const auto system = os::make_native_system();
  const auto listener = system->listen({os::Address::Kind::kTcp, named.host, 0});
  if (listener.ok()) return {};
  return Error(
      ErrorCode::kInvalidArgument,
      cadre::format("{}: \"{}\" is not this host, on which the launcher serves the job's "
                    "store: leave it out, or for several hosts start each process yourself, "
                    "with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and one secret "
                    "CADRE_JOB_TOKEN for all",
                    named.given.text(), named.host));
}

// Refuses a `cadre run` that a scheduler has started on several hosts: each of them would start a
// job of its own. --nnodes 1 and --standalone say that this is intended.
Status check_scheduler(const RunOptions& options, const os::Environment& environment) {
  if (options.says_num_nodes) return {};
  const auto start = read_scheduler_start(environment);
  if (!start.ok()) return start.error();
  if (!*start) return {};
  const SchedulerStart& started = **start;
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("{} has started it on {} hosts ({}): {}; give --nnodes 1 if these are "
                             "independent jobs",
                             started.scheduler, started.num_nodes, started.evidence, kOneHostOnly));
}

// Sets the executable and its arguments: the program itself, or Python with the script or module.
Status resolve_program(const RunOptions& options, launch::JobSpec& spec) {
  const std::string search_path = spec.environment.get_or("PATH", "/usr/local/bin:/usr/bin:/bin");
  const std::string& program = options.program.front();
  const bool is_script = options.is_python || (program.ends_with(".py") && !options.no_python);
  if (!is_script && !options.is_module) {
    auto found = os::find_executable(program, search_path);
    if (!found.ok()) return found.error();
    spec.executable = *std::move(found);
    spec.arguments = options.program;
    return {};
  }
  std::error_code failure;
  if (!options.is_module && !std::filesystem::is_regular_file(program, failure)) {
    return Error(ErrorCode::kUnavailable, cadre::format("there is no script \"{}\"", program));
  }
  const std::string python = spec.environment.get_or("PYTHON_EXEC", "python3");
  auto found = os::find_executable(python, search_path);
  if (!found.ok()) return found.error().with_context("to run Python (set PYTHON_EXEC)");
  spec.executable = *std::move(found);
  spec.arguments = {python, "-u"};  // unbuffered, so that each line arrives when it is written
  if (options.is_module) spec.arguments.push_back("-m");
  spec.arguments.insert(spec.arguments.end(), options.program.begin(), options.program.end());
  return {};
}

}  // namespace

int run_command(Words words, const os::Inherited& inherited) {
  const os::Environment environment = os::read_environment();
  const auto options = parse_run_options(words, environment);
  if (!options.ok()) return fail(kRunCommand, options.error().message(), kUsageExitCode);
  if (options->wants_help) return print(run_help());
  for (const std::string& warning : options->warnings) fail(kRunCommand, warning, 0);
  if (const Status checked = check_scheduler(*options, environment); !checked.ok()) {
    return fail(kRunCommand, checked.error().message(), kUsageExitCode);
  }
  for (const NamedHost& host : options->hosts) {
    if (const Status is_here = check_is_this_host(host); !is_here.ok()) {
      return fail(kRunCommand, is_here.error().message(), kUsageExitCode);
    }
  }
  launch::JobSpec spec;
  spec.environment = environment;
  spec.inherited = inherited;
  const auto num_workers = num_workers_of(options->num_workers, os::read_machine_info(environment));
  if (!num_workers.ok()) return fail(kRunCommand, num_workers.error().message(), kUsageExitCode);
  if (options->no_python && options->is_module) {
    return fail(kRunCommand, "--no-python and -m contradict each other", kUsageExitCode);
  }

  const Status has_ranks = check_local_ranks(options->logs, *num_workers);
  if (!has_ranks.ok()) return fail(kRunCommand, has_ranks.error().message(), kUsageExitCode);

  spec.num_workers = *num_workers;
  spec.logs = options->logs;
  spec.run_id = options->run_id;
  spec.role = options->role;
  spec.store_port = options->store_port;
  spec.max_restarts = options->max_restarts;
  if (options->shutdown_timeout) spec.stop_grace = *options->shutdown_timeout;
  spec.prefix_template = options->prefix_template.value_or(
      spec.environment.get_or("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}] "));
  spec.colour_prefix = os::OutputStream(os::OutputStream::Target::kStandardOutput).is_terminal() &&
                       spec.environment.get_or("NO_COLOR", "").empty();
  if (!options->flight_folder.empty()) {
    spec.environment.set("CADRE_FLIGHT_RECORDS", options->flight_folder);
  }
  if (const Status resolved = resolve_program(*options, spec); !resolved.ok()) {
    return fail(kRunCommand, resolved.error().message(), start_failure_code(resolved.error()));
  }
  return launch_job(kRunCommand, std::move(spec));
}

}  // namespace cadre::cli
