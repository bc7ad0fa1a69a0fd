#include "cadre/launch/cli/launch_job.h"

#include "cadre/core/os/proc/guardian.h"
#include "cadre/core/os/proc/temporary_folder.h"
#include "cadre/core/rendezvous/job_environment.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/flight_folder.h"

namespace cadre::cli {

int start_failure_code(const Error& error) {
  return error.code() == ErrorCode::kUnavailable ? kNotFoundExitCode : kNotExecutableExitCode;
}

int launch_job(std::string_view command, launch::JobSpec spec,
               const std::function<int(int)>& meaning) {
  const auto log_level = parse_log_level(spec.environment.get_or("CADRE_LOG", ""));
  if (!log_level.ok()) return fail(command, log_level.error().message(), kUsageExitCode);
  spec.log_level = *log_level;
  if (const Status prepared = prepare_flight_folder(spec.environment); !prepared.ok()) {
    return fail(command, prepared.error().message(), 1);
  }
  os::hold_forwarded_signals();
  // The folder is created before the fork into guardian and supervisor, so that the survivor
  // removes it if the other one is killed.
  const auto folder =
      os::TemporaryFolder::make(spec.environment.get_or("TMPDIR", "/tmp"), "cadre-run-");
  if (!folder.ok()) return fail(command, folder.error().message(), 1);
  spec.folder = (*folder)->path();
  spec.command = "/proc/self/exe";
  const auto body = [&](os::Pollable& guardian_gone) {
    const auto system = os::make_native_system();
    const auto exit_code = launch::run_job(*system, spec, guardian_gone);
    // `meaning` is called in this process, the supervisor, because the guardian exits with its
    // exit code.
    if (exit_code.ok()) return meaning ? meaning(*exit_code) : *exit_code;
    const Error& error = exit_code.error();
    return fail(command, error.message(),
                error.code() == ErrorCode::kInvalidArgument ? kNotExecutableExitCode : 1);
  };
  try {
    return os::run_guarded(body, {.passes_terminal = spec.input_rank.has_value()});
  } catch (const Error& error) {
    return fail(command, error.message(), 1);
  }
}

}  // namespace cadre::cli
