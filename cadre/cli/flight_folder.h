// Where a job's flight records lie: the folder of --flight-records or CADRE_FLIGHT_RECORDS, and,
// for a job that a worker of another job started, a folder of its own in it, because both jobs have
// ranks and groups of the same names.
//
// Threads: any. Blocking: for the time of the file system.
// Errors: kUnavailable with the folder and the system's reason.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/os/proc/environment.h"

namespace cadre::cli {

// Makes the folder that CADRE_FLIGHT_RECORDS names, if it names one, and sets the variable to the
// whole path, because workers may change their folder. In the environment of a worker it becomes
// FOLDER/rankR-jobN: the N-th job that rank R has started there.
Status prepare_flight_folder(os::Environment& environment);

// The folders FOLDER/rankR-jobN, and those in them, sorted. Links are not followed.
std::vector<std::string> nested_flight_folders(const std::string& folder);

}  // namespace cadre::cli
