// Implements `cadre run`: converts its command line to a JobSpec, the description of a job, and
// runs the job.
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/executable.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/launch_job.h"
#include "cadre/launch/cli/run_options.h"
#include "cadre/launch/job/dry_run.h"

namespace cadre::cli {
namespace {

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

// `name` begins the error messages. `adapt` changes the options before they are used.
int run(std::string_view name, Words words, const os::Inherited& inherited,
        void (*adapt)(RunOptions& options)) {
  launch::JobSpec spec = make_job(inherited);
  auto options = parse_run_options(words, spec.environment);
  if (!options.ok()) return fail(name, options.error().message(), kUsageExitCode);
  if (options->wants_help) return print(run_help());
  adapt(*options);
  for (const std::string& warning : options->warnings) fail(name, warning, 0);
  if (const Status configured = configure_job(name, *options, spec); !configured.ok()) {
    return fail(name, configured.error().message(), kUsageExitCode);
  }
  if (const Status resolved = resolve_program(*options, spec); !resolved.ok()) {
    return fail(name, resolved.error().message(), start_failure_code(resolved.error()));
  }
  if (options->is_dry_run) return print(launch::dry_run_text(spec));
  return launch_job(name, std::move(spec));
}

// Changes the options to what torchrun does where `cadre run` differs.
void follow_torchrun(RunOptions& options) {
  options.is_python = options.is_python || !(options.no_python || options.is_module);
  options.default_prefix = options.logs.tees.is_empty() ? "" : "[${role_name}${local_rank}]:";
}

}  // namespace

int run_command(Words words, const os::Inherited& inherited) {
  return run("cadre run", words, inherited, [](RunOptions&) {});
}

int torchrun_command(Words words, const os::Inherited& inherited) {
  return run(kTorchrunName, words, inherited, follow_torchrun);
}

}  // namespace cadre::cli
