// Finds shared libraries in the folders that the dynamic loader searches, and their versions,
// without loading or executing anything.
//
// Threads: any. Blocking: for the time to list folders, which is indefinite for a network file
// system whose server is gone; find_version() reads the file. Errors: none;
// nullopt or an empty text for what is not found.
// Source: ld.so(8); the folders of pip's packages of NVIDIA, which torch loads by itself.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/launch/cli/doctor/host_view.h"

namespace cadre::cli {

struct FoundLibrary {
  std::string path;     // lacks the root of the view
  std::string version;  // the numbers in the name of the file, "2.21.5"; may be empty or only "2"
};

// Returns the folders of LD_LIBRARY_PATH, of torch, of /etc/ld.so.conf, and the usual ones, in this
// order and each once.
std::vector<std::string> library_folders(const HostView& view);

// Returns the first library called NAME.so or NAME.so.VERSION. Of several versions in one folder,
// returns the one to which the link NAME.so.NUMBER points, else the one with the longest version.
std::optional<FoundLibrary> find_library(const HostView& view, std::string_view name);

// Returns the printable text that follows `label` and blanks in a file and begins with a digit, up
// to the first byte that is in `ends` or not printable; empty if there is none. A label that is
// followed by another byte, as in the format string "Open MPI v%d.%d", is skipped. Reads at most
// the first 64 MiB.
std::string find_version(const HostView& view, const std::string& path, std::string_view label,
                         std::string_view ends);

}  // namespace cadre::cli
