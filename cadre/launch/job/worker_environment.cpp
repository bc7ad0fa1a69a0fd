#include "cadre/launch/job/worker_environment.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/recovery/recovery_files.h"

namespace cadre::launch {

HostRanks ranks_of(const JobIdentity& job) {
  if (job.ranks) return *job.ranks;
  const auto size = static_cast<uint32_t>(job.num_workers);
  return {.num_hosts = 1, .local_world_size = size, .world_size = size, .role_world_size = size};
}

Rank rank_of(const JobIdentity& job, int local_rank) {
  return static_cast<int>(ranks_of(job).first_rank) + local_rank;
}

int local_rank_of(const JobIdentity& job, Rank rank) {
  return rank.value - static_cast<int>(ranks_of(job).first_rank);
}

int world_size(const JobIdentity& job) {
  return static_cast<int>(ranks_of(job).world_size);
}

std::string error_file_of(const JobIdentity& job, int local_rank) {
  if (!job.log_folder.empty()) {
    return cadre::format("{}/attempt_{}/{}/error.json", job.log_folder, job.attempt, local_rank);
  }
  return cadre::format("{}/attempt{}-rank{}.json", job.error_folder, job.attempt, local_rank);
}

std::string recovery_file_of(const JobIdentity& job, int local_rank) {
  return cadre::format("{}/attempt{}-rank{}.recovery", job.error_folder, job.attempt, local_rank);
}

Result<std::string> gpu_of_worker(const os::Environment& inherited, Rank local_rank) {
  const auto visible = inherited.get("CUDA_VISIBLE_DEVICES");
  if (!visible) return cadre::format("{}", local_rank);
  std::string_view rest = *visible;
  for (int skipped = 0; skipped < local_rank && !visible->empty(); ++skipped) {
    const size_t comma = rest.find(',');
    if (comma == std::string_view::npos) {
      return Error(
          ErrorCode::kInvalidArgument,
          cadre::format("CUDA_VISIBLE_DEVICES={} has {} entr{}, so there is no GPU for local rank "
                        "{}; start fewer workers or add GPUs to the variable",
                        *visible, skipped + 1, skipped == 0 ? "y" : "ies", local_rank));
    }
    rest.remove_prefix(comma + 1);
  }
  rest = rest.substr(0, rest.find(','));
  while (rest.starts_with(' ')) rest.remove_prefix(1);
  while (rest.ends_with(' ')) rest.remove_suffix(1);
  if (rest.empty() && !visible->empty()) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("CUDA_VISIBLE_DEVICES={}: the entry for local rank {} is empty; "
                               "remove the superfluous comma or name a GPU",
                               *visible, local_rank));
  }
  return std::string(rest);
}

os::Environment worker_environment(const os::Environment& inherited, const JobIdentity& job,
                                   int local_rank) {
  os::Environment environment = inherited;
  const HostRanks ranks = ranks_of(job);
  const auto set = [&](const char* name, uint64_t value) {
    environment.set(name, cadre::format("{}", value));
  };
  const auto local = static_cast<uint64_t>(local_rank);
  set("RANK", ranks.first_rank + local);
  set("LOCAL_RANK", local);
  set("ROLE_RANK", ranks.first_role_rank + local);
  set("WORLD_SIZE", ranks.world_size);
  set("LOCAL_WORLD_SIZE", ranks.local_world_size);
  set("ROLE_WORLD_SIZE", ranks.role_world_size);
  set("GROUP_RANK", ranks.group_rank);
  set("GROUP_WORLD_SIZE", ranks.num_hosts);
  environment.set("ROLE_NAME", job.role);
  environment.set("MASTER_ADDR", job.store_host);
  environment.set("MASTER_PORT", cadre::format("{}", job.store_port));
  environment.set("TORCHELASTIC_RESTART_COUNT", cadre::format("{}", job.restart_count));
  environment.set("CADRE_JOB_ID", job.job_id);
  environment.set("CADRE_ATTEMPT", cadre::format("{}", job.attempt));
  environment.set("TORCHELASTIC_MAX_RESTARTS", cadre::format("{}", job.max_restarts));
  environment.set("TORCHELASTIC_RUN_ID", job.run_id);
  environment.set("TORCHELASTIC_USE_AGENT_STORE", "True");
  environment.set("TORCHELASTIC_ERROR_FILE", error_file_of(job, local_rank));
  environment.set(kRecoveryVariable, recovery_file_of(job, local_rank));
  environment.set("TORCH_NCCL_ASYNC_ERROR_HANDLING",
                  inherited.get_or("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"));
  environment.set("CADRE_JOB_TOKEN", job.token.view());
  environment.set("CADRE_STORE_PROTOCOL", "native");
  if (job.has_virtual_local_ranks) {
    environment.set("LOCAL_RANK", "0");
    environment.set("CUDA_VISIBLE_DEVICES", *gpu_of_worker(inherited, local_rank));
  }
  if (!inherited.get("OMP_NUM_THREADS")) {
    int share = job.num_cores / job.num_workers;
    if (!job.cores_of_rank.empty()) {
      const auto& cores = job.cores_of_rank[static_cast<size_t>(local_rank)];
      share = std::min(share, static_cast<int>(cores.size()));
    }
    share = std::max(share, 1);
    environment.set("OMP_NUM_THREADS", cadre::format("{}", share));
  }
  return environment;
}

std::vector<int> signals_ignored_by_workers(std::span<const int> ignored) {
  constexpr std::array kDefault{SIGINT, SIGQUIT, SIGTERM, SIGCHLD};
  std::vector<int> kept;
  std::ranges::copy_if(ignored, std::back_inserter(kept), [&](int signal) {
    return std::ranges::find(kDefault, signal) == kDefault.end();
  });
  return kept;
}

void keep_freed_memory(os::Environment& environment) {
  if (environment.get("GLIBC_TUNABLES")) return;
  environment.set("GLIBC_TUNABLES",
                  "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:"
                  "glibc.malloc.trim_threshold=1099511627776");
}

}  // namespace cadre::launch
