// Forks workers from the template, a process that has loaded the program and its libraries. Loading
// libtorch takes a process 0.14 to 0.3 s; a fork takes milliseconds. A program makes its template
// with prepare_restart(), for the workers of restarts. A launcher that runs a function of its own
// process makes it with start().
//
// After listen() the template's connection is accepted only from the process that the launcher
// started, of this user, of this build, and executing the given program. A script that prepares the
// environment and then executes the program must run again in each attempt.
//
// Threads: one, the thread that uses the Process objects. Blocking: accept_template() for a second,
// fork_process() for a few seconds, if the template does not answer. Lifetime: the destructor kills
// the template; workers that were forked belong to their Process. The process must be a subreaper
// (guardian.h), which adopts the template and the workers. Errors: listen() and start() return
// kUnavailable.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/proc/process.h"

namespace cadre::os {

class ForkServer {
 public:
  // The environment variable that passes path() to the program.
  static constexpr const char* kVariable = "CADRE_FORK_SERVER";

  // Listens at a unix socket of this path, in a folder that only this user can enter.
  static Result<std::unique_ptr<ForkServer>> listen(const std::string& path);
  // Forks this process, which must have one thread, as the template. Each worker calls
  // `worker_main` and ends with what it returns, without destructors of static objects and without
  // functions of atexit(), which belong to the process that called start().
  static Result<std::unique_ptr<ForkServer>> start(const std::function<int()>& worker_main);
  ForkServer(std::string path, Fd listener)
      : path_(std::move(path)), listener_(std::move(listener)) {}
  ~ForkServer();
  ForkServer(const ForkServer&) = delete;
  ForkServer& operator=(const ForkServer&) = delete;

  const std::string& path() const { return path_; }
  // Accepts a pending connection if it comes from a template that the process `program_pid` has
  // forked and that executes `executable`. Does nothing if a template is connected already.
  void accept_template(int program_pid, const std::string& executable);
  bool is_ready() const { return connection_.is_open(); }
  // The pid of the template, also after its end; nullopt if no template has connected.
  std::optional<int> template_pid() const { return template_pid_; }

  // Forks a worker, which reads from /dev/null, with the environment, signals, limits, cores and
  // output of `options`; its executable and arguments are those of the template. After an error the
  // template is not used again.
  Result<std::unique_ptr<Process>> fork_process(const ProcessOptions& options);

 private:
  Result<int> request(const ProcessOptions& options, int output, int error);

  const std::string path_;
  const Fd listener_;
  Fd connection_;
  std::optional<int> template_pid_;
};

}  // namespace cadre::os
