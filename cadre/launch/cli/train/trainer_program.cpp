#include "cadre/launch/cli/train/trainer_program.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/executable.h"
#include "cadre/core/os/proc/output_stream.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/launch_job.h"
#include "cadre/launch/cli/torch_finder.h"
#include "cadre/launch/job/dry_run.h"
#include "cadre/launch/job/exit_meaning.h"
#include "cadre/launch/job/worker_environment.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kNotBuilt =
    "this build has no libtorch; run `make build` with torch installed (tools/setup installs it)";
constexpr std::string_view kNotInstalled =
    "only a part of Cadre was built or installed; install all of it (cmake --install without "
    "--component core)";

// Returns the path PREFIX/`part`, where PREFIX is the installation or build folder that contains
// this command.
Result<std::filesystem::path> path_in_prefix(std::string_view part) {
  const auto self = os::own_executable();
  if (!self.ok()) return self.error();
  return std::filesystem::path(*self).parent_path().parent_path() / part;
}

// Returns "; the installed example is PATH" if an example configuration with this file name is
// installed; otherwise "".
std::string installed_example(const std::string& path) {
  const auto folder = path_in_prefix("share/cadre/examples");
  if (!folder.ok()) return "";
  const std::filesystem::path example = *folder / std::filesystem::path(path).filename();
  std::error_code failure;
  if (!std::filesystem::is_regular_file(example, failure)) return "";
  return cadre::format("; the installed example is {}", example.string());
}

}  // namespace

Status check_configuration(std::string_view command, const std::vector<std::string>& words) {
  if (words.empty()) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("no configuration; for example: {} examples/gpt.toml", command));
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
                 cadre::format("no configuration before {0}; for example: {1} "
                               "examples/gpt.toml {0}",
                               path, command));
  }
  return Error(ErrorCode::kInvalidArgument, cadre::format("there is no configuration file \"{}\"{}",
                                                          path, installed_example(path)));
}

Result<std::string> find_trainer() {
  const auto trainer = path_in_prefix("libexec/cadre/cadre-train");
  if (!trainer.ok()) return trainer.error();
  std::error_code failure;
  if (!std::filesystem::exists(*trainer, failure)) {
    return Error(ErrorCode::kUnavailable,
                 cadre::format("the trainer {} does not exist: {}", trainer->string(),
                               built_with_torch() ? kNotInstalled : kNotBuilt));
  }
  return trainer->string();
}

int run_trainer(TrainerRun run) {
  launch::JobSpec& spec = run.job;
  spec.executable = run.trainer;
  spec.arguments = std::move(run.words);
  spec.arguments.insert(spec.arguments.begin(), "cadre-train");
  launch::keep_freed_memory(spec.environment);
  spec.final_exit_codes = {launch::kReportedUsageExitCode};
  spec.is_rank0_raw = true;
  spec.reported_exit_codes = {launch::kReportedUsageExitCode, launch::kReportedFailureExitCode,
                              launch::kReportedDeviationExitCode};
  const auto library_path = trainer_library_path(run.trainer, spec.environment);
  if (!library_path.ok())
    return fail(run.command, library_path.error().message(), kNotFoundExitCode);
  if (*library_path) spec.environment.set("LD_LIBRARY_PATH", **library_path);
  if (os::OutputStream(os::OutputStream::Target::kStandardOutput).is_terminal()) {
    spec.environment.set("CADRE_PROGRESS", "terminal");
  }
  if (run.is_dry_run) return print(launch::dry_run_text(spec));
  return launch_job(run.command, std::move(spec), run.meaning);
}

Status check_libraries(const std::string& trainer) {
  const auto library_path = trainer_library_path(trainer, os::read_environment());
  return library_path.ok() ? Status() : library_path.error();
}

}  // namespace cadre::cli
