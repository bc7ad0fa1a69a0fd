// Plants each problem into the view of a healthy host, or into the files below its root, and
// expects the finding and its remedy.
#include "cadre/launch/cli/doctor/checks.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <new>
#include <ostream>
#include <string>
#include <vector>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using State = FindingState;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kGiB = uint64_t{1} << 30;

os::FolderSpace large_space() {
  return {.free_bytes = 100 * kGiB,
          .total_bytes = 200 * kGiB,
          .free_files = 1'000'000,
          .total_files = 2'000'000,
          .file_system = "ext4",
          .is_writable = true};
}

// A host without any problem. Its files are in a temporary folder.
struct PlantedHost {
  PlantedHost() {
    view.root = folder.path();
    view.host.name = "node1";
    view.host.num_cores = 8;
    view.own_name = {.addresses = {"10.0.0.2"}, .took = milliseconds(1)};
    view.interfaces = {{.interface = "lo", .host = "127.0.0.1", .is_loopback = true}, eth0};
    view.source_ipv4 = eth0;
    view.ports = {{.port = 0}};
    view.clocks.sync = os::WallClockSync{.is_synchronized = true, .max_error = milliseconds(5)};
    view.clocks.read_cost = nanoseconds(25);
    view.limits.descriptors = {.soft = 1024, .hard = 1'048'576};
    view.limits.locked_bytes = {.soft = 8 * kMiB, .hard = 8 * kMiB};
    view.limits.core_bytes = {.soft = 0};
    view.shm = {.name = "/dev/shm", .path = "/dev/shm", .space = large_space()};
    view.folders = {{.name = "run folder", .path = "/data", .space = large_space()},
                    {.name = "TMPDIR", .path = "/tmp", .space = large_space()}};
    view.core_distances = {
        {0, 1, nanoseconds(50)}, {0, 4, nanoseconds(120)}, {1, 4, nanoseconds(110)}};
    view.num_core_pairs = 3;
    view.python.python = "/usr/bin/python3";
    view.python.torch = TorchInstallation{.folder = "/venv/lib/python3.11/site-packages/torch",
                                          .version = "2.13.0+cu126"};
    write("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw");
    write("/proc/self/cgroup", "0::/job");
    write("/proc/sys/net/ipv4/ip_local_port_range", "32768\t60999");
    write("/proc/net/tcp", "  sl  local_address rem_address   st");
    write("/sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc");
    write("/sys/devices/system/cpu/online", "0-7");
    write("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never");
    write("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [never]");
  }

  void write(const std::string& path, const std::string& content) const {
    const std::filesystem::path file = view.root + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << content << '\n';
  }
  void write_group(const std::string& file, const std::string& content) const {
    write("/sys/fs/cgroup/job/" + file, content);
  }
  void add_gpu() const {
    write("/dev/nvidia0", "");
    write(
        "/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
        "GCC version:  gcc version 12.2.0");
    write("/usr/lib/libcuda.so.1", "");
    write("/usr/lib/libcuda.so.550.54.15", "");
    write("/usr/lib/libnccl.so.2.21.5", "");
  }
  std::vector<os::FolderSpace*> spaces() {
    return {&*view.folders[0].space, &*view.folders[1].space};
  }

  const testing::TemporaryFolder folder;
  const os::InterfaceAddress eth0{.interface = "eth0", .host = "10.0.0.2"};
  HostView view;
};

const Finding* find(const std::vector<Finding>& findings, const std::string& section,
                    const std::string& name) {
  for (const Finding& finding : findings) {
    if (finding.section == section && finding.name == name) return &finding;
  }
  return nullptr;
}

TEST(DoctorChecks, AHealthyHostHasNoNote) {
  const PlantedHost host;
  for (const Finding& finding : check_host(host.view)) {
    EXPECT_EQ(finding.state, State::kOk) << finding.name << ": " << finding.seen;
    EXPECT_FALSE(finding.seen.empty()) << finding.name;
    EXPECT_TRUE(finding.remedy.empty()) << finding.name;
  }
}

TEST(DoctorChecks, AHealthyHostWithGpusHasNoNote) {
  const PlantedHost host;
  host.add_gpu();
  for (const Finding& finding : check_host(host.view)) {
    EXPECT_EQ(finding.state, State::kOk) << finding.name << ": " << finding.seen;
  }
  const auto gpus = check_gpus(host.view);
  EXPECT_EQ(gpus[0].seen, "550.54.15; 1 of 1 GPUs are visible");
  EXPECT_EQ(gpus[1].seen, "/usr/lib/libcuda.so.550.54.15");
}

struct Problem {
  std::string name;  // the name of the test case
  std::function<void(PlantedHost&)> plant;
  std::string section;
  std::string finding;
  State state = State::kOk;
  std::string seen;  // this and the following texts are parts of the finding's
  std::string meaning;
  std::string remedy;
};

void PrintTo(const Problem& problem, std::ostream* out) {
  *out << problem.name;
}

class DoctorProblems : public ::testing::TestWithParam<Problem> {};

TEST_P(DoctorProblems, IsFoundWithItsRemedyAndNothingElse) {
  const Problem& problem = GetParam();
  PlantedHost host;
  problem.plant(host);
  const auto findings = check_host(host.view);
  const Finding* found = find(findings, problem.section, problem.finding);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->state, problem.state) << found->seen;
  EXPECT_NE(found->seen.find(problem.seen), std::string::npos) << found->seen;
  EXPECT_NE(found->meaning.find(problem.meaning), std::string::npos) << found->meaning;
  EXPECT_NE(found->remedy.find(problem.remedy), std::string::npos) << found->remedy;
  EXPECT_FALSE(found->meaning.empty());
  EXPECT_FALSE(found->remedy.empty());
  for (const Finding& other : findings) {
    EXPECT_TRUE(&other == found || other.state == State::kOk) << other.name << ": " << other.seen;
  }
}

std::vector<Problem> address_problems() {
  return {
      {"NameWithoutAddress",
       [](PlantedHost& host) { host.view.own_name = {.failure = "Name or service not known"}; },
       "names", "host name", State::kProblem, "node1 does not resolve: Name or service not known",
       "cannot start", "echo '10.0.0.2 node1' | sudo tee -a /etc/hosts"},
      {"NameOnDebiansLoopback",
       [](PlantedHost& host) { host.view.own_name.addresses = {"127.0.1.1"}; }, "names",
       "host name", State::kNote, "node1 resolves to 127.0.1.1", "Ranks of Cadre publish 10.0.0.2",
       "sudo sed -i 's/^127[.]0[.]1[.]1/10.0.0.2/' /etc/hosts"},
      {"NameOnIpv6Loopback", [](PlantedHost& host) { host.view.own_name.addresses = {"::1"}; },
       "names", "host name", State::kNote, "::1", "loopback", "echo '10.0.0.2 node1'"},
      {"NameOfAnotherHost",
       [](PlantedHost& host) { host.view.own_name.addresses = {"192.168.7.7"}; }, "names",
       "host name", State::kProblem, "192.168.7.7", "belongs to another host",
       "echo '10.0.0.2 node1'"},
      {"SlowResolver", [](PlantedHost& host) { host.view.own_name.took = milliseconds(900); },
       "names", "resolver", State::kNote, "after 900.0 ms", "name server", "getent ahosts node1"},
      {"LoopbackOnly",
       [](PlantedHost& host) {
         host.view.interfaces.pop_back();
         host.view.source_ipv4.reset();
         host.view.own_name.addresses = {"127.0.1.1"};
       },
       "addresses", "interfaces", State::kNote, "lo 127.0.0.1", "loopback only",
       "ip -brief address"},
      {"SeveralNetworks",
       [](PlantedHost& host) {
         host.view.interfaces.push_back({.interface = "docker0", .host = "172.17.0.1"});
       },
       "addresses", "interfaces", State::kNote, "docker0 172.17.0.1", "several networks",
       "GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"},
      {"NoDefaultRoute", [](PlantedHost& host) { host.view.source_ipv4.reset(); }, "addresses",
       "peers reach", State::kNote, "10.0.0.2, from its own network only", "no default route",
       "ip route"}};
}

std::vector<Problem> port_problems() {
  return {
      {"NoFreePort",
       [](PlantedHost& host) { host.view.ports[0].failure = "Address already in use"; }, "ports",
       "a free port", State::kProblem, "Address already in use", "cannot listen",
       "ip_local_port_range"},
      {"PortInUse",
       [](PlantedHost& host) {
         host.view.ports.push_back({.port = 29500});
         host.write("/proc/net/tcp6",
                    "header\n 0: 00000000000000000000000000000000:733C "
                    "00000000000000000000000000000000:0000 0A 0");
       },
       "ports", "port 29500", State::kProblem, "a program listens there (IPv6)", "cannot listen",
       "sudo ss -ltnp 'sport = :29500'"},
      {"PortNotAllowed",
       [](PlantedHost& host) {
         host.view.ports.push_back({.port = 80, .failure = "Permission denied"});
       },
       "ports", "port 80", State::kProblem, "Permission denied", "cannot listen",
       "ip_unprivileged_port_start"},
      {"TorchrunsPortInUse",
       [](PlantedHost& host) {
         host.write("/proc/net/tcp", "header\n 0: 0100007F:733C 00000000:0000 0A 0");
       },
       "ports", "port 29500", State::kNote, "a program listens there", "torchrun", "29500"},
      {"FewPorts",
       [](PlantedHost& host) {
         host.write("/proc/sys/net/ipv4/ip_local_port_range", "60000 60099");
       },
       "ports", "port range", State::kNote, "60000 to 60099", "Only 100 ports", "32768 60999"},
      {"PortAmongEphemeralOnes",
       [](PlantedHost& host) { host.view.ports.push_back({.port = 40000}); }, "ports", "port range",
       State::kNote, "32768 to 60999", "so port 40000 may be in use",
       "ip_local_reserved_ports='40000'"},
      {"PortAmongEphemeralOnesAndOthersReserved",
       [](PlantedHost& host) {
         host.view.ports.push_back({.port = 40000});
         host.write("/proc/sys/net/ipv4/ip_local_reserved_ports", "33000-33010,39999");
       },
       "ports", "port range", State::kNote, "32768 to 60999", "so port 40000 may be in use",
       "ip_local_reserved_ports='33000-33010,39999,40000'"},
      {"Ufw", [](PlantedHost& host) { host.write("/etc/ufw/ufw.conf", "# ufw\nENABLED=yes"); },
       "ports", "firewall", State::kNote, "ufw may filter packets", "Ranks listen at ports",
       "sudo ufw allow from"},
      {"Firewalld", [](PlantedHost& host) { host.write("/run/firewalld/x", ""); }, "ports",
       "firewall", State::kNote, "firewalld", "cadre doctor --listen", "firewall-cmd"},
      {"Iptables",
       [](PlantedHost& host) { host.write("/proc/net/ip_tables_names", "nat\nfilter"); }, "ports",
       "firewall", State::kNote, "iptables", "Only root may read", "iptables -I INPUT"},
      {"Nftables",
       [](PlantedHost& host) { host.write("/proc/modules", "nf_tables 1 2 - Live 0x0"); }, "ports",
       "firewall", State::kNote, "nftables", "Only root may read", "nft list ruleset"}};
}

std::vector<Problem> clock_problems() {
  return {{"ClockNotSynchronised",
           [](PlantedHost& host) { host.view.clocks.sync->is_synchronized = false; }, "clocks",
           "wall clock", State::kNote, "not synchronised", "cannot be compared", "chrony"},
          {"ClockUnknown", [](PlantedHost& host) { host.view.clocks.sync.reset(); }, "clocks",
           "wall clock", State::kNote, "may not ask", "cannot be compared", "timedatectl"},
          {"ClockJumps", [](PlantedHost& host) { host.view.clocks.jump = milliseconds(-2000); },
           "clocks", "clock jumps", State::kNote, "jumped by -2000 ms", "paused", "chronyc"},
          {"SlowClockSource",
           [](PlantedHost& host) {
             host.view.clocks.read_cost = nanoseconds(900);
             host.write("/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet");
           },
           "clocks", "clock source", State::kNote, "hpet, 900 ns", "tsc", "available_clocksource"}};
}

std::vector<Problem> limit_problems() {
  return {
      {"FewDescriptors",
       [](PlantedHost& host) { host.view.limits.descriptors = {.soft = 1024, .hard = 1024}; },
       "limits", "open files", State::kNote, "soft limit 1024, hard limit 1024", "hard one",
       "hard nofile"},
      {"HardlyAnyDescriptor",
       [](PlantedHost& host) { host.view.limits.descriptors = {.soft = 64, .hard = 64}; }, "limits",
       "open files", State::kProblem, "64", "descriptor", "hard nofile"},
      {"FewProcesses",
       [](PlantedHost& host) { host.view.limits.processes = {.soft = 200, .hard = 30000}; },
       "limits", "processes", State::kNote, "200", "threads", "ulimit -u 30000"},
      {"FewProcessesWithoutHardLimit",
       [](PlantedHost& host) { host.view.limits.processes = {.soft = 200}; }, "limits", "processes",
       State::kNote, "200", "threads", "ulimit -u unlimited;"},
      {"FewProcessesAtMost",
       [](PlantedHost& host) { host.view.limits.processes = {.soft = 200, .hard = 300}; }, "limits",
       "processes", State::kNote, "200", "threads", "limits.d"},
      {"NoThread",
       [](PlantedHost& host) {
         host.view.thread_failure = "start thread: Resource temporarily unavailable";
         host.view.core_distances.clear();
       },
       "limits", "processes", State::kProblem, "no limit; start thread: Resource", "threads",
       "ulimit -u unlimited;"},
      {"LockedMemoryWithInfiniBand",
       [](PlantedHost& host) { host.write("/dev/infiniband/uverbs0", ""); }, "limits",
       "locked memory", State::kNote, "8.0 MiB", "InfiniBand", "memlock unlimited"},
      {"AddressSpace", [](PlantedHost& host) { host.view.limits.address_bytes.soft = 4 * kGiB; },
       "limits", "address space", State::kNote, "4.0 GiB", "reserve", "ulimit -v unlimited"},
      {"SmallFiles", [](PlantedHost& host) { host.view.limits.file_bytes.soft = kMiB; }, "limits",
       "file size", State::kProblem, "1.0 MiB", "snapshots", "ulimit -f unlimited"},
      {"LimitedFiles", [](PlantedHost& host) { host.view.limits.file_bytes.soft = kGiB; }, "limits",
       "file size", State::kNote, "1.0 GiB", "snapshots", "ulimit -f unlimited"}};
}

std::vector<Problem> group_problems() {
  return {{"GroupNearlyFull",
           [](PlantedHost& host) {
             host.write_group("memory.max", std::to_string(kGiB));
             host.write_group("memory.current", std::to_string(kGiB - 100 * kMiB));
           },
           "control group", "memory", State::kNote, "at most 1.0 GiB, 100.0 MiB are free", "kills",
           "cgroup"},
          {"GroupFull",
           [](PlantedHost& host) {
             host.write_group("memory.max", std::to_string(kGiB));
             host.write_group("memory.current", std::to_string(kGiB - kMiB));
           },
           "control group", "memory", State::kProblem, "1.0 MiB are free", "kills", "cgroup"},
          {"GroupKilled",
           [](PlantedHost& host) { host.write_group("memory.events", "oom 1\noom_kill 3"); },
           "control group", "OOM kills", State::kNote, "3 processes of the group", "SIGKILL",
           "journalctl"},
          {"GroupHasFewCores",
           [](PlantedHost& host) { host.write_group("cpu.max", "250000 100000"); }, "control group",
           "cores", State::kNote, "2.5 of 8", "stops all of them", "OMP_NUM_THREADS=2"},
          {"GroupIsThrottled",
           [](PlantedHost& host) {
             host.write_group("cpu.stat",
                              "nr_periods 100\nnr_throttled 50\nthrottled_usec 7000000");
           },
           "control group", "throttled", State::kNote, "50 of 100 periods (50 %), 7.0 s in total",
           "processor time", "cpu.stat"},
          {"GroupHasFewProcesses",
           [](PlantedHost& host) {
             host.write_group("pids.max", "300");
             host.write_group("pids.current", "100");
           },
           "control group", "processes", State::kNote, "200 more", "threads", "TasksMax"},
          {"GroupHasNoProcess",
           [](PlantedHost& host) {
             host.write("/.dockerenv", "");
             host.write_group("pids.max", "100");
             host.write_group("pids.current", "98");
           },
           "control group", "processes", State::kProblem, "2 more", "threads", "--pids-limit"}};
}

std::vector<Problem> memory_and_core_problems() {
  return {
      {"NoMemfd",
       [](PlantedHost& host) {
         host.view.segment_failure = "memfd_create: Operation not permitted";
       },
       "shared memory", "memfd", State::kProblem, "not permitted", "TCP", "ulimit -a"},
      {"DockersShm", [](PlantedHost& host) { host.view.shm.space->free_bytes = 64 * kMiB; },
       "shared memory", "/dev/shm", State::kNote, "64.0 MiB of 200.0 GiB", "DataLoader",
       "sudo mount -o remount,size=8g /dev/shm"},
      {"DockersShmInPodman",
       [](PlantedHost& host) {
         host.write("/run/.containerenv", "");
         host.view.shm.space->free_bytes = 64 * kMiB;
       },
       "shared memory", "/dev/shm", State::kNote, "64.0 MiB of 200.0 GiB", "DataLoader",
       "podman run --shm-size=8g"},
      {"NoShm",
       [](PlantedHost& host) {
         host.view.shm.space.reset();
         host.view.shm.failure = "no such folder";
       },
       "shared memory", "/dev/shm", State::kNote, "no such folder", "DataLoader", "mount -t tmpfs"},
      {"NoHugePages",
       [](PlantedHost& host) {
         host.write("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]");
       },
       "huge pages", "transparent", State::kNote, "never", "4 KiB", "echo madvise | sudo tee"},
      {"DistantCores",
       [](PlantedHost& host) {
         for (auto& distance : host.view.core_distances) distance.one_way *= 100;
       },
       "cores", "distance", State::kNote, "12000 ns between cores 0 and 4", "virtual machine",
       "pressure"},
      {"BusyCores", [](PlantedHost& host) { host.view.core_distances.clear(); }, "cores",
       "distance", State::kNote, "the cores were busy", "Two threads", "top"}};
}

std::vector<Problem> disk_problems() {
  return {
      {"FullRunFolder", [](PlantedHost& host) { host.spaces()[0]->free_bytes = kMiB; }, "disks",
       "run folder", State::kProblem, "1.0 MiB are free", "no space", "df -h '/data'"},
      {"NearlyFullRunFolder", [](PlantedHost& host) { host.spaces()[0]->free_bytes = kGiB; },
       "disks", "run folder", State::kNote, "1.0 GiB are free", "12 bytes", "df -h"},
      {"NoMoreFiles", [](PlantedHost& host) { host.spaces()[0]->free_files = 3; }, "disks",
       "run folder", State::kProblem, "3 more files", "no space", "df -h"},
      {"ReadOnlyRunFolder", [](PlantedHost& host) { host.spaces()[0]->is_writable = false; },
       "disks", "run folder", State::kNote, "may not write", "relative paths", "cd "},
      {"ReadOnlyNamedFolder",
       [](PlantedHost& host) {
         host.view.folders[0].name = "folder";
         host.spaces()[0]->is_writable = false;
       },
       "disks", "folder", State::kProblem, "may not write", "Snapshots and logs", "ls -ld '/data'"},
      {"LostRunFolder",
       [](PlantedHost& host) {
         host.view.folders[0].space.reset();
         host.view.folders[0].failure = "the file system has not answered for 0.5 s";
       },
       "disks", "run folder", State::kProblem, "has not answered", "cannot be written", "df -h"},
      {"MissingTmpdir",
       [](PlantedHost& host) {
         host.view.folders[1].space.reset();
         host.view.folders[1].failure = "No such file or directory";
       },
       "disks", "TMPDIR", State::kProblem, "No such file", "error files", "export TMPDIR="},
      {"ReadOnlyTmpdir", [](PlantedHost& host) { host.spaces()[1]->is_writable = false; }, "disks",
       "TMPDIR", State::kProblem, "may not write", "error files", "export TMPDIR="},
      {"SharedTmpdir",
       [](PlantedHost& host) {
         host.spaces()[1]->is_shared = true;
         host.spaces()[1]->file_system = "nfs";
       },
       "disks", "TMPDIR", State::kNote, "/tmp (nfs)", "network file system", "export TMPDIR="}};
}

std::vector<Problem> software_problems() {
  return {
      {"GpusWithoutDriver", [](PlantedHost& host) { host.write("/dev/nvidia0", ""); }, "GPUs",
       "NVIDIA driver", State::kProblem, "1 device files", "not loaded", "modprobe nvidia"},
      {"DriverWithoutGpus",
       [](PlantedHost& host) {
         host.add_gpu();
         std::filesystem::remove(host.view.root + "/dev/nvidia0");
       },
       "GPUs", "NVIDIA driver", State::kNote, "no device file", "container", "--gpus all"},
      {"HiddenGpus",
       [](PlantedHost& host) {
         host.add_gpu();
         host.view.environment.set("CUDA_VISIBLE_DEVICES", "");
       },
       "GPUs", "NVIDIA driver", State::kNote, "0 of 1 GPUs", "hides all", "unset"},
      {"NoCudaLibrary",
       [](PlantedHost& host) {
         host.add_gpu();
         std::filesystem::remove(host.view.root + "/usr/lib/libcuda.so.1");
         std::filesystem::remove(host.view.root + "/usr/lib/libcuda.so.550.54.15");
       },
       "GPUs", "libcuda", State::kProblem, "not found", "lack its library", "libcuda1"},
      {"OtherCudaLibrary",
       [](PlantedHost& host) {
         host.add_gpu();
         std::filesystem::rename(host.view.root + "/usr/lib/libcuda.so.550.54.15",
                                 host.view.root + "/usr/lib/libcuda.so.550.90.07");
       },
       "GPUs", "libcuda", State::kProblem, "libcuda.so.550.90.07", "version mismatch", "reboot"},
      {"OldDriverForCuda",
       [](PlantedHost& host) {
         host.add_gpu();
         host.write("/usr/local/cuda/lib64/libcudart.so.13.0.48", "");
       },
       "libraries", "CUDA runtime", State::kProblem, "13.0.48", "needs driver 580 or later",
       "nvidia-driver"},
      {"NoNccl",
       [](PlantedHost& host) {
         host.add_gpu();
         std::filesystem::remove(host.view.root + "/usr/lib/libnccl.so.2.21.5");
       },
       "libraries", "NCCL", State::kNote, "not found", "torch.distributed", "nvidia-nccl"},
      {"NoPython", [](PlantedHost& host) { host.view.python.python = "python3 (not found)"; },
       "Python", "python", State::kNote, "python3 (not found)", "no Python script", "PYTHON_EXEC"},
      {"NoTorch",
       [](PlantedHost& host) {
         host.view.python.torch.reset();
         host.view.python.missing_torch = "there is no torch in .venv";
       },
       "Python", "torch", State::kNote, "not found", "no torch in .venv", "CADRE_TORCH"},
      {"TorchWithoutCuda",
       [](PlantedHost& host) {
         host.add_gpu();
         host.view.python.torch->version = "2.13.0+cpu";
       },
       "Python", "torch", State::kNote, "2.13.0+cpu", "without CUDA", "pip install torch"}};
}

std::string name_of(const ::testing::TestParamInfo<Problem>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(Addresses, DoctorProblems, ::testing::ValuesIn(address_problems()),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Ports, DoctorProblems, ::testing::ValuesIn(port_problems()), name_of);
INSTANTIATE_TEST_SUITE_P(Clocks, DoctorProblems, ::testing::ValuesIn(clock_problems()), name_of);
INSTANTIATE_TEST_SUITE_P(Limits, DoctorProblems, ::testing::ValuesIn(limit_problems()), name_of);
INSTANTIATE_TEST_SUITE_P(Groups, DoctorProblems, ::testing::ValuesIn(group_problems()), name_of);
INSTANTIATE_TEST_SUITE_P(MemoryAndCores, DoctorProblems,
                         ::testing::ValuesIn(memory_and_core_problems()), name_of);
INSTANTIATE_TEST_SUITE_P(Disks, DoctorProblems, ::testing::ValuesIn(disk_problems()), name_of);
INSTANTIATE_TEST_SUITE_P(Software, DoctorProblems, ::testing::ValuesIn(software_problems()),
                         name_of);

TEST(DoctorChecks, AReservedPortMayBeInTheRangeOfFreePorts) {
  PlantedHost host;
  host.view.ports.push_back({.port = 40000});
  for (const char* reserved : {"40000", "29500,39000-41000", "40000-40001,50000"}) {
    host.write("/proc/sys/net/ipv4/ip_local_reserved_ports", reserved);
    EXPECT_EQ(find(check_ports(host.view), "ports", "port range")->state, State::kOk) << reserved;
  }
}

// The kernel's driver is visible in every container of a host with GPUs.
TEST(DoctorChecks, AContainerWithoutGpusNeedsNoCuda) {
  const PlantedHost host;
  host.add_gpu();
  for (const char* file : {"/dev/nvidia0", "/usr/lib/libcuda.so.1", "/usr/lib/libcuda.so.550.54.15",
                           "/usr/lib/libnccl.so.2.21.5"}) {
    std::filesystem::remove(host.view.root + file);
  }
  host.write("/usr/local/cuda/lib64/libcudart.so.13.0.48", "");
  for (const Finding& finding : check_host(host.view)) {
    EXPECT_NE(finding.state, State::kProblem) << finding.name << ": " << finding.meaning;
    if (finding.state == State::kNote) {
      EXPECT_EQ(finding.name, "NVIDIA driver");
    }
  }
}

TEST(DoctorChecks, NvidiasCompatibilityLibraryIsNewerThanTheDriver) {
  PlantedHost host;
  host.add_gpu();
  host.view.environment.set("LD_LIBRARY_PATH", "/usr/local/cuda/compat");
  host.write("/usr/local/cuda/compat/libcuda.so.580.65.06", "");
  host.write("/usr/local/cuda/lib64/libcudart.so.13.0.48", "");
  for (const Finding& finding : check_host(host.view)) {
    EXPECT_EQ(finding.state, State::kOk) << finding.name << ": " << finding.meaning;
  }
}

TEST(DoctorChecks, ASearchThatHangsIsAProblem) {
  auto end = std::make_shared<std::promise<void>>();
  const auto hang = [released = end->get_future().share()] {
    released.wait_for(std::chrono::seconds(60));
    return std::vector<Finding>{Finding{.name = "late"}};
  };
  const auto findings = search_within(milliseconds(20), hang);
  end->set_value();
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings[0].state, State::kProblem);
  EXPECT_EQ(findings[0].seen, "no answer within 0.02 s");
  EXPECT_NE(findings[0].meaning.find("LD_LIBRARY_PATH"), std::string::npos);
  EXPECT_EQ(search_within(std::chrono::seconds(60), hang)[0].name, "late");
}

TEST(DoctorChecks, AnExceptionInASearchIsAProblem) {
  const auto findings = search_within(std::chrono::seconds(60),
                                      []() -> std::vector<Finding> { throw std::bad_alloc(); });
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings[0].state, State::kProblem);
  EXPECT_EQ(findings[0].seen, "std::bad_alloc");
}

// A host whose name resolves to loopback has nothing to correct if there is no network.
TEST(DoctorChecks, WithoutANetworkLoopbackIsTheOnlyNote) {
  PlantedHost host;
  host.view.interfaces.pop_back();
  host.view.source_ipv4.reset();
  host.view.own_name.addresses = {"127.0.0.1"};
  EXPECT_EQ(check_names(host.view)[0].state, State::kOk);
  EXPECT_EQ(check_addresses(host.view)[1].seen, "127.0.0.1, from this host only");
  host.view.own_name = {.failure = "no such name"};
  EXPECT_EQ(check_names(host.view)[0].state, State::kNote);  // jobs on one host do not need it
}

TEST(DoctorChecks, OneCoreHasNoDistance) {
  PlantedHost host;
  host.view.core_distances.clear();
  host.view.num_core_pairs = 0;
  EXPECT_EQ(check_cores(host.view)[1].seen, "there is one core");
}

TEST(DoctorChecks, DistancesAreCountedInJson) {
  const PlantedHost host;
  const Finding distance = check_cores(host.view)[1];
  EXPECT_EQ(distance.seen,
            "50 ns between cores 0 and 1; 120 ns between cores 0 and 4; median 110 ns of 3 pairs");
  const std::vector<std::pair<std::string, double>> numbers{
      {"min_ns", 50}, {"median_ns", 110}, {"max_ns", 120}, {"num_pairs", 3}};
  EXPECT_EQ(distance.numbers, numbers);
}

}  // namespace
}  // namespace cadre::cli
