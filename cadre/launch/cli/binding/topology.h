// The cores of this machine: NUMA nodes, sockets, physical cores and caches, from hwloc. Only the
// cores on which this process may run are in it.
//
// Threads: one. Blocking: for milliseconds, in the functions that make one. Errors: kUnavailable if
// hwloc cannot read the machine. A core is a number of the kernel (a hardware thread), as in
// sched_setaffinity().
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"

struct hwloc_topology;

namespace cadre::cli {

// The numbers of cores, ascending.
using Cores = std::vector<int>;

// A NUMA node that has cores.
struct NumaNode {
  int number = 0;  // the number that the kernel gives it
  Cores cores;
  Cores socket;                       // the cores of all nodes of its socket
  std::vector<Cores> physical_cores;  // each with its hardware threads
  // The groups of cores that share a cache of the highest level, the largest first.
  std::vector<Cores> core_complexes;
};

class Topology {
 public:
  static Result<Topology> of_this_machine();
  // Makes a topology from hwloc's description of one, such as "package:2 numa:2 l3:2 core:4 pu:2".
  static Result<Topology> synthetic(const std::string& description);

  // Returns the nodes that have cores, by number.
  std::vector<NumaNode> nodes() const;

 private:
  struct Destroy {
    void operator()(hwloc_topology* topology) const;
  };
  using Handle = std::unique_ptr<hwloc_topology, Destroy>;

  explicit Topology(Handle handle) : handle_(std::move(handle)) {}
  static Result<Topology> load(const char* description);

  Handle handle_;
};

}  // namespace cadre::cli
