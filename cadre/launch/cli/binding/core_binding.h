// The cores to which --numa-binding binds each worker.
//
// A worker is placed on the NUMA node of its GPU, the one whose number among the visible GPUs is
// the worker's local rank. If there are fewer GPUs than workers, the workers are spread over the
// nodes evenly, neighbours together.
//
// Threads: pure functions, except that gpu_nodes() reads files. Blocking: never. Errors:
// kInvalidArgument with a sentence for the user. Source: torch/numa/binding.py of torch 2.13.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/os/proc/environment.h"
#include "cadre/launch/cli/binding/topology.h"

namespace cadre::cli {

enum class BindingMode {
  kNode,         // all cores of the node
  kSocket,       // all cores of the node's socket
  kExclusive,    // whole physical cores of the node, which no other worker of the node has
  kCoreComplex,  // one group of cores of the node that share a cache
};

// Parses node, socket, exclusive or core-complex; nullopt for any other text.
std::optional<BindingMode> parse_binding_mode(std::string_view text);

// The folders in which the kernel and NVIDIA's driver describe the GPUs.
struct GpuFolders {
  std::string driver = "/proc/driver/nvidia/gpus";  // has a folder for each GPU, its PCI address
  std::string devices = "/sys/bus/pci/devices";
};

// Returns the number of the NUMA node of each worker's GPU; empty if this machine has fewer visible
// GPUs than workers. GPUs are numbered by their PCI addresses, as CUDA does on machines with equal
// GPUs and with CUDA_DEVICE_ORDER=PCI_BUS_ID.
Result<std::vector<int>> gpu_nodes(const os::Environment& environment, int num_workers,
                                   const GpuFolders& folders = {});

// Returns the cores of each worker. `nodes_of_gpus` is the result of gpu_nodes(). The result is
// empty if binding has no effect, because each worker would get all cores.
Result<std::vector<Cores>> bind_workers(const Topology& topology, BindingMode mode, int num_workers,
                                        std::span<const int> nodes_of_gpus);

}  // namespace cadre::cli
