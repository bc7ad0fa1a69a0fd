#include "cadre/core/os/host/cgroup_limits.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// A root folder with the files that a kernel would show in /proc and /sys.
class CgroupRoot : public ::testing::Test {
 protected:
  void write(const std::string& path, const std::string& content) const {
    const std::filesystem::path file = root() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << content << '\n';
  }
  std::string root() const { return temporary_.path(); }

  cadre::testing::TemporaryFolder temporary_;
};

constexpr const char* kVersion2 =
    "24 1 0:22 / /proc rw - proc proc rw\n"
    "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate";

TEST_F(CgroupRoot, NothingThatCanBeReadIsNoLimit) {
  const CgroupLimits limits = read_cgroup_limits(root());
  EXPECT_FALSE(limits.memory_bytes);
  EXPECT_FALSE(limits.cores);
}

TEST_F(CgroupRoot, TheTightestOfNestedGroupsOfVersion2Counts) {
  write("/proc/self/mountinfo", kVersion2);
  write("/proc/self/cgroup", "0::/user.slice/job.scope");
  write("/sys/fs/cgroup/user.slice/job.scope/memory.max", "max");
  write("/sys/fs/cgroup/user.slice/job.scope/cpu.max", "150000 100000");
  write("/sys/fs/cgroup/user.slice/memory.max", std::to_string(512 * kMiB));
  write("/sys/fs/cgroup/user.slice/cpu.max", "max 100000");
  const CgroupLimits limits = read_cgroup_limits(root());
  EXPECT_EQ(limits.memory_bytes, 512 * kMiB);
  EXPECT_EQ(limits.cores, 1.5);
}

// /proc/self/cgroup of a container has the paths of cgroups on the host, but only the container's
// own cgroup is mounted.
TEST_F(CgroupRoot, TheMountedGroupIsTheContainersOwn) {
  write("/proc/self/mountinfo", "30 23 0:26 /docker/a /sys/fs/cgroup ro - cgroup2 cgroup rw");
  write("/proc/self/cgroup", "0::/docker/a/inner");
  write("/sys/fs/cgroup/memory.max", std::to_string(64 * kMiB));
  write("/sys/fs/cgroup/inner/memory.max", std::to_string(32 * kMiB));
  EXPECT_EQ(read_cgroup_limits(root()).memory_bytes, 32 * kMiB);
  write("/proc/self/cgroup", "0::/../b");  // a process outside the container has moved this one
  EXPECT_EQ(read_cgroup_limits(root()).memory_bytes, 64 * kMiB);
}

TEST_F(CgroupRoot, Version1HasAHierarchyForEachController) {
  write("/proc/self/mountinfo",
        "31 23 0:27 / /sys/fs/cgroup/memory rw shared:3 - cgroup cgroup rw,memory\n"
        "32 23 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:4 - cgroup cgroup rw,cpu,cpuacct\n"
        "33 23 0:29 / /sys/fs/cgroup/unified rw shared:5 - cgroup2 cgroup2 rw");
  write("/proc/self/cgroup", "5:memory:/docker/a\n4:cpu,cpuacct:/docker/b\n0::/init.scope");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  write("/sys/fs/cgroup/memory/docker/memory.limit_in_bytes", std::to_string(256 * kMiB));
  write("/sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes", "9223372036854771712");
  write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1");
  write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000");
  write("/sys/fs/cgroup/cpu,cpuacct/docker/b/cpu.cfs_quota_us", "50000");
  write("/sys/fs/cgroup/cpu,cpuacct/docker/b/cpu.cfs_period_us", "100000");
  const CgroupLimits limits = read_cgroup_limits(root());
  EXPECT_EQ(limits.memory_bytes, 256 * kMiB);
  EXPECT_EQ(limits.cores, 0.5);
}

TEST_F(CgroupRoot, TheUsageOfVersion2LeavesOutTheCacheOfFiles) {
  write("/proc/self/mountinfo", kVersion2);
  write("/proc/self/cgroup", "0::/user.slice/job.scope");
  const std::string parent = "/sys/fs/cgroup/user.slice/";
  write(parent + "memory.max", std::to_string(512 * kMiB));
  write(parent + "memory.current", std::to_string(500 * kMiB));
  write(parent + "memory.stat", "anon 7\nfile 999999999\ninactive_file " +
                                    std::to_string(90 * kMiB) + "\nactive_file " +
                                    std::to_string(10 * kMiB));
  write(parent + "memory.events", "low 0\noom_kill 7");  // the kills of all groups below
  write(parent + "job.scope/memory.max", "max");
  write(parent + "job.scope/memory.events", "max 9\noom 3\noom_kill 2\noom_group_kill 0");
  write(parent + "job.scope/cpu.stat",
        "usage_usec 5\nnr_periods 1000\nnr_throttled 250\nthrottled_usec 1500000");
  write(parent + "job.scope/pids.max", "100");
  write(parent + "job.scope/pids.current", "60");
  write(parent + "pids.max", "max");
  const CgroupUsage usage = read_cgroup_usage(root());
  EXPECT_EQ(usage.free_memory_bytes, 112 * kMiB);
  EXPECT_EQ(usage.num_memory_kills, 2U);
  EXPECT_EQ(usage.num_periods, 1000U);
  EXPECT_EQ(usage.num_throttled_periods, 250U);
  EXPECT_EQ(usage.throttled_time, std::chrono::milliseconds(1500));
  EXPECT_EQ(usage.free_processes, 40U);
}

TEST_F(CgroupRoot, TheUsageOfVersion1IsReadFromEachHierarchy) {
  write("/proc/self/mountinfo",
        "31 23 0:27 / /sys/fs/cgroup/memory rw shared:3 - cgroup cgroup rw,memory\n"
        "32 23 0:28 / /sys/fs/cgroup/cpu rw shared:4 - cgroup cgroup rw,cpu\n"
        "33 23 0:29 / /sys/fs/cgroup/pids rw shared:5 - cgroup cgroup rw,pids\n"
        "34 23 0:30 / /sys/fs/cgroup/unified rw shared:6 - cgroup2 cgroup2 rw");
  write("/proc/self/cgroup", "5:memory:/a\n4:cpu:/a\n3:pids:/a\n0::/a");
  write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", std::to_string(64 * kMiB));
  write("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", std::to_string(63 * kMiB));
  write("/sys/fs/cgroup/memory/a/memory.stat",
        "inactive_file 7\ntotal_active_file 0\ntotal_inactive_file " + std::to_string(kMiB));
  write("/sys/fs/cgroup/memory/a/memory.oom_control", "under_oom 0\noom_kill 4");
  write("/sys/fs/cgroup/cpu/a/cpu.stat",
        "nr_periods 10\nnr_throttled 5\nthrottled_time 2000000000");
  write("/sys/fs/cgroup/pids/a/pids.max", "8");
  write("/sys/fs/cgroup/pids/a/pids.current", "9");
  const CgroupUsage usage = read_cgroup_usage(root());
  EXPECT_EQ(usage.free_memory_bytes, 2 * kMiB);
  EXPECT_EQ(usage.num_memory_kills, 4U);
  EXPECT_EQ(usage.num_throttled_periods, 5U);
  EXPECT_EQ(usage.throttled_time, std::chrono::seconds(2));
  EXPECT_EQ(usage.free_processes, 0U);
}

}  // namespace
}  // namespace cadre::os
