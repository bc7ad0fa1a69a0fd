// The messages between a launcher (fork_server.h) and the template from which it forks workers
// (prepare_restart.h). Both are processes of one machine and of one build.
//
// Threads: any. Blocking: until the bytes are transferred, or the timeout of the socket. Errors:
// kUnavailable if the other end is gone or too slow.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/proc/inherited.h"

namespace cadre::os {

// The first message of a connection, which the template sends.
struct ForkHello {
  char build[32] = {};      // CADRE_VERSION
  int32_t program_pid = 0;  // the process that has called prepare_restart()
};

ForkHello make_fork_hello();
bool is_of_this_build(const ForkHello& hello);

// Asks the template to fork a worker. The template answers with the worker's pid as int32_t; -1 if
// it could not fork.
struct ForkRequest {
  int32_t launcher_pid = 0;
  std::vector<int> ignored_signals;
  SoftLimits soft_limits;
  std::vector<int> cores;                // the same as in ProcessOptions
  std::vector<std::string> environment;  // "NAME=value", the worker's whole environment
};

Status send_bytes(int socket, const void* data, size_t num_bytes);
Status receive_bytes(int socket, void* data, size_t num_bytes);

// The descriptors become standard output and standard error of the worker.
Status send_fork_request(int socket, const ForkRequest& request, int output, int error);

struct ReceivedForkRequest {
  ForkRequest request;
  Fd output;
  Fd error;
};
Result<ReceivedForkRequest> receive_fork_request(int socket);

}  // namespace cadre::os
