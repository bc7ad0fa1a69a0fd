// Runs the `cadre` command for tests, and finds processes and files that it leaves behind.
//
// Threads: one thread. Blocking: every wait ends after kPatience at the latest; then the test
// fails. Lifetime: the destructor kills the command; then the command's guardian process kills the
// workers. TMPDIR of the command is a folder that the destructor removes, because a command whose
// two processes are both killed cannot remove its own.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/descendants.h"
#include "cadre/core/os/proc/environment.h"
#include "cadre/core/os/proc/process.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/paths.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {

inline constexpr Duration kPatience = std::chrono::seconds(60);
inline constexpr std::string_view kMarkerName = "CADRE_TEST_MARKER";

struct CommandResult {
  int exit_code = -1;  // the code that a shell would report; -1 if the command did not end in time
  std::string output;
  std::string error;
};

class CadreCommand {
 public:
  struct Options {
    std::vector<std::pair<std::string, std::string>> environment = {};
    bool reads_output = true;  // false: the test does not read the pipe of the output
    // A script for sh that runs the command as "$@", with which a test can set limits or
    // redirections. If empty, the command is started directly.
    std::string shell = "";
  };

  explicit CadreCommand(std::vector<std::string> words)
      : CadreCommand(std::move(words), Options{}) {}
  CadreCommand(std::vector<std::string> words, const Options& options)
      : system_(os::make_native_system()), reads_output_(options.reads_output) {
    os::Environment environment = os::read_environment();
    std::array<std::byte, 8> random;
    system_->random_bytes(random);
    for (const std::byte byte : random) marker_ += cadre::format("{:02x}", int(byte));
    environment.set(kMarkerName, marker_);
    environment.set("TMPDIR", temporary_folder_.path().string());
    // A worker may be another test of this test program. It must not use the sharding variables
    // that CTest may have set for the program.
    environment.set("GTEST_TOTAL_SHARDS", "1");
    environment.set("GTEST_SHARD_INDEX", "0");
    for (const auto& [name, value] : options.environment) environment.set(name, value);
    std::string executable = testing::build_path("bin/cadre");
    words.insert(words.begin(), options.shell.empty() ? "cadre" : executable);
    if (!options.shell.empty()) {
      words.insert(words.begin(), {"sh", "-c", options.shell, "sh"});
      executable = "/bin/sh";
    }
    auto started = os::Process::start({.executable = std::move(executable),
                                       .arguments = std::move(words),
                                       .environment = environment.to_texts(),
                                       .ignored_signals = os::ignored_signals()});
    if (!started.ok()) throw started.error();
    process_ = *std::move(started);
  }

  // Returns the command's TMPDIR.
  const std::filesystem::path& temporary_folder() const { return temporary_folder_.path(); }
  int pid() const { return process_->pid(); }
  void send(int signal) { ::kill(process_->pid(), signal); }
  // Returns the pid of the launcher's other process, which starts the workers and is the agent in a
  // job on several hosts. The command is its guardian. Returns 0 if there is none.
  int supervisor() const {
    std::ifstream children(cadre::format("/proc/{0}/task/{0}/children", pid()));
    int found = 0;
    children >> found;
    return found;
  }
  void start_reading() { reads_output_ = true; }
  // Returns the output and errors that had been read when the last wait ended.
  const CommandResult& seen() const { return result_; }
  // Returns the output and errors so far, with "exit code N" if the command has ended, for messages
  // of failures.
  std::string story() {
    step();
    if (const auto status = process_->try_wait()) result_.exit_code = status->shell_code();
    const std::string end =
        result_.exit_code == -1 ? "" : cadre::format("exit code {}\n", result_.exit_code);
    return result_.output + result_.error + end;
  }

  // Waits until `text` was written to stdout or stderr. Returns false after kPatience.
  bool wait_for(std::string_view text) {
    return step_until([&] {
      return result_.output.find(text) != std::string::npos ||
             result_.error.find(text) != std::string::npos;
    });
  }

  // Waits until the command has ended and its output was read completely.
  CommandResult wait() {
    step_until([&] {
      if (const auto status = process_->try_wait()) result_.exit_code = status->shell_code();
      return result_.exit_code != -1 && (!reads_output_ || (output_ended_ && error_ended_));
    });
    return result_;
  }

  // Returns the processes that have this command's marker in their environment: the command and all
  // processes that it has started.
  std::vector<int> marked_processes() const {
    std::vector<int> pids;
    const std::string wanted = std::string(kMarkerName) + "=" + marker_;
    std::error_code failure;
    for (std::filesystem::directory_iterator entry("/proc", failure), end; !failure && entry != end;
         entry.increment(failure)) {
      std::ifstream file(entry->path() / "environ", std::ios::binary);
      const std::string text((std::istreambuf_iterator<char>(file)), {});
      if (text.find(wanted) != std::string::npos) {
        pids.push_back(std::atoi(entry->path().filename().c_str()));
      }
    }
    return pids;
  }
  // Returns whether all marked processes end within kPatience.
  bool leaves_nothing() {
    return step_until([&] {
      process_->try_wait();
      return marked_processes().empty();
    });
  }

 private:
  bool step_until(const std::function<bool()>& is_done) {
    const Deadline deadline = system_->deadline_in(kPatience);
    while (!is_done()) {
      if (deadline.has_passed(system_->now())) return false;
      step();
    }
    return true;
  }

  void step() {
    std::array items{
        os::PollItem{.target = &process_->exit_event(), .want_read = result_.exit_code == -1},
        os::PollItem{.target = &process_->standard_output(),
                     .want_read = reads_output_ && !output_ended_},
        os::PollItem{.target = &process_->standard_error(), .want_read = !error_ended_}};
    system_->poll(items, system_->deadline_in(std::chrono::milliseconds(20)));
    if (reads_output_) take(process_->standard_output(), result_.output, output_ended_);
    take(process_->standard_error(), result_.error, error_ended_);
  }

  static void take(os::PipeReader& from, std::string& to, bool& has_ended) {
    std::vector<std::byte> buffer(64 << 10);
    const auto chunk = from.try_read(buffer);
    to.append(reinterpret_cast<const char*>(buffer.data()), chunk.num_bytes);
    has_ended = has_ended || chunk.has_ended;
  }

  std::unique_ptr<os::System> system_;
  bool reads_output_;
  std::string marker_;
  const testing::TemporaryFolder temporary_folder_;
  std::unique_ptr<os::Process> process_;
  CommandResult result_;
  bool output_ended_ = false;
  bool error_ended_ = false;
};

// Runs `cadre` with these arguments until it ends.
inline CommandResult run_cadre(std::vector<std::string> words,
                               std::vector<std::pair<std::string, std::string>> environment = {}) {
  return CadreCommand(std::move(words), {.environment = std::move(environment)}).wait();
}

// Returns the arguments for `cadre run --nproc-per-node N sh -c SCRIPT`.
inline std::vector<std::string> shell_job(int num_workers, std::string script) {
  return {"run", "--nproc-per-node", cadre::format("{}", num_workers), "sh",
          "-c",  std::move(script)};
}

// Replaces pids, durations and the host's name in `text`, which differ between runs, by # and HOST.
inline std::string masked(std::string text) {
  text = std::regex_replace(text, std::regex("pid [0-9]+"), "pid #");
  text = std::regex_replace(text, std::regex("after [0-9.]+ s"), "after # s");
  return std::regex_replace(text, std::regex(" on [^ ,]+, pid"), " on HOST, pid");
}

// Returns how often `text` has `wanted`.
inline size_t count_of(const std::string& text, const std::string& wanted) {
  size_t count = 0;
  for (size_t at = text.find(wanted); at != std::string::npos; at = text.find(wanted, at + 1)) {
    ++count;
  }
  return count;
}

}  // namespace cadre::cli
