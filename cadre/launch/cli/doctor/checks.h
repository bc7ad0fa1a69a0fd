// The checks of `cadre doctor` on one host. Each is a function of the view and of the files below
// its root, so that tests can plant every problem.
//
// Threads: any. Blocking: for the time to read small files. check_gpus() and check_libraries()
// search library folders, which may block indefinitely (library_finder.h), and read up to 64 MiB of
// a library of MPI; check_host() waits for them for at most 10 s. Errors: none; what cannot be read
// is a finding. Nothing is executed or loaded.
#pragma once

#include <functional>
#include <vector>

#include "cadre/launch/cli/doctor/finding.h"
#include "cadre/launch/cli/doctor/host_view.h"

namespace cadre::cli {

std::vector<Finding> check_names(const HostView& view);
std::vector<Finding> check_addresses(const HostView& view);
std::vector<Finding> check_ports(const HostView& view);
std::vector<Finding> check_clocks(const HostView& view);
std::vector<Finding> check_limits(const HostView& view);
std::vector<Finding> check_cgroups(const HostView& view);
std::vector<Finding> check_shared_memory(const HostView& view);
std::vector<Finding> check_huge_pages(const HostView& view);
std::vector<Finding> check_cores(const HostView& view);
std::vector<Finding> check_disks(const HostView& view);
std::vector<Finding> check_gpus(const HostView& view);
std::vector<Finding> check_libraries(const HostView& view);
std::vector<Finding> check_python(const HostView& view);

// Returns the findings of `search`, which runs in a thread of its own and owns what it uses; after
// `limit` returns the problem that it has not ended.
std::vector<Finding> search_within(Duration limit, std::function<std::vector<Finding>()> search);

// Runs all of them, in this order.
std::vector<Finding> check_host(const HostView& view);

}  // namespace cadre::cli
