// The folder of a job's flight records: that of --flight-records or CADRE_FLIGHT_RECORDS; for a job
// that a worker of another job started, a subfolder of it, because the ranks and groups of both
// jobs have the same names.
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

// Creates the folder of CADRE_FLIGHT_RECORDS, if it is set, and sets the variable to the absolute
// path, because workers may change their working directory. In the environment of a worker the
// folder is FOLDER/rankR-jobN, for the N-th job that rank R has started.
Status prepare_flight_folder(os::Environment& environment);

// The folders FOLDER/rankR-jobN and their subfolders of this form, sorted. Links are not followed.
std::vector<std::string> nested_flight_folders(const std::string& folder);

}  // namespace cadre::cli
