// The checks of GPUs, libraries, Python and torch.
#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/machine.h"
#include "cadre/launch/cli/doctor/background_read.h"
#include "cadre/launch/cli/doctor/checks.h"
#include "cadre/launch/cli/doctor/library_finder.h"

namespace cadre::cli {
namespace {

namespace fs = std::filesystem;
using State = FindingState;

// Returns the version in a line such as "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15
// Tue Mar 5" of /proc/driver/nvidia/version; empty if there is no driver.
std::string driver_version(const HostView& view) {
  constexpr std::string_view kBefore = "Kernel Module";
  const std::string text = view.read("/proc/driver/nvidia/version");
  const size_t at = text.find(kBefore);
  if (at == std::string::npos) return "";
  std::istringstream words(text.substr(at + kBefore.size()));
  for (std::string word; words >> word;) {
    if (std::isdigit(static_cast<unsigned char>(word.front())) != 0) return word;
  }
  return "";
}

int major_of(const std::string& version) {
  return std::atoi(version.c_str());
}

// What decides whether CUDA works. A container without GPUs sees the driver of its host, but needs
// neither libraries nor a newer driver; then `driver` is empty.
struct CudaView {
  std::string driver;                   // the version in the kernel; empty if CUDA is not used
  std::optional<FoundLibrary> library;  // libcuda

  // NVIDIA's package cuda-compat has a newer libcuda for older drivers, in a folder "compat".
  bool is_compatibility_library() const {
    return library && library->path.find("/compat/") != std::string::npos;
  }
  // Returns the version of the driver that programs see; empty if it is unknown.
  std::string usable_version() const {
    if (driver.empty() || !is_compatibility_library()) return driver;
    return library->version.find('.') == std::string::npos ? "" : library->version;
  }
};

CudaView read_cuda(const HostView& view) {
  const bool has_gpu = os::count_gpus(view.root + "/dev", std::nullopt) > 0;
  return {.driver = has_gpu ? driver_version(view) : "", .library = find_library(view, "libcuda")};
}

Finding check_driver(const HostView& view, const std::string& driver) {
  const int num_all = os::count_gpus(view.root + "/dev", std::nullopt);
  const int num_visible =
      os::count_gpus(view.root + "/dev", view.environment.get("CUDA_VISIBLE_DEVICES"));
  Finding finding{.section = "GPUs",
                  .name = "NVIDIA driver",
                  .numbers = {{"num_gpus", static_cast<double>(num_visible)}}};
  if (driver.empty() && num_all == 0) {
    finding.seen = "none, and no GPU";
  } else if (driver.empty()) {
    finding.state = State::kProblem;
    finding.seen = cadre::format("{} device files, but the kernel has no NVIDIA driver", num_all);
    finding.meaning =
        "CUDA fails on this host. The module was not loaded, perhaps since an update.";
    finding.remedy = "sudo modprobe nvidia; dmesg | grep -i nvidia | tail";
  } else if (num_all == 0) {
    finding.state = State::kNote;
    finding.seen = cadre::format("{}, but there is no device file", driver);
    finding.meaning = "The machine has GPUs that this container does not get.";
    finding.remedy = "docker run --gpus all ...";
  } else {
    finding.seen = cadre::format("{}; {} of {} GPUs are visible", driver, num_visible, num_all);
    if (num_visible == 0) {
      finding.state = State::kNote;
      finding.meaning = "CUDA_VISIBLE_DEVICES hides all GPUs.";
      finding.remedy = "unset CUDA_VISIBLE_DEVICES";
    }
  }
  return finding;
}

Finding check_cuda_library(const CudaView& cuda) {
  Finding finding{.section = "GPUs", .name = "libcuda"};
  finding.seen = cuda.library ? cuda.library->path : "not found";
  if (cuda.driver.empty()) return finding;
  if (!cuda.library) {
    finding.state = State::kProblem;
    finding.meaning = "The kernel has the driver, but programs lack its library: CUDA fails.";
    finding.remedy = "sudo apt-get install libcuda1; ldconfig -p | grep libcuda";
    return finding;
  }
  const std::string& version = cuda.library->version;
  const bool is_whole_version = version.find('.') != std::string::npos;
  if (!is_whole_version || version == cuda.driver || cuda.is_compatibility_library()) {
    return finding;
  }
  finding.state = State::kProblem;
  finding.meaning = cadre::format(
      "The driver in the kernel has version {}, the library {}: CUDA fails with a version mismatch "
      "until the updated module is loaded.",
      cuda.driver, version);
  finding.remedy = "sudo reboot";
  return finding;
}

// Returns the version of a library of a pip package such as "nvidia_nccl_cu12", from the name of
// the folder NAME-VERSION.dist-info beside torch; empty if the library is not one of pip's.
std::string pip_version(const HostView& view, std::string_view prefix,
                        const FoundLibrary& library) {
  if (!view.python.torch) return "";
  constexpr std::string_view kSuffix = ".dist-info";
  const fs::path packages = fs::path(view.python.torch->folder).parent_path();
  if (!library.path.starts_with((packages / "nvidia").string() + "/")) return "";
  std::error_code failure;
  for (fs::directory_iterator entry(view.root + packages.string(), failure), end;
       !failure && entry != end; entry.increment(failure)) {
    const std::string name = entry->path().filename();
    const size_t dash = name.find('-');
    if (!name.starts_with(prefix) || !name.ends_with(kSuffix) || dash == std::string::npos)
      continue;
    return name.substr(dash + 1, name.size() - kSuffix.size() - dash - 1);
  }
  return "";
}

std::string with_path(const std::string& version, const FoundLibrary& library) {
  return cadre::format("{} ({})", version.empty() ? "of unknown version" : version, library.path);
}

Finding check_cuda_runtime(const HostView& view, const CudaView& cuda) {
  // The oldest drivers that run programs of a major version of CUDA. Source: NVIDIA, CUDA
  // compatibility, minor version compatibility.
  struct Requirement {
    int cuda;
    int driver;
  };
  constexpr std::array kRequirements{Requirement{11, 450}, Requirement{12, 525},
                                     Requirement{13, 580}};
  const auto library = find_library(view, "libcudart");
  Finding finding{.section = "libraries", .name = "CUDA runtime", .seen = "not found"};
  if (!library) return finding;
  std::string version = pip_version(view, "nvidia_cuda_runtime", *library);
  if (version.empty()) version = library->version;
  finding.seen = with_path(version, *library);
  const std::string driver = cuda.usable_version();
  for (const Requirement& requirement : kRequirements) {
    if (driver.empty() || requirement.cuda != major_of(version)) continue;
    if (major_of(driver) >= requirement.driver) continue;
    finding.state = State::kProblem;
    finding.meaning = cadre::format("CUDA {} needs driver {} or later, and this one is {}.",
                                    requirement.cuda, requirement.driver, driver);
    finding.remedy = "sudo apt-get install --only-upgrade nvidia-driver";
  }
  return finding;
}

Finding check_nccl(const HostView& view, const CudaView& cuda) {
  const auto library = find_library(view, "libnccl");
  Finding finding{.section = "libraries", .name = "NCCL", .seen = "not found"};
  if (library) {
    const std::string version = pip_version(view, "nvidia_nccl", *library);
    finding.seen = with_path(version.empty() ? library->version : version, *library);
  } else if (!cuda.driver.empty()) {
    finding.state = State::kNote;
    finding.meaning =
        "Groups of torch.distributed on GPUs need it. A torch that links it statically has its "
        "own.";
    finding.remedy = "pip install nvidia-nccl-cu12";
  }
  return finding;
}

// The library of Open MPI has its version either in a text such as "Open MPI v4.1.4, package: ...",
// or makes that text from a format string and has "v4.1.4" as its repository's revision.
std::string open_mpi_version(const HostView& view, const FoundLibrary& library) {
  constexpr std::string_view kSoVersion = "40";  // Open MPI since 2.0; MPICH has 12
  constexpr std::string_view kRevision("\0v", 2);
  const std::string version = find_version(view, library.path, "Open MPI v", ", ");
  if (!version.empty() || !library.version.starts_with(kSoVersion)) return version;
  return find_version(view, library.path, kRevision, " ");
}

Finding check_mpi(const HostView& view) {
  Finding finding{.section = "libraries", .name = "MPI", .seen = "not found"};
  for (const char* name : {"libmpi", "libmpich"}) {
    const auto library = find_library(view, name);
    if (!library) continue;
    const std::string open_mpi = open_mpi_version(view, *library);
    const std::string mpich = find_version(view, library->path, "MPICH Version:", "");
    finding.seen = !open_mpi.empty() ? cadre::format("Open MPI {}", with_path(open_mpi, *library))
                   : !mpich.empty()  ? cadre::format("MPICH {}", with_path(mpich, *library))
                                     : with_path("", *library);
    return finding;
  }
  return finding;
}

Finding check_interpreter(const HostView& view) {
  Finding finding{.section = "Python", .name = "python", .seen = view.python.python};
  if (!view.python.python.ends_with("(not found)")) return finding;
  finding.state = State::kNote;
  finding.meaning = "cadre run starts C++ programs, but no Python script.";
  finding.remedy = "export PYTHON_EXEC=/path/to/python3";
  return finding;
}

Finding check_torch(const HostView& view) {
  Finding finding{.section = "Python", .name = "torch"};
  if (!view.python.torch) {
    finding.state = State::kNote;
    finding.seen = "not found";
    finding.meaning = view.python.missing_torch;
    finding.remedy = "export CADRE_TORCH=/path/to/venv";
    return finding;
  }
  finding.seen = cadre::format("{} ({})", view.python.torch->version, view.python.torch->folder);
  const int num_gpus =
      os::count_gpus(view.root + "/dev", view.environment.get("CUDA_VISIBLE_DEVICES"));
  if (num_gpus == 0 || !view.python.torch->version.ends_with("+cpu")) return finding;
  finding.state = State::kNote;
  finding.meaning =
      cadre::format("This PyTorch is built without CUDA and does not use the {} GPUs.", num_gpus);
  finding.remedy = "pip install torch --index-url https://download.pytorch.org/whl/cu126";
  return finding;
}

}  // namespace

std::vector<Finding> check_gpus(const HostView& view) {
  return {check_driver(view, driver_version(view)), check_cuda_library(read_cuda(view))};
}

std::vector<Finding> check_libraries(const HostView& view) {
  const CudaView cuda = read_cuda(view);
  return {check_mpi(view), check_nccl(view, cuda), check_cuda_runtime(view, cuda)};
}

std::vector<Finding> check_python(const HostView& view) {
  return {check_interpreter(view), check_torch(view)};
}

std::vector<Finding> search_within(Duration limit, std::function<std::vector<Finding>()> search) {
  auto findings = BackgroundRead<std::vector<Finding>>(std::move(search)).take(limit);
  if (findings.ok()) return *std::move(findings);
  Finding finding{.section = "libraries",
                  .name = "search",
                  .state = State::kProblem,
                  .seen = findings.error().message(),
                  .meaning = "The libraries could not be searched."};
  if (findings.error().code() == ErrorCode::kTimeout) {
    finding.meaning =
        "A folder of LD_LIBRARY_PATH or /etc/ld.so.conf is perhaps on a network file system whose "
        "server does not answer. A program that loads libraries waits for it, too.";
    finding.remedy = "echo $LD_LIBRARY_PATH; grep -E 'nfs|cifs|ceph|lustre|fuse' /proc/mounts";
  }
  return {finding};
}

std::vector<Finding> check_host(const HostView& view) {
  constexpr Duration kSearchLimit = std::chrono::seconds(10);
  std::vector<Finding> findings;
  const auto append = [&](const std::vector<Finding>& some) {
    findings.insert(findings.end(), some.begin(), some.end());
  };
  for (const auto check :
       {check_names, check_addresses, check_ports, check_clocks, check_limits, check_cgroups,
        check_shared_memory, check_huge_pages, check_cores, check_disks}) {
    append(check(view));
  }
  append(search_within(kSearchLimit, [view] {
    std::vector<Finding> found = check_gpus(view);
    for (const Finding& library : check_libraries(view)) found.push_back(library);
    return found;
  }));
  append(check_python(view));
  return findings;
}

}  // namespace cadre::cli
