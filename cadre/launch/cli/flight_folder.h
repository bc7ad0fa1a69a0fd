// The folder of a job's flight records, from --flight-records or CADRE_FLIGHT_RECORDS. A job that a
// worker of another job started uses a subfolder of that job's folder, because the ranks and groups
// of both jobs have the same names.
//
// Threads: any. Blocking: calls the file system. Errors: kUnavailable with the folder and the
// system's reason.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/os/proc/environment.h"

namespace cadre::cli {

// Creates the folder of CADRE_FLIGHT_RECORDS, if the variable is set, and sets the variable to the
// absolute path, because workers may change their working directory. In the environment of a worker
// the folder is FOLDER/rankR-jobN for the N-th job that rank R has started.
Status prepare_flight_folder(os::Environment& environment);

// Returns the folders FOLDER/rankR-jobN and their subfolders of this form, sorted. Does not follow
// links.
std::vector<std::string> nested_flight_folders(const std::string& folder);

}  // namespace cadre::cli
