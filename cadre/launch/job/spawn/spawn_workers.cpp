#include "cadre/launch/job/spawn/spawn_workers.h"

#include <charconv>
#include <memory>
#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/environment.h"
#include "cadre/core/os/proc/fork/fork_template.h"
#include "cadre/core/os/proc/fork/forked_call.h"
#include "cadre/core/os/proc/guardian.h"
#include "cadre/core/os/proc/inherited.h"
#include "cadre/core/os/proc/signals.h"
#include "cadre/core/os/proc/temporary_folder.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/job_environment.h"
#include "cadre/launch/job/exit_meaning.h"
#include "cadre/launch/job/job.h"

namespace cadre::launch {
namespace {

constexpr int kNoRank = -1;

// A message of the launcher to the process that called spawn_workers(): the rank that has failed,
// or kNoRank, a space and a sentence.
std::string encode(int rank, std::string_view sentence) {
  return cadre::format("{} {}", rank, sentence);
}

SpawnedJobEnd decode(std::string_view message) {
  int rank = kNoRank;
  const auto parsed = std::from_chars(message.data(), message.data() + message.size(), rank);
  const auto num_digits = static_cast<size_t>(parsed.ptr - message.data());
  if (parsed.ec != std::errc() || num_digits == message.size()) return {};
  SpawnedJobEnd end{.failure = std::string(message.substr(num_digits + 1))};
  if (rank != kNoRank) end.failed_rank = rank;
  return end;
}

Result<JobSpec> job_spec(const SpawnedJob& job, const os::MessageToParent& message) {
  JobSpec spec;
  spec.worker_main = job.rank_main;
  spec.on_failure = [&message](Rank rank, const std::string& sentence) {
    message.write(encode(rank.value, sentence));
  };
  spec.arguments = {"spawn"};
  spec.environment = os::read_environment();
  // An outer launcher's file is for failures of its own worker, which this process reports itself.
  if (spec.environment.get("TORCHELASTIC_ERROR_FILE")) {
    spec.environment.set("TORCHELASTIC_ERROR_FILE", "");
  }
  spec.num_workers = job.num_ranks;
  spec.prefix_template = job.prefix;
  spec.stop_grace = kSpawnStopGrace;
  const auto level = parse_log_level(spec.environment.get_or("CADRE_LOG", ""));
  if (!level.ok()) return level.error();
  spec.log_level = *level;
  return spec;
}

// Runs the job in the launcher's two processes, and returns in both.
int run_launcher(const SpawnedJob& job, const os::MessageToParent& message) {
  const auto refuse = [&](const Error& error) {
    message.write(encode(kNoRank, error.message()));
    return 1;
  };
  try {
    const os::Inherited inherited = os::take_over_process();
    auto spec = job_spec(job, message);
    if (!spec.ok()) return refuse(spec.error());
    spec->inherited = inherited;
    os::hold_forwarded_signals();
    const auto folder =
        os::TemporaryFolder::make(spec->environment.get_or("TMPDIR", "/tmp"), "cadre-spawn-");
    if (!folder.ok()) return refuse(folder.error());
    spec->folder = (*folder)->path();
    return os::run_guarded([&](os::Pollable& guardian_gone) {
      const auto system = os::make_native_system();
      const auto code = run_job(*system, *spec, guardian_gone);
      return code.ok() ? *code : refuse(code.error());
    });
  } catch (const Error& error) {
    return refuse(error);
  }
}

}  // namespace

Result<SpawnedJobEnd> spawn_workers(const SpawnedJob& job) {
  if (const int num_threads = os::count_threads(); num_threads != 1) {
    return Error(
        ErrorCode::kInvalidArgument,
        cadre::format("ranks that are processes are copies of this process, and a copy has "
                      "one thread, but this process has {}: call spawn() before the program "
                      "starts threads or computes in parallel, or let the ranks be threads",
                      num_threads));
  }
  const auto called = os::call_in_fork(
      [&](const os::MessageToParent& message) { return run_launcher(job, message); });
  if (!called.ok()) return called.error();
  SpawnedJobEnd end = decode(called->message);
  end.signal = called->signal;
  if (!end.failure.empty() || called->status.is_success()) return end;
  end.failure =
      called->signal != 0
          ? cadre::format("{} has stopped the ranks", os::signal_name(called->signal))
          : cadre::format(
                "the process that started the ranks (pid {}) ended with {}; the ranks were "
                "killed",
                called->pid, exit_name(called->status));
  return end;
}

}  // namespace cadre::launch
