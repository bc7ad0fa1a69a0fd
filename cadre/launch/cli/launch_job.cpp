#include "cadre/launch/cli/launch_job.h"

#include <memory>
#include <optional>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/host/secret_file.h"
#include "cadre/core/os/proc/guardian.h"
#include "cadre/core/os/proc/machine.h"
#include "cadre/core/os/proc/output_stream.h"
#include "cadre/core/os/proc/temporary_folder.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/job_environment.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/challenge.h"
#include "cadre/core/wire/hex.h"
#include "cadre/launch/cli/binding/core_binding.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/etcd/etcd_registry.h"
#include "cadre/launch/cli/flight_folder.h"
#include "cadre/launch/cli/log_options.h"
#include "cadre/launch/cli/scheduler/process_manager.h"
#include "cadre/launch/hosts/file_registry.h"
#include "cadre/launch/job/worker_environment.h"

namespace cadre::cli {
namespace {

constexpr const char* kTokenVariable = "CADRE_JOB_TOKEN";
constexpr const char* kDefaultRunId = "none";  // torchrun's

// An address belongs to this host if a socket can listen on it.
Status check_is_this_host(const NamedHost& named) {
  if (named.host == "localhost") return {};
  const auto system = os::make_native_system();
  const auto listener = system->listen({os::Address::Kind::kTcp, named.host, 0});
  if (listener.ok()) return {};
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("{}: \"{}\" is not this host, on which the launcher serves the job's "
                             "store: leave it out, or give --nnodes with the number of hosts",
                             named.given.text(), named.host));
}

// The ports of jobs that a scheduler has started: below those that Linux gives to clients.
constexpr uint16_t kFirstJobPort = 20000;
constexpr uint16_t kNumJobPorts = 10000;

// Returns a port that all hosts of the job derive from its name, so that jobs that share a host
// rarely meet.
uint16_t port_of(std::string_view job) {
  uint32_t hash = 2166136261;  // FNV-1a
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619;
  return static_cast<uint16_t>(kFirstJobPort + hash % kNumJobPorts);
}

// Completes how the hosts of a job meet that a scheduler has started. Its process manager is asked
// if its variables do not name the first host. Returns the manager's secret, if it has one.
Result<os::Secret> find_meeting_place(launch::JobSpec& spec) {
  os::Secret secret;
  os::Address& endpoint = spec.hosts->endpoint;
  if (spec.hosts->registry) return secret;
  if (endpoint.host.empty()) {
    const auto system = os::make_native_system();
    const auto job = ask_process_manager(
        spec.environment,
        spec.environment.get_or("MPIR_CVAR_CH3_INTERFACE_HOSTNAME", system->host().name),
        system->deadline_in(spec.hosts->join_timeout));
    if (!job.ok()) return job.error();
    endpoint.host = job->first_host;
    secret = job->secret;
    if (spec.run_id.empty()) spec.run_id = job->id;
  }
  if (endpoint.port == 0) endpoint.port = port_of(spec.run_id);
  return secret;
}

// Returns the secret of a job on several hosts: from a file, from the variable, from the process
// manager, or, if there is none, from the job's id, which anyone can guess.
Result<os::Secret> find_token(std::string_view command, const RunOptions& options,
                              const os::Secret& of_manager, launch::JobSpec& spec) {
  if (!options.token_file.empty()) {
    auto file = os::read_secret_file(options.token_file);
    if (!file.ok()) return file.error().with_context("--token-file");
    if (!file->is_private) {
      fail(command,
           cadre::format("warning: other users may read {}, and so join the job: chmod 600",
                         options.token_file),
           0);
    }
    return file->secret;
  }
  const std::string given = spec.environment.get_or(kTokenVariable, "");
  if (!given.empty()) return os::Secret(given);
  if (!of_manager.empty()) return of_manager;
  fail(command,
       cadre::format("warning: the job has no secret, so any process that reaches its ports and "
                     "knows the id \"{}\" can join it; give all hosts one secret with --token-file "
                     "FILE or the variable {}",
                     spec.run_id, kTokenVariable),
       0);
  const auto derived = wire::hmac_sha256(spec.run_id, wire::as_bytes("cadre job without a secret"));
  if (!derived.ok()) return derived.error();
  return os::Secret(wire::to_hex(*derived));
}

// Returns where the agents ask for the coordinator; nullopt if they do not need to ask.
std::optional<launch::RegistrySpec> registry_of(const RunOptions& options) {
  using Registry = std::unique_ptr<launch::CoordinatorRegistry>;
  const std::string& job = options.run_id;
  if (options.backend == RendezvousBackend::kEtcd) {
    const auto open = [job, etcd = options.etcd](os::System& system) -> Result<Registry> {
      auto client = EtcdClient::make(system, etcd);
      if (!client.ok()) return client.error();
      return Registry(std::make_unique<EtcdRegistry>(*std::move(client), job));
    };
    return launch::RegistrySpec{
        .name = cadre::format("etcd at {} (key {})", options.etcd.url(), claim_key(job)),
        .open = open};
  }
  if (options.backend == RendezvousBackend::kFile) {
    const std::string path = launch::claim_path(options.registry_path, job);
    const auto open = [job, path](os::System&) -> Result<Registry> {
      return Registry(std::make_unique<launch::FileRegistry>(
          launch::FileRegistry::Options{.job = job, .path = path}));
    };
    return launch::RegistrySpec{.name = cadre::format("the file {}", path), .open = open};
  }
  return std::nullopt;
}

// Sets how this host joins a job on several hosts.
Status configure_hosts(std::string_view command, const RunOptions& options, launch::JobSpec& spec) {
  if (options.max_hosts == 1) return {};
  spec.hosts = options.several;
  spec.hosts->registry = registry_of(options);
  const auto of_manager = find_meeting_place(spec);
  if (!of_manager.ok()) return of_manager.error();
  if (spec.run_id.empty()) spec.run_id = kDefaultRunId;
  for (const auto& [name, text] : {std::pair("--rdzv-id", &spec.run_id), {"--role", &spec.role}}) {
    if (text->size() <= launch::Table::kMaxTextBytes) continue;
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("{} has {} bytes; on several hosts at most {} are allowed", name,
                               text->size(), launch::Table::kMaxTextBytes));
  }
  auto token = find_token(command, options, *of_manager, spec);
  if (!token.ok()) return token.error();
  spec.hosts->token = *std::move(token);
  return {};
}

// Binds the workers to cores if --numa-binding is given.
Status bind_to_cores(const RunOptions& options, launch::JobSpec& spec) {
  if (!options.binding) return {};
  const auto wrong = [](const Error& error) { return error.with_context("--numa-binding"); };
  const auto topology = Topology::of_this_machine();
  if (!topology.ok()) return wrong(topology.error());
  const auto nodes = gpu_nodes(spec.environment, spec.num_workers);
  if (!nodes.ok()) return wrong(nodes.error());
  auto cores = bind_workers(*topology, *options.binding, spec.num_workers, *nodes);
  if (!cores.ok()) return wrong(cores.error());
  spec.cores_of_rank = *std::move(cores);
  const auto level = parse_log_level(spec.environment.get_or("CADRE_LOG", ""));
  if (spec.cores_of_rank.empty() && level.ok() && *level <= LogLevel::kInfo) {
    fail("cadre", "--numa-binding has no effect: each worker would get all cores of this host", 0);
  }
  return {};
}

}  // namespace

Status configure_job(std::string_view command, const RunOptions& options, launch::JobSpec& spec) {
  for (const NamedHost& host : options.hosts) CADRE_RETURN_IF_ERROR(check_is_this_host(host));
  const auto num_workers =
      num_workers_of(options.num_workers, os::read_machine_info(spec.environment));
  if (!num_workers.ok()) return num_workers.error();
  if (options.no_python && options.is_module) {
    return Error(ErrorCode::kInvalidArgument, "--no-python and -m contradict each other");
  }
  CADRE_RETURN_IF_ERROR(check_local_ranks(options.logs, *num_workers));
  for (int rank = 0; options.has_virtual_local_ranks && rank < *num_workers; ++rank) {
    const auto gpu = launch::gpu_of_worker(spec.environment, rank);
    if (!gpu.ok()) return gpu.error().with_context("--virtual-local-rank");
  }
  if (options.input_rank) {
    CADRE_RETURN_IF_ERROR(check_local_rank("--stdin", *options.input_rank, *num_workers));
  }
  spec.input_rank = options.input_rank;
  spec.num_workers = *num_workers;
  spec.has_virtual_local_ranks = options.has_virtual_local_ranks;
  if (options.stop_signals) spec.stop_signals = *options.stop_signals;
  spec.logs = options.logs;
  spec.events = options.events;
  spec.run_id = options.run_id;
  spec.role = options.role;
  spec.store_port = options.store_port;
  spec.max_restarts = options.max_restarts;
  CADRE_RETURN_IF_ERROR(configure_hosts(command, options, spec));
  if (options.shutdown_timeout) spec.stop_grace = *options.shutdown_timeout;
  spec.prefix_template = options.prefix_template.value_or(
      spec.environment.get_or("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", options.default_prefix));
  spec.colour_prefix = os::OutputStream(os::OutputStream::Target::kStandardOutput).is_terminal() &&
                       spec.environment.get_or("NO_COLOR", "").empty();
  if (!options.strategy.empty()) spec.environment.set("CADRE_STRATEGY", options.strategy);
  if (!options.flight_folder.empty()) {
    spec.environment.set("CADRE_FLIGHT_RECORDS", options.flight_folder);
  }
  return bind_to_cores(options, spec);
}

int start_failure_code(const Error& error) {
  return error.code() == ErrorCode::kUnavailable ? kNotFoundExitCode : kNotExecutableExitCode;
}

launch::JobSpec make_job(const os::Inherited& inherited) {
  launch::JobSpec job;
  job.environment = os::read_environment();
  job.inherited = inherited;
  return job;
}

int launch_job(std::string_view command, launch::JobSpec spec,
               const std::function<int(int)>& meaning) {
  const auto log_level = parse_log_level(spec.environment.get_or("CADRE_LOG", ""));
  if (!log_level.ok()) return fail(command, log_level.error().message(), kUsageExitCode);
  spec.log_level = *log_level;
  if (const Status prepared = prepare_flight_folder(spec.environment); !prepared.ok()) {
    return fail(command, prepared.error().message(), 1);
  }
  os::hold_forwarded_signals();
  // The folder is created before the fork into guardian and supervisor, so that the survivor
  // removes it if the other one is killed.
  const auto folder =
      os::TemporaryFolder::make(spec.environment.get_or("TMPDIR", "/tmp"), "cadre-run-");
  if (!folder.ok()) return fail(command, folder.error().message(), 1);
  spec.folder = (*folder)->path();
  spec.command = "/proc/self/exe";
  const auto body = [&](os::Pollable& guardian_gone) {
    const auto system = os::make_native_system();
    const auto exit_code = launch::run_job(*system, spec, guardian_gone);
    // `meaning` is called in this process, the supervisor, because the guardian exits with its
    // exit code.
    if (exit_code.ok()) return meaning ? meaning(*exit_code) : *exit_code;
    const Error& error = exit_code.error();
    return fail(command, error.message(),
                error.code() == ErrorCode::kInvalidArgument ? kNotExecutableExitCode : 1);
  };
  try {
    return os::run_guarded(body, {.passes_terminal = spec.input_rank.has_value()});
  } catch (const Error& error) {
    return fail(command, error.message(), 1);
  }
}

}  // namespace cadre::cli
