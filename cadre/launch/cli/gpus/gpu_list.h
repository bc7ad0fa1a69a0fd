// The NVIDIA GPUs of a host and the PCI Express links between them, from files of the driver and of
// the kernel. No library of the driver is loaded. NVLink is not visible in these files.
//
// Threads: any. Blocking: reads small files. Errors: none; what a file does not say is empty.
// Source: /proc/driver/nvidia/gpus and /sys/bus/pci of Linux; the kinds of links of `nvidia-smi
// topo -m`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cadre::cli {

struct Gpu {
  int index = 0;            // the number of the device file /dev/nvidiaN, which need not be CUDA's
  std::string model = {};   // such as "NVIDIA H100 80GB HBM3"
  std::string pci_id = {};  // such as "0000:17:00.0"
  std::string uuid = {};
  std::string link_speed = {};  // such as "32.0 GT/s PCIe", and the number of lanes
  std::string link_width = {};
  std::optional<int> numa_node = {};  // nullopt if the host has one node
  // The folders of the PCI devices on the way from the root to the GPU, the GPU's last.
  std::vector<std::string> path = {};
};

// How far two GPUs are apart, from near to far.
enum class GpuLink : uint8_t {
  kOneBridge,   // at most one PCI Express bridge: PIX
  kBridges,     // several bridges, below one host bridge: PXB
  kHostBridge,  // host bridges of one NUMA node: PHB and NODE
  kNumaNodes,   // two NUMA nodes: SYS
  kUnknown,
};

// Returns the GPUs in the order of their device files. `root` is prepended to absolute paths; it is
// empty except in tests.
std::vector<Gpu> list_gpus(const std::string& root = {});
GpuLink link_between(const Gpu& a, const Gpu& b);
std::string to_string(GpuLink link);
// Returns whether the host has NVSwitches, which connect all of its GPUs by NVLink.
bool has_nvswitch(const std::string& root = {});

}  // namespace cadre::cli
