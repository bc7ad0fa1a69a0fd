// The command line of `cadre run`, whose options about the job `cadre train` has too.
//
// Threads: plain values. Blocking: never. Errors: kInvalidArgument with a sentence that names the
// invalid word or variable and, if there is one, a similar option. Source: torchrun's flags, in
// both spellings, and its PET_ variables and TORCH_ELASTIC_SHUTDOWN_TIMEOUT; a flag takes
// precedence over its variable. scheduler_environment.h has the variables of srun and mpirun.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/os/proc/environment.h"
#include "cadre/core/os/proc/machine.h"
#include "cadre/launch/cli/binding/core_binding.h"
#include "cadre/launch/cli/etcd/etcd_client.h"
#include "cadre/launch/cli/option_words.h"
#include "cadre/launch/cli/scheduler/scheduler_environment.h"
#include "cadre/launch/hosts/join_job.h"
#include "cadre/launch/job/job_events.h"
#include "cadre/launch/job/output/log_spec.h"

namespace cadre::cli {

// An option whose value is a host. It must be this host.
struct NamedHost {
  GivenOption given;
  std::string host;
};

// How the hosts of a job find each other: --rdzv-backend.
enum class RendezvousBackend : uint8_t { kStatic, kC10d, kEtcd, kFile };

// A command that starts a job with the options of `cadre run`.
struct JobCommand {
  std::string_view name = "cadre run";  // begins messages
  std::span<const OptionSpec> own_options = {};
  // false: the command has a program of its own. Then the options that say how PROGRAM is executed
  // are unknown, and options may follow the other words.
  bool takes_program = true;
};

struct RunOptions {
  // The value is a number, or auto, gpu or cpu.
  GivenOption num_workers{.name = "--nproc-per-node", .spelling = "--nproc-per-node", .value = "1"};
  bool no_python = false;
  bool is_module = false;
  bool is_python = false;  // the program is run by Python, whatever the suffix of its name is
  bool wants_help = false;
  bool is_dry_run = false;
  std::string run_id;
  std::string role = "default";
  uint16_t store_port = 0;  // 0 means a free port
  std::vector<NamedHost> hosts;
  // --nnodes MIN:MAX. With more than one host, `several` says how this one joins.
  size_t min_hosts = 1;
  size_t max_hosts = 1;
  RendezvousBackend backend = RendezvousBackend::kStatic;
  // A scheduler that has started `cadre run` on several hosts says what --nnodes, --node-rank and
  // the endpoint are if they are not given. An empty host of the endpoint in `several` means that
  // its process manager must be asked.
  std::optional<SchedulerStart> scheduled;
  launch::HostsSpec several;
  EtcdOptions etcd;           // how --rdzv-backend etcd reaches the service
  std::string registry_path;  // the file or folder of --rdzv-backend file
  std::string token_file;
  std::optional<std::string> prefix_template;
  std::string default_prefix = "[${rank}] ";
  launch::LogSpec logs;
  launch::EventTargets events;
  bool has_virtual_local_ranks = false;
  std::optional<std::vector<int>> stop_signals;
  std::optional<BindingMode> binding;
  std::optional<int> input_rank;
  std::string flight_folder;  // empty: records stay in memory
  std::string strategy;       // of cadre::Training in the program; empty: not given
  int max_restarts = 0;
  std::optional<Duration> shutdown_timeout;
  ParsedWords given;  // all options as they were given, among them JobCommand::own_options
  // The name of the program and its arguments, or the other words of a command that takes none.
  std::vector<std::string> program;
  std::vector<std::string> warnings;
};

Result<RunOptions> parse_run_options(Words words, const os::Environment& environment,
                                     const JobCommand& command = {});

// Returns the number of workers for `--nproc-per-node`. The value auto means the number of GPUs, or
// of cores if there is no GPU.
Result<int> num_workers_of(const GivenOption& given, const os::MachineInfo& machine);

// The text of `cadre run --help`.
std::string run_help();

}  // namespace cadre::cli
