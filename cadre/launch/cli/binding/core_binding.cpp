#include "cadre/launch/cli/binding/core_binding.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <system_error>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/launch/job/worker_environment.h"

namespace cadre::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxFileBytes = 64 << 10;

std::optional<int> number_in(std::string_view text) {
  while (text.ends_with('\n')) text.remove_suffix(1);
  int number = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool is_whole = parsed.ec == std::errc() && parsed.ptr == text.data() + text.size();
  return is_whole ? std::optional(number) : std::nullopt;
}

// Returns the PCI addresses of the GPUs, sorted.
std::vector<std::string> pci_addresses(const GpuFolders& folders) {
  std::vector<std::string> addresses;
  std::error_code failure;
  for (fs::directory_iterator entry(folders.driver, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    addresses.push_back(entry->path().filename().string());
  }
  std::ranges::sort(addresses);
  return addresses;
}

// Returns whether `name`, an entry of CUDA_VISIBLE_DEVICES, begins the UUID of the GPU.
bool has_uuid(const GpuFolders& folders, const std::string& address, const std::string& name) {
  const auto text =
      os::read_file(cadre::format("{}/{}/information", folders.driver, address), kMaxFileBytes);
  return name.starts_with("GPU-") && text.ok() && text->find(name) != std::string::npos;
}

std::optional<std::string> address_of(const GpuFolders& folders,
                                      const std::vector<std::string>& addresses,
                                      const std::string& name) {
  if (const auto number = number_in(name)) {
    const bool exists = *number >= 0 && static_cast<size_t>(*number) < addresses.size();
    return exists ? std::optional(addresses[static_cast<size_t>(*number)]) : std::nullopt;
  }
  const auto found = std::ranges::find_if(
      addresses, [&](const std::string& address) { return has_uuid(folders, address, name); });
  return found == addresses.end() ? std::nullopt : std::optional(*found);
}

// Returns the cores of the worker that is number `index` of the `count` workers of the node.
Result<Cores> exclusive_cores(const NumaNode& node, size_t index, size_t count) {
  const size_t num_cores = node.physical_cores.size();
  if (num_cores < count) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("NUMA node {} has {} physical cores for {} workers, so not every "
                               "worker can have one of its own; start fewer workers or bind to "
                               "node",
                               node.number, num_cores, count));
  }
  // The first workers of the node have one core more if the number is not divisible.
  const size_t share = num_cores / count;
  const size_t num_larger = num_cores % count;
  const size_t begin = index * share + std::min(index, num_larger);
  const size_t end = begin + share + (index < num_larger ? 1 : 0);
  Cores cores;
  for (size_t i = begin; i < end; ++i) {
    const Cores& threads = node.physical_cores[i];
    cores.insert(cores.end(), threads.begin(), threads.end());
  }
  std::ranges::sort(cores);
  return cores;
}

Result<Cores> cores_on(const NumaNode& node, BindingMode mode, size_t index, size_t count) {
  if (mode == BindingMode::kNode) return node.cores;
  if (mode == BindingMode::kSocket) return node.socket;
  if (mode == BindingMode::kExclusive) return exclusive_cores(node, index, count);
  return node.core_complexes[index % node.core_complexes.size()];
}

// Returns the place in `nodes` of each worker's node.
Result<std::vector<size_t>> place_workers(std::span<const NumaNode> nodes, int num_workers,
                                          std::span<const int> nodes_of_gpus) {
  std::vector<size_t> places;
  for (int rank = 0; rank < num_workers; ++rank) {
    if (nodes_of_gpus.empty()) {
      places.push_back(static_cast<size_t>(rank) * nodes.size() / static_cast<size_t>(num_workers));
      continue;
    }
    const int wanted = nodes_of_gpus[static_cast<size_t>(rank)];
    const auto found = std::ranges::find(nodes, wanted, &NumaNode::number);
    if (found == nodes.end()) {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("the GPU of local rank {} is at NUMA node {}, whose cores this "
                                 "process may not use (taskset, a container or a batch system "
                                 "limits them)",
                                 rank, wanted));
    }
    places.push_back(static_cast<size_t>(found - nodes.begin()));
  }
  return places;
}

}  // namespace

std::optional<BindingMode> parse_binding_mode(std::string_view text) {
  if (text == "node") return BindingMode::kNode;
  if (text == "socket") return BindingMode::kSocket;
  if (text == "exclusive") return BindingMode::kExclusive;
  if (text == "core-complex") return BindingMode::kCoreComplex;
  return std::nullopt;
}

Result<std::vector<int>> gpu_nodes(const os::Environment& environment, int num_workers,
                                   const GpuFolders& folders) {
  const std::vector<std::string> addresses = pci_addresses(folders);
  std::vector<int> nodes;
  for (int rank = 0; rank < num_workers; ++rank) {
    const auto name = launch::gpu_of_worker(environment, rank);
    const auto number = name.ok() ? number_in(*name) : std::nullopt;
    const bool is_absent =
        !name.ok() || name->empty() ||
        (number && (*number < 0 || *number >= static_cast<int>(addresses.size())));
    if (addresses.empty() || is_absent) return std::vector<int>();
    const auto address = address_of(folders, addresses, *name);
    if (!address) {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("no GPU of {} has the name \"{}\" of CUDA_VISIBLE_DEVICES; name "
                                 "the GPUs by their numbers",
                                 folders.driver, *name));
    }
    const auto text =
        os::read_file(cadre::format("{}/{}/numa_node", folders.devices, *address), kMaxFileBytes);
    const auto node = text.ok() ? number_in(*text) : std::nullopt;
    // The kernel writes -1 if the machine has one node.
    nodes.push_back(std::max(node.value_or(0), 0));
  }
  return nodes;
}

Result<std::vector<Cores>> bind_workers(const Topology& topology, BindingMode mode, int num_workers,
                                        std::span<const int> nodes_of_gpus) {
  const std::vector<NumaNode> nodes = topology.nodes();
  if (nodes.empty()) return std::vector<Cores>();
  const auto places = place_workers(nodes, num_workers, nodes_of_gpus);
  if (!places.ok()) return places.error();
  std::map<size_t, size_t> num_placed;
  std::vector<Cores> cores_of;
  size_t num_unbound = 0;
  Cores all;
  for (const NumaNode& node : nodes) all.insert(all.end(), node.cores.begin(), node.cores.end());
  std::ranges::sort(all);
  for (const size_t place : *places) {
    const auto count = static_cast<size_t>(std::ranges::count(*places, place));
    auto cores = cores_on(nodes[place], mode, num_placed[place]++, count);
    if (!cores.ok()) return cores.error();
    if (*cores == all) ++num_unbound;
    cores_of.push_back(*std::move(cores));
  }
  if (num_unbound == cores_of.size()) cores_of.clear();
  return cores_of;
}

}  // namespace cadre::cli
