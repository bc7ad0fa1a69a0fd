#include "cadre/launch/job/worker_environment.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace cadre::launch {
namespace {

TEST(WorkerEnvironment, SharesTheCoresOut) {
  const auto threads = [](int num_workers, int num_cores) {
    const JobIdentity job{.num_workers = num_workers, .num_cores = num_cores};
    return worker_environment({}, job, 0).get("OMP_NUM_THREADS");
  };
  EXPECT_EQ(threads(1, 8), "8");
  EXPECT_EQ(threads(3, 8), "2");
  EXPECT_EQ(threads(16, 8), "1");
}

TEST(WorkerEnvironment, HasNoMoreThreadsThanCoresToWhichItIsBound) {
  const JobIdentity job{
      .num_workers = 2, .num_cores = 8, .cores_of_rank = {{0, 1}, {2, 3, 4, 5, 6, 7}}};
  EXPECT_EQ(worker_environment({}, job, 0).get("OMP_NUM_THREADS"), "2");
  EXPECT_EQ(worker_environment({}, job, 1).get("OMP_NUM_THREADS"), "4");
}

TEST(WorkerEnvironment, KeepsWhatTheUserSet) {
  os::Environment inherited;
  inherited.set("OMP_NUM_THREADS", "5");
  inherited.set("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3");
  inherited.set("LD_LIBRARY_PATH", "/opt/lib");
  inherited.set("RANK", "77");  // the variable of an outer job
  const auto environment = worker_environment(inherited, {.num_workers = 2, .num_cores = 8}, 1);
  EXPECT_EQ(environment.get("OMP_NUM_THREADS"), "5");
  EXPECT_EQ(environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"), "3");
  EXPECT_EQ(environment.get("LD_LIBRARY_PATH"), "/opt/lib");
  EXPECT_EQ(environment.get("RANK"), "1");
}

TEST(WorkerEnvironment, EachAttemptHasItsNumberAndItsFiles) {
  JobIdentity job{.job_id = "00ff",
                  .error_folder = "/tmp/x",
                  .attempt = 3,
                  .restart_count = 2,
                  .max_restarts = 5};
  const auto environment = worker_environment({}, job, 1);
  EXPECT_EQ(environment.get("TORCHELASTIC_RESTART_COUNT"), "2");
  EXPECT_EQ(environment.get("CADRE_ATTEMPT"), "3");
  EXPECT_EQ(environment.get("CADRE_JOB_ID"), "00ff");
  EXPECT_EQ(environment.get("TORCHELASTIC_MAX_RESTARTS"), "5");
  EXPECT_EQ(environment.get("TORCHELASTIC_ERROR_FILE"), "/tmp/x/attempt3-rank1.json");
  EXPECT_EQ(environment.get("CADRE_RECOVERY_FILE"), "/tmp/x/attempt3-rank1.recovery");
  // Recovery files stay on this host.
  job.log_folder = "/server/logs";
  const auto with_logs = worker_environment({}, job, 1);
  EXPECT_EQ(with_logs.get("TORCHELASTIC_ERROR_FILE"), "/server/logs/attempt_3/1/error.json");
  EXPECT_EQ(with_logs.get("CADRE_RECOVERY_FILE"), "/tmp/x/attempt3-rank1.recovery");
}

TEST(WorkerEnvironment, AVirtualLocalRankIsZeroAndSeesOneGpu) {
  const JobIdentity job{.num_workers = 3, .has_virtual_local_ranks = true};
  os::Environment inherited;
  const auto gpu = [&](Rank rank) {
    return worker_environment(inherited, job, rank).get("CUDA_VISIBLE_DEVICES");
  };
  EXPECT_EQ(gpu(2), "2");
  inherited.set("CUDA_VISIBLE_DEVICES", "3, GPU-5a ,0");
  EXPECT_EQ(gpu(0), "3");
  EXPECT_EQ(gpu(1), "GPU-5a");
  EXPECT_EQ(gpu(2), "0");
  EXPECT_EQ(worker_environment(inherited, job, 2).get("LOCAL_RANK"), "0");
  EXPECT_EQ(worker_environment(inherited, job, 2).get("RANK"), "2");
  EXPECT_EQ(gpu_of_worker(inherited, 3).error().message(),
            "CUDA_VISIBLE_DEVICES=3, GPU-5a ,0 has 3 entries, so there is no GPU for local rank 3; "
            "start fewer workers or add GPUs to the variable");
  inherited.set("CUDA_VISIBLE_DEVICES", "");
  EXPECT_EQ(gpu(2), "");
  inherited.set("CUDA_VISIBLE_DEVICES", "0,,1");
  EXPECT_EQ(gpu(2), "1");
  EXPECT_EQ(gpu_of_worker(inherited, 1).error().message(),
            "CUDA_VISIBLE_DEVICES=0,,1: the entry for local rank 1 is empty; remove the "
            "superfluous comma or name a GPU");
}

TEST(WorkerEnvironment, KeepsFreedMemoryUnlessTheUserTunesMalloc) {
  os::Environment environment;
  keep_freed_memory(environment);
  EXPECT_EQ(environment.get("GLIBC_TUNABLES"),
            "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:"
            "glibc.malloc.trim_threshold=1099511627776");
  environment.set("GLIBC_TUNABLES", "glibc.malloc.check=3");
  keep_freed_memory(environment);
  EXPECT_EQ(environment.get("GLIBC_TUNABLES"), "glibc.malloc.check=3");
}

TEST(WorkerEnvironment, WhatBreaksAWorkerIsNotLeftIgnored) {
  const std::vector<int> ignored = {SIGHUP, SIGINT, SIGQUIT, SIGPIPE, SIGTERM, SIGCHLD, SIGXFSZ};
  EXPECT_EQ(signals_ignored_by_workers(ignored), (std::vector<int>{SIGHUP, SIGPIPE, SIGXFSZ}));
}

}  // namespace
}  // namespace cadre::launch
