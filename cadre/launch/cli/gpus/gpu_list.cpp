#include "cadre/launch/cli/gpus/gpu_list.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "cadre/core/os/files/file.h"

namespace cadre::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxFileBytes = 64 << 10;

std::string read_text(const std::string& path) {
  auto text = os::read_file(path, kMaxFileBytes);
  if (!text.ok()) return "";
  text->resize(text->find_last_not_of(" \t\r\n") + 1);
  return *std::move(text);
}

std::optional<int> parse_index(std::string_view text) {
  int number = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (failure != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// Returns the value of a line such as "Model: \t NVIDIA H100"; empty if there is none.
std::string field_of(std::string_view text, std::string_view name) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos ||
        line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1) != name)
      continue;
    line.remove_prefix(colon + 1);
    const size_t first = line.find_first_not_of(" \t");
    return first == std::string_view::npos ? "" : std::string(line.substr(first));
  }
  return "";
}

// Returns whether the name is that of a PCI device, such as "0000:17:00.0".
bool is_pci_id(std::string_view name) {
  return std::ranges::count(name, ':') == 2 && name.find('.') != std::string_view::npos;
}

void read_pci_device(Gpu& gpu, const std::string& root) {
  const std::string folder = root + "/sys/bus/pci/devices/" + gpu.pci_id;
  gpu.link_speed = read_text(folder + "/current_link_speed");
  gpu.link_width = read_text(folder + "/current_link_width");
  gpu.numa_node = parse_index(read_text(folder + "/numa_node"));
  if (gpu.numa_node && *gpu.numa_node < 0) gpu.numa_node.reset();
  std::error_code failure;
  const fs::path real = fs::canonical(folder, failure);
  if (failure) return;
  for (const fs::path& part : real) {
    const std::string name = part.string();
    if (is_pci_id(name) || name.starts_with("pci")) gpu.path.push_back(name);
  }
}

}  // namespace

std::vector<Gpu> list_gpus(const std::string& root) {
  std::vector<Gpu> gpus;
  std::error_code failure;
  const std::string folder = root + "/proc/driver/nvidia/gpus";
  for (fs::directory_iterator entry(folder, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    const std::string text = read_text(entry->path().string() + "/information");
    const std::optional<int> minor = parse_index(field_of(text, "Device Minor"));
    if (!minor) continue;
    // A container has the device files of its GPUs only, but the list of all GPUs of the host.
    if (!fs::exists(root + "/dev/nvidia" + std::to_string(*minor), failure)) {
      failure.clear();
      continue;
    }
    Gpu gpu{.index = *minor,
            .model = field_of(text, "Model"),
            .pci_id = entry->path().filename().string(),
            .uuid = field_of(text, "GPU UUID")};
    read_pci_device(gpu, root);
    gpus.push_back(std::move(gpu));
  }
  std::ranges::sort(gpus, {}, &Gpu::index);
  return gpus;
}

GpuLink link_between(const Gpu& a, const Gpu& b) {
  if (a.path.empty() || b.path.empty()) return GpuLink::kUnknown;
  if (a.path.front() != b.path.front()) {
    return a.numa_node == b.numa_node ? GpuLink::kHostBridge : GpuLink::kNumaNodes;
  }
  const auto [end_a, end_b] = std::ranges::mismatch(a.path, b.path);
  // A device of the common path is the root ("pci0000:15") or a bridge. The two ends are no
  // bridges.
  const auto num_common = end_a - a.path.begin();
  const auto num_bridges = (a.path.end() - end_a - 1) + (b.path.end() - end_b - 1);
  if (num_common <= 1) return GpuLink::kHostBridge;
  return num_bridges <= 2 ? GpuLink::kOneBridge : GpuLink::kBridges;
}

std::string to_string(GpuLink link) {
  switch (link) {
    case GpuLink::kOneBridge:
      return "one PCIe bridge";
    case GpuLink::kBridges:
      return "several PCIe bridges";
    case GpuLink::kHostBridge:
      return "the host bridge";
    case GpuLink::kNumaNodes:
      return "two NUMA nodes";
    case GpuLink::kUnknown:
      break;
  }
  return "an unknown path";
}

bool has_nvswitch(const std::string& root) {
  std::error_code failure;
  return fs::exists(root + "/dev/nvidia-nvswitchctl", failure) ||
         fs::exists(root + "/dev/nvidia-nvswitch0", failure);
}

}  // namespace cadre::cli
