// What the checks of `cadre doctor` know about a host: answers of the kernel and of libraries, and
// the root folder below which the checks read /proc, /sys and /etc. Tests plant their own.
//
// Threads: plain values; read_host_view() from one thread. Blocking: read_host_view() for at most
// about 7 s: names, folders and the search for torch have 5 s (background_read.h), connections to
// this host 1 s, and the distances of cores 0.7 s.
// Errors: none; what could not be read is in the view as a text or as nullopt.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/os/files/folder_space.h"
#include "cadre/core/os/host/clock_status.h"
#include "cadre/core/os/host/core_distance.h"
#include "cadre/core/os/host/process_limit.h"
#include "cadre/core/os/io/interfaces.h"
#include "cadre/core/os/proc/environment.h"
#include "cadre/core/os/system.h"
#include "cadre/launch/cli/torch_finder.h"

namespace cadre::cli {

// The addresses of a name, in the resolver's order.
struct NameLookup {
  std::vector<std::string> addresses = {};
  std::string failure = {};  // why there are none
  Duration took{};
};

struct PortProbe {
  uint16_t port = 0;         // 0 stands for any free port
  std::string failure = {};  // why it cannot be used; empty if it can
};

struct FolderView {
  std::string name = {};  // "TMPDIR", "run folder", or "folder" for one that the user has named
  std::string path = {};
  std::optional<os::FolderSpace> space = {};
  std::string failure = {};  // why there is no `space`
};

struct ClockView {
  std::optional<os::WallClockSync> sync = {};
  Duration jump{};  // the jump of the wall clock while the view was read
  Duration read_cost{};
};

struct LimitView {
  os::ProcessLimit descriptors = {};
  os::ProcessLimit processes = {};
  os::ProcessLimit locked_bytes = {};
  os::ProcessLimit core_bytes = {};
  os::ProcessLimit address_bytes = {};
  os::ProcessLimit file_bytes = {};
};

struct PythonView {
  std::string python = {};  // what find_python() returns
  std::optional<TorchInstallation> torch = {};
  std::string missing_torch = {};  // why there is no torch
};

struct HostView {
  std::string root = {};  // is prepended to absolute paths; empty except in tests
  os::Environment environment = {};
  os::HostInfo host = {};
  NameLookup own_name = {};
  std::vector<os::InterfaceAddress> interfaces = {};
  // The addresses from which packets to other networks leave.
  std::optional<os::InterfaceAddress> source_ipv4 = {};
  std::optional<os::InterfaceAddress> source_ipv6 = {};
  std::vector<PortProbe> ports = {};
  ClockView clocks = {};
  LimitView limits = {};
  std::string segment_failure = {};  // why shared memory cannot be made; empty if it can
  std::string thread_failure = {};   // why no thread can be started; empty if one can
  FolderView shm = {};               // /dev/shm
  std::vector<FolderView> folders = {};
  std::vector<os::CoreDistance> core_distances = {};
  size_t num_core_pairs = 0;  // that were to be measured
  PythonView python = {};

  // Returns the file's text without the white space at its end; empty if it cannot be read.
  std::string read(std::string_view path) const;
  bool has_file(std::string_view path) const;
};

struct HostViewOptions {
  std::optional<uint16_t> port = {};  // a port that a job will use
  // A folder for snapshots and logs. If it is empty, the working folder is the run folder.
  std::string run_folder = {};
  // The soft limit of descriptors that the command was started with, if it has changed it.
  std::optional<uint64_t> inherited_descriptors = {};
};

// Returns whether other hosts can use the address: it is neither loopback nor link-local.
bool leads_to_peers(const os::InterfaceAddress& address);

// Returns the address at which other hosts reach this one best; empty if there is none: that from
// which packets to other networks leave, else the first one of an interface.
std::string address_for_peers(const HostView& view);
std::string own_address_for_peers();  // reads the interfaces and routes of this host

HostView read_host_view(os::System& system, const os::Environment& environment,
                        const HostViewOptions& options);

}  // namespace cadre::cli
