#include "cadre/launch/job/worker_environment.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "cadre/core/base/format.h"

namespace cadre::launch {

std::string error_file_of(const JobIdentity& job, Rank rank) {
  if (!job.log_folder.empty()) {
    return cadre::format("{}/attempt_{}/{}/error.json", job.log_folder, job.restart_count, rank);
  }
  return cadre::format("{}/attempt{}-rank{}.json", job.error_folder, job.restart_count, rank);
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
  return std::string(rest);
}

os::Environment worker_environment(const os::Environment& inherited, const JobIdentity& job,
                                   Rank rank) {
  os::Environment environment = inherited;
  const std::string rank_text = cadre::format("{}", rank);
  const std::string size_text = cadre::format("{}", job.num_workers);
  // The local rank, the role's rank and the global rank are equal, because there is one host and
  // one role.
  for (const char* name : {"RANK", "LOCAL_RANK", "ROLE_RANK"}) environment.set(name, rank_text);
  for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"}) {
    environment.set(name, size_text);
  }
  environment.set("GROUP_RANK", "0");
  environment.set("GROUP_WORLD_SIZE", "1");
  environment.set("ROLE_NAME", job.role);
  environment.set("MASTER_ADDR", job.store_host);
  environment.set("MASTER_PORT", cadre::format("{}", job.store_port));
  environment.set("TORCHELASTIC_RESTART_COUNT", cadre::format("{}", job.restart_count));
  environment.set("TORCHELASTIC_MAX_RESTARTS", cadre::format("{}", job.max_restarts));
  environment.set("TORCHELASTIC_RUN_ID", job.run_id);
  environment.set("TORCHELASTIC_USE_AGENT_STORE", "True");
  environment.set("TORCHELASTIC_ERROR_FILE", error_file_of(job, rank));
  environment.set("TORCH_NCCL_ASYNC_ERROR_HANDLING",
                  inherited.get_or("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"));
  environment.set("CADRE_JOB_TOKEN", job.token.view());
  environment.set("CADRE_STORE_PROTOCOL", "native");
  if (job.has_virtual_local_ranks) {
    environment.set("LOCAL_RANK", "0");
    environment.set("CUDA_VISIBLE_DEVICES", *gpu_of_worker(inherited, rank));
  }
  if (!inherited.get("OMP_NUM_THREADS")) {
    int share = job.num_cores / job.num_workers;
    if (!job.cores_of_rank.empty()) {
      const auto& cores = job.cores_of_rank[static_cast<size_t>(rank.value)];
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
