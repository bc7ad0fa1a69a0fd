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

}  // namespace
}  // namespace cadre::os
