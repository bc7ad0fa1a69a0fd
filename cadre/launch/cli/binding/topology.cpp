#include "cadre/launch/cli/binding/topology.h"

#include <hwloc.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "cadre/core/os/io/errno_error.h"

namespace cadre::cli {
namespace {

// The kinds of caches that cores may share, from the highest level.
constexpr std::array kCaches{HWLOC_OBJ_L5CACHE, HWLOC_OBJ_L4CACHE, HWLOC_OBJ_L3CACHE,
                             HWLOC_OBJ_L2CACHE, HWLOC_OBJ_L1CACHE};

Cores cores_of(hwloc_const_cpuset_t set) {
  Cores cores;
  for (int core = hwloc_bitmap_first(set); core >= 0; core = hwloc_bitmap_next(set, core)) {
    cores.push_back(core);
  }
  return cores;
}

// Returns the cores of each object of this type inside the set.
std::vector<Cores> groups_inside(hwloc_topology_t topology, hwloc_const_cpuset_t set,
                                 hwloc_obj_type_t type) {
  std::vector<Cores> groups;
  hwloc_obj_t object = nullptr;
  while ((object = hwloc_get_next_obj_inside_cpuset_by_type(topology, set, type, object)) !=
         nullptr) {
    Cores cores = cores_of(object->cpuset);
    if (!cores.empty()) groups.push_back(std::move(cores));
  }
  std::ranges::sort(groups);
  return groups;
}

std::vector<Cores> complexes_inside(hwloc_topology_t topology, hwloc_const_cpuset_t set) {
  std::vector<Cores> complexes;
  for (const hwloc_obj_type_t cache : kCaches) {
    complexes = groups_inside(topology, set, cache);
    if (!complexes.empty()) break;
  }
  // A virtual machine may hide its caches, and a cache may be shared by several nodes.
  if (complexes.empty()) complexes.push_back(cores_of(set));
  std::ranges::stable_sort(complexes,
                           [](const Cores& a, const Cores& b) { return a.size() > b.size(); });
  return complexes;
}

Cores socket_of(hwloc_topology_t topology, hwloc_const_cpuset_t set) {
  const hwloc_obj_t socket =
      hwloc_get_next_obj_covering_cpuset_by_type(topology, set, HWLOC_OBJ_PACKAGE, nullptr);
  // A node may have the cores of several sockets.
  return cores_of(socket == nullptr ? set : socket->cpuset);
}

}  // namespace

void Topology::Destroy::operator()(hwloc_topology* topology) const {
  hwloc_topology_destroy(topology);
}

Result<Topology> Topology::load(const char* description) {
  const auto failed = [] {
    return os::errno_error(ErrorCode::kUnavailable, "read the cores of this machine (hwloc)",
                           errno);
  };
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return failed();
  Handle handle(raw);
  if (description != nullptr) {
    if (hwloc_topology_set_synthetic(raw, description) != 0) return failed();
  } else if (hwloc_topology_set_flags(raw, HWLOC_TOPOLOGY_FLAG_IS_THISSYSTEM |
                                               HWLOC_TOPOLOGY_FLAG_RESTRICT_TO_CPUBINDING) != 0) {
    return failed();
  }
  if (hwloc_topology_load(raw) != 0) return failed();
  return Topology(std::move(handle));
}

Result<Topology> Topology::of_this_machine() {
  return load(nullptr);
}

Result<Topology> Topology::synthetic(const std::string& description) {
  return load(description.c_str());
}

std::vector<NumaNode> Topology::nodes() const {
  std::vector<NumaNode> nodes;
  hwloc_topology_t topology = handle_.get();
  hwloc_obj_t object = nullptr;
  while ((object = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, object)) != nullptr) {
    const hwloc_const_cpuset_t set = object->cpuset;
    Cores cores = cores_of(set);
    // Memory without cores is a node, too, and fast and slow memory of the same cores are two.
    const bool is_known =
        std::ranges::any_of(nodes, [&](const NumaNode& node) { return node.cores == cores; });
    if (cores.empty() || is_known) continue;
    nodes.push_back({.number = static_cast<int>(object->os_index),
                     .cores = std::move(cores),
                     .socket = socket_of(topology, set),
                     .physical_cores = groups_inside(topology, set, HWLOC_OBJ_CORE),
                     .core_complexes = complexes_inside(topology, set)});
  }
  std::ranges::sort(nodes, {}, &NumaNode::number);
  return nodes;
}

}  // namespace cadre::cli
