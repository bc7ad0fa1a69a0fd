// The checks of limits, control groups, memory, cores and disks.
#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/core/os/host/cgroup_limits.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/doctor/checks.h"

namespace cadre::cli {
namespace {

using State = FindingState;

constexpr uint64_t kMebibyte = uint64_t{1} << 20;
constexpr uint64_t kGibibyte = uint64_t{1} << 30;

std::string number_or_none(const std::optional<uint64_t>& limit) {
  return limit ? cadre::format("{}", *limit) : "no limit";
}

std::string size_or_none(const std::optional<uint64_t>& limit) {
  return limit ? readable_size(*limit) : "no limit";
}

// Returns "docker" or "podman", by the file that each makes in a container; empty elsewhere.
std::string container_engine(const HostView& view) {
  if (view.has_file("/run/.containerenv")) return "podman";
  return view.has_file("/.dockerenv") ? "docker" : "";
}

// Returns `option` of the command that starts this container; outside of one, returns `otherwise`.
std::string in_container(const HostView& view, std::string_view option,
                         std::string_view otherwise) {
  const std::string engine = container_engine(view);
  return engine.empty() ? std::string(otherwise) : cadre::format("{} run {} ...", engine, option);
}

bool is_below(const std::optional<uint64_t>& limit, uint64_t needed) {
  return limit && *limit < needed;
}

Finding check_descriptors(const HostView& view) {
  // A launcher has about ten descriptors for each worker, a rank one for each other rank of its
  // host.
  constexpr uint64_t kFew = 256;
  constexpr uint64_t kEnough = 4096;
  const os::ProcessLimit& limit = view.limits.descriptors;
  Finding finding{.section = "limits",
                  .name = "open files",
                  .seen = cadre::format("soft limit {}, hard limit {}", number_or_none(limit.soft),
                                        number_or_none(limit.hard))};
  if (!is_below(limit.hard, kEnough)) return finding;
  finding.state = is_below(limit.hard, kFew) ? State::kProblem : State::kNote;
  finding.meaning =
      "Cadre raises the limit to the hard one, which is low: each rank needs a descriptor for each "
      "rank of its host and for each rank with which it exchanges data.";
  finding.remedy =
      "printf '* hard nofile 1048576\\n' | sudo tee /etc/security/limits.d/90-nofile.conf";
  return finding;
}

Finding check_processes(const HostView& view) {
  constexpr uint64_t kEnough = 4096;
  const os::ProcessLimit& limit = view.limits.processes;
  Finding finding{.section = "limits", .name = "processes", .seen = number_or_none(limit.soft)};
  if (!view.thread_failure.empty()) {
    finding.state = State::kProblem;
    finding.seen += cadre::format("; {}", view.thread_failure);
  } else if (is_below(limit.soft, kEnough)) {
    finding.state = State::kNote;
  } else {
    return finding;
  }
  finding.meaning =
      "The limit counts the threads of all processes of this user; the control group may have a "
      "lower one. A worker with libtorch has several threads for each core.";
  finding.remedy =
      is_below(limit.hard, kEnough)
          ? "printf '* - nproc 65536\\n' | sudo tee /etc/security/limits.d/90-nproc.conf"
          : cadre::format("ulimit -u {}; ps -u $USER -L | wc -l",
                          limit.hard ? number_or_none(limit.hard) : "unlimited");
  return finding;
}

Finding check_locked_memory(const HostView& view) {
  constexpr uint64_t kEnough = kGibibyte;
  const std::optional<uint64_t>& limit = view.limits.locked_bytes.soft;
  Finding finding{.section = "limits", .name = "locked memory", .seen = size_or_none(limit)};
  // Cadre locks no memory; InfiniBand's and CUDA's buffers are locked.
  if (!is_below(limit, kEnough) || !view.has_file("/dev/infiniband")) return finding;
  finding.state = State::kNote;
  finding.meaning =
      "This host has InfiniBand, whose buffers NCCL and MPI lock: with this limit they fail or use "
      "TCP.";
  finding.remedy =
      "printf '* - memlock unlimited\\n' | sudo tee /etc/security/limits.d/90-memlock.conf";
  return finding;
}

Finding check_core_files(const HostView& view) {
  const std::optional<uint64_t>& limit = view.limits.core_bytes.soft;
  std::string seen = size_or_none(limit);
  if (limit == 0) seen = "off; ulimit -c unlimited turns them on";
  return {.section = "limits", .name = "core files", .seen = std::move(seen)};
}

Finding check_address_space(const HostView& view) {
  const std::optional<uint64_t>& limit = view.limits.address_bytes.soft;
  Finding finding{.section = "limits", .name = "address space", .seen = size_or_none(limit)};
  if (!limit) return finding;
  finding.state = State::kNote;
  finding.meaning =
      "Shared memory and CUDA reserve far more addresses than they use memory. Limit the memory of "
      "the control group instead.";
  finding.remedy = "ulimit -v unlimited";
  return finding;
}

Finding check_file_sizes(const HostView& view) {
  const std::optional<uint64_t>& limit = view.limits.file_bytes.soft;
  Finding finding{.section = "limits", .name = "file size", .seen = size_or_none(limit)};
  if (!limit) return finding;
  finding.state = is_below(limit, 64 * kMebibyte) ? State::kProblem : State::kNote;
  finding.meaning =
      "The limit holds for snapshots, log files and shared memory: a larger one cannot be made.";
  finding.remedy = "ulimit -f unlimited";
  return finding;
}

Finding check_group_memory(const os::CgroupLimits& limits, const os::CgroupUsage& usage) {
  Finding finding{.section = "control group", .name = "memory", .seen = "no limit"};
  if (!limits.memory_bytes) return finding;
  finding.seen = cadre::format("at most {}", readable_size(*limits.memory_bytes));
  finding.numbers = {{"limit_bytes", static_cast<double>(*limits.memory_bytes)}};
  if (!usage.free_memory_bytes) return finding;
  finding.seen += cadre::format(", {} are free", readable_size(*usage.free_memory_bytes));
  finding.numbers.emplace_back("free_bytes", static_cast<double>(*usage.free_memory_bytes));
  if (*usage.free_memory_bytes >= 512 * kMebibyte) return finding;
  finding.state = *usage.free_memory_bytes < 64 * kMebibyte ? State::kProblem : State::kNote;
  finding.meaning =
      "A worker with libtorch needs about 200 MiB before it has a model. The kernel kills a "
      "process of the group when the limit is reached.";
  finding.remedy = "cat /proc/self/cgroup; ps aux --sort=-rss | head";
  return finding;
}

Finding check_memory_kills(const os::CgroupUsage& usage) {
  Finding finding{.section = "control group", .name = "OOM kills", .seen = "none"};
  if (usage.num_memory_kills == 0) return finding;
  finding.state = State::kNote;
  finding.seen = cadre::format("{} processes of the group were killed", usage.num_memory_kills);
  finding.meaning =
      "A worker that ends by SIGKILL here has probably reached the memory limit of the group. Give "
      "the group more memory, or the job fewer workers.";
  finding.remedy = "journalctl -k --grep 'oom-kill' --lines 5";
  return finding;
}

Finding check_group_cores(const HostView& view, const os::CgroupLimits& limits) {
  Finding finding{.section = "control group", .name = "cores", .seen = "no limit"};
  if (!limits.cores) return finding;
  finding.seen =
      cadre::format("{:.1f} of {} that the process may run on", *limits.cores, view.host.num_cores);
  finding.numbers = {{"limit_cores", *limits.cores}};
  if (*limits.cores >= view.host.num_cores) return finding;
  finding.state = State::kNote;
  finding.meaning =
      "Programs start a thread for each core of the machine. When the threads have used up the "
      "processor time of a period, usually 100 ms, the kernel stops all of them until the next "
      "one, and the other ranks wait.";
  finding.remedy =
      cadre::format("export OMP_NUM_THREADS={}", std::max(1, static_cast<int>(*limits.cores)));
  return finding;
}

Finding check_throttling(const os::CgroupUsage& usage) {
  constexpr double kOften = 0.05;
  const double seconds = std::chrono::duration<double>(usage.throttled_time).count();
  Finding finding{.section = "control group", .name = "throttled", .seen = "never"};
  if (usage.num_throttled_periods == 0) return finding;
  const double share = static_cast<double>(usage.num_throttled_periods) /
                       static_cast<double>(std::max<uint64_t>(usage.num_periods, 1));
  finding.seen =
      cadre::format("in {} of {} periods ({:.0f} %), {:.1f} s in total",
                    usage.num_throttled_periods, usage.num_periods, 100 * share, seconds);
  finding.numbers = {{"throttled_share", share}, {"throttled_s", seconds}};
  if (share < kOften) return finding;
  finding.state = State::kNote;
  finding.meaning =
      "The kernel stopped the group because it had used up its processor time. Steps of a job take "
      "longer then, and heartbeats come late. Raise the limit of cores, or use fewer threads.";
  finding.remedy = "cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/cpu.stat";
  return finding;
}

Finding check_group_processes(const HostView& view, const os::CgroupUsage& usage) {
  constexpr uint64_t kFew = 64;
  constexpr uint64_t kEnough = 512;
  Finding finding{.section = "control group", .name = "processes", .seen = "no limit"};
  if (!usage.free_processes) return finding;
  finding.seen = cadre::format("{} more processes and threads", *usage.free_processes);
  if (*usage.free_processes >= kEnough) return finding;
  finding.state = *usage.free_processes < kFew ? State::kProblem : State::kNote;
  finding.meaning =
      "A worker with libtorch has several threads for each core; it fails when it cannot start "
      "one.";
  finding.remedy =
      in_container(view, "--pids-limit 32768",
                   "cat /proc/self/cgroup; systemctl show user-$(id -u).slice -p TasksMax");
  return finding;
}

Finding check_segment(const HostView& view) {
  Finding finding{.section = "shared memory", .name = "memfd", .seen = "works"};
  if (view.segment_failure.empty()) return finding;
  finding.state = State::kProblem;
  finding.seen = view.segment_failure;
  finding.meaning =
      "Ranks of one host exchange data through memory that memfd_create() makes. Without it they "
      "use TCP, which is several times slower. A sandbox or a limit forbids it.";
  finding.remedy = in_container(view, "--security-opt seccomp=unconfined", "ulimit -a");
  return finding;
}

Finding check_shm(const HostView& view) {
  Finding finding{.section = "shared memory", .name = "/dev/shm"};
  const std::string advice =
      "Cadre does not use it, but torch's DataLoader, NCCL and Open MPI do, and end with SIGBUS "
      "when it is full.";
  if (!view.shm.space) {
    finding.state = State::kNote;
    finding.seen = view.shm.failure;
    finding.meaning = advice;
    finding.remedy = "sudo mount -t tmpfs -o size=8g tmpfs /dev/shm";
    return finding;
  }
  const os::FolderSpace& space = *view.shm.space;
  finding.seen = cadre::format("{} of {} are free", readable_size(space.free_bytes),
                               readable_size(space.total_bytes));
  finding.numbers = {{"free_bytes", static_cast<double>(space.free_bytes)}};
  if (space.free_bytes >= kGibibyte) return finding;
  finding.state = State::kNote;
  finding.meaning = advice;
  finding.remedy = in_container(view, "--shm-size=8g", "sudo mount -o remount,size=8g /dev/shm");
  return finding;
}

// Returns the word in brackets of "always [madvise] never".
std::string chosen_word(const std::string& text) {
  const size_t open = text.find('[');
  const size_t close = text.find(']', open);
  if (open == std::string::npos || close == std::string::npos) return "";
  return text.substr(open + 1, close - open - 1);
}

Finding check_huge_page_setting(const HostView& view, std::string_view name, const char* file) {
  const std::string path = cadre::format("/sys/kernel/mm/transparent_hugepage/{}", file);
  const std::string chosen = chosen_word(view.read(path));
  Finding finding{.section = "huge pages", .name = std::string(name), .seen = chosen};
  if (chosen.empty()) {
    finding.seen = "this kernel has none";
    return finding;
  }
  const bool is_shared = name == "shared";
  if (is_shared || chosen != "never") return finding;
  finding.state = State::kNote;
  finding.meaning =
      "Large tensors then need a page of 4 KiB for each 4 KiB: the first touch of memory and "
      "random access are slower. `cadre train` lets malloc ask for huge pages, and so may a "
      "program with GLIBC_TUNABLES=glibc.malloc.hugetlb=1.";
  finding.remedy = cadre::format("echo madvise | sudo tee {}", path);
  return finding;
}

Finding count_cores(const HostView& view) {
  const std::string online = view.read("/sys/devices/system/cpu/online");
  return {.section = "cores",
          .name = "usable",
          .seen = cadre::format("{} (online: {})", view.host.num_cores,
                                online.empty() ? "unknown" : online),
          .numbers = {{"num_cores", static_cast<double>(view.host.num_cores)}}};
}

std::string describe(const os::CoreDistance& distance) {
  return cadre::format("{} ns between cores {} and {}", distance.one_way.count(), distance.first,
                       distance.second);
}

Finding check_distances(const HostView& view) {
  constexpr Duration kFar = std::chrono::nanoseconds(1000);
  Finding finding{.section = "cores", .name = "distance"};
  if (view.num_core_pairs == 0) {
    finding.seen = "there is one core";
    return finding;
  }
  if (!view.thread_failure.empty()) {
    finding.seen = "not measured, because no thread can be started";
    return finding;  // check_processes() reports it
  }
  if (view.core_distances.empty()) {
    finding.state = State::kNote;
    finding.seen = "not measured: the cores were busy";
    finding.meaning =
        "Two threads did not run at the same time for long enough. Ranks of a job would wait for "
        "each other in the same way.";
    finding.remedy = "top -b -n 1 | head -20";
    return finding;
  }
  auto distances = view.core_distances;
  std::ranges::sort(distances, {}, &os::CoreDistance::one_way);
  const os::CoreDistance& median = distances[distances.size() / 2];
  finding.seen =
      distances.size() == 1
          ? describe(median)
          : cadre::format("{}; {}; median {} ns of {} pairs", describe(distances.front()),
                          describe(distances.back()), median.one_way.count(), distances.size());
  const auto in_ns = [](const os::CoreDistance& distance) {
    return static_cast<double>(distance.one_way.count());
  };
  finding.numbers = {{"min_ns", in_ns(distances.front())},
                     {"median_ns", in_ns(median)},
                     {"max_ns", in_ns(distances.back())},
                     {"num_pairs", static_cast<double>(distances.size())}};
  if (median.one_way < kFar) return finding;
  finding.state = State::kNote;
  finding.meaning =
      "A cache line usually takes 20 to 200 ns. The cores are busy, or a virtual machine shares "
      "them with others: small collectives take correspondingly longer.";
  finding.remedy = "grep -E '^(cpu|procs_running)' /proc/stat; cat /proc/pressure/cpu";
  return finding;
}

Finding check_folder(const FolderView& folder) {
  Finding finding{.section = "disks", .name = folder.name};
  const bool is_temporary = folder.name == "TMPDIR";
  const std::string remedy =
      is_temporary ? "export TMPDIR=/path/with/space" : cadre::format("df -h '{}'", folder.path);
  const std::string meaning = is_temporary ? "cadre run keeps the error files of workers there."
                                           : "Snapshots and logs cannot be written there.";
  if (!folder.space) {
    finding.state = State::kProblem;
    finding.seen = cadre::format("{}: {}", folder.path, folder.failure);
    finding.meaning = meaning;
    finding.remedy = remedy;
    return finding;
  }
  const os::FolderSpace& space = *folder.space;
  finding.seen = cadre::format("{} ({}): {} are free", folder.path, space.file_system,
                               readable_size(space.free_bytes));
  finding.numbers = {{"free_bytes", static_cast<double>(space.free_bytes)}};
  if (!space.is_writable) {
    const bool is_run_folder = folder.name == "run folder";
    finding.state = is_run_folder ? State::kNote : State::kProblem;
    finding.seen += ", but this user may not write there";
    if (is_run_folder) {
      finding.meaning = "A job that runs here cannot write to relative paths.";
      finding.remedy = "cd /path/with/space";
    } else {
      finding.meaning = meaning;
      finding.remedy = is_temporary ? remedy : cadre::format("ls -ld '{}'; id", folder.path);
    }
    return finding;
  }
  const bool has_files = space.total_files == 0 || space.free_files >= 1000;
  if (!has_files) finding.seen += cadre::format(", {} more files", space.free_files);
  if (space.free_bytes < 64 * kMebibyte || (!has_files && space.free_files < 16)) {
    finding.state = State::kProblem;
    finding.meaning = "There is no space for a snapshot or for the files of a job.";
    finding.remedy = remedy;
  } else if (!has_files || (space.free_bytes < 2 * kGibibyte && !is_temporary)) {
    finding.state = State::kNote;
    finding.meaning =
        "A snapshot has 12 bytes for each parameter with Adam in float32, and a new one is written "
        "before the old one is removed.";
    finding.remedy = remedy;
  } else if (is_temporary && space.is_shared) {
    finding.state = State::kNote;
    finding.meaning = "It is a network file system: temporary files of all hosts meet there.";
    finding.remedy = "export TMPDIR=/tmp";
  }
  return finding;
}

}  // namespace

std::vector<Finding> check_limits(const HostView& view) {
  return {check_descriptors(view), check_processes(view),     check_locked_memory(view),
          check_core_files(view),  check_address_space(view), check_file_sizes(view)};
}

std::vector<Finding> check_cgroups(const HostView& view) {
  const os::CgroupLimits limits = os::read_cgroup_limits(view.root);
  const os::CgroupUsage usage = os::read_cgroup_usage(view.root);
  return {check_group_memory(limits, usage), check_memory_kills(usage),
          check_group_cores(view, limits), check_throttling(usage),
          check_group_processes(view, usage)};
}

std::vector<Finding> check_shared_memory(const HostView& view) {
  return {check_segment(view), check_shm(view)};
}

std::vector<Finding> check_huge_pages(const HostView& view) {
  return {check_huge_page_setting(view, "transparent", "enabled"),
          check_huge_page_setting(view, "shared", "shmem_enabled")};
}

std::vector<Finding> check_cores(const HostView& view) {
  return {count_cores(view), check_distances(view)};
}

std::vector<Finding> check_disks(const HostView& view) {
  std::vector<Finding> findings;
  for (const FolderView& folder : view.folders) findings.push_back(check_folder(folder));
  return findings;
}

}  // namespace cadre::cli
