// The failure of a job, left for the program that started the launcher: a launcher that runs as a
// worker of torchrun or of another `cadre run` has a TORCHELASTIC_ERROR_FILE of its own.
//
// Threads: pure but for the files. Blocking: for the time of the disk.
// Errors: kUnavailable with the path and the system's reason.
// Source: torch.distributed.elastic's ErrorHandler.dump_error_file and ProcessFailure, which reads
// the file.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "cadre/base/error.h"
#include "cadre/launch/worker_group.h"

namespace cadre::launch {

inline constexpr size_t kMaxErrorFileBytes = 1 << 20;  // of a worker's file that are read

struct JobFailure {
  WorkerExit first;
  std::string host;
  int num_workers = 1;
  std::string worker_file;  // where the worker may have left its exception
  std::deque<std::string> last_lines;
  int64_t timestamp_s = 0;  // since 1970
};

// Writes {"message": {"message": ..., "errorCode": ..., "extraInfo": {"timestamp": ...}}}: the
// worker's own file with the error code added if it left one, else how it ended, with its last
// lines in the place of the traceback.
Status write_error_file(const std::string& path, const JobFailure& failure);

}  // namespace cadre::launch
