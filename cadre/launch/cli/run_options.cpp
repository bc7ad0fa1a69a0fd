#include "cadre/launch/cli/run_options.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/launch/cli/launch_job.h"
#include "cadre/launch/cli/log_options.h"
#include "cadre/launch/cli/path_options.h"
#include "cadre/launch/cli/scheduler/process_manager.h"
#include "cadre/launch/cli/torchrun_flags.h"

namespace cadre::cli {
namespace {

// kTorchrun flags are also read from torchrun's variable PET_NAME.
enum class Origin { kTorchrun, kCadre };

struct AcceptedFlag {
  OptionSpec option;
  Origin origin;
  Status (*apply)(const GivenOption& given, RunOptions& options);
};

Error wrong(const GivenOption& given, std::string_view sentence) {
  return Error(ErrorCode::kInvalidArgument, cadre::format("{}: {}", given.text(), sentence));
}

// This is about 30 years, a ninth of the range of 64-bit nanoseconds.
constexpr double kMaxSeconds = 1e9;

Result<Duration> parse_seconds(const GivenOption& given) {
  double seconds = 0;
  const char* end = given.value.data() + given.value.size();
  const auto parsed = std::from_chars(given.value.data(), end, seconds);
  const bool is_in_range = seconds >= 0 && seconds <= kMaxSeconds;  // false for NaN
  if (parsed.ec != std::errc() || parsed.ptr != end || !is_in_range) {
    return wrong(given, "expected a number of seconds, from 0 to 1e9");
  }
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

std::optional<uint16_t> parse_port(std::string_view text) {
  const auto number = parse_integer(text);
  if (!number || *number < 0 || *number > 65535) return std::nullopt;
  return static_cast<uint16_t>(*number);
}

Error wrong_port(const GivenOption& given) {
  return wrong(given, "expected a number from 1 to 65535, or 0 for a free port");
}

Status ignore(const GivenOption&, RunOptions&) {
  return {};
}

constexpr int kMaxHosts = 65536;
// The ports of torchrun, for a static and for a c10d rendezvous.
constexpr uint16_t kStaticPort = 29500;
constexpr uint16_t kC10dPort = 29400;
constexpr uint16_t kEtcdPort = 2379;

Status take_num_nodes(const GivenOption& given, RunOptions& options) {
  const std::string_view text = given.value;
  const size_t colon = std::min(text.find(':'), text.size());
  const auto min = parse_integer(text.substr(0, colon));
  const auto max = colon < text.size() ? parse_integer(text.substr(colon + 1)) : min;
  if (!min || !max || *min < 1 || *max < *min || *max > kMaxHosts) {
    return wrong(
        given, cadre::format("expected a number of hosts, N or MIN:MAX, from 1 to {}", kMaxHosts));
  }
  options.min_hosts = static_cast<size_t>(*min);
  options.max_hosts = static_cast<size_t>(*max);
  return {};
}

Status take_node_rank(const GivenOption& given, RunOptions& options) {
  const auto rank = parse_integer(given.value);
  if (rank && *rank >= 0 && static_cast<size_t>(*rank) < options.max_hosts) {
    options.several.node_rank = static_cast<uint32_t>(*rank);
    return {};
  }
  return wrong(given, options.max_hosts == 1
                          ? "with one host the only node is 0"
                          : cadre::format("expected a number below {}, that of --nnodes",
                                          options.max_hosts));
}

Status take_max_restarts(const GivenOption& given, RunOptions& options) {
  const auto count = parse_integer(given.value);
  if (!count || *count < 0) return wrong(given, "expected a number of restarts, from 0");
  options.max_restarts = *count;
  return {};
}

Status check_monitor_interval(const GivenOption& given, RunOptions&) {
  const auto seconds = parse_seconds(given);
  return seconds.ok() ? Status() : seconds.error();
}

Status check_start_method(const GivenOption& given, RunOptions&) {
  for (const char* method : {"spawn", "fork", "forkserver"}) {
    if (given.value == method) return {};
  }
  return wrong(given, "expected spawn, fork or forkserver, which are the same for a program");
}

Status take_backend(const GivenOption& given, RunOptions& options) {
  using Named = std::pair<std::string_view, RendezvousBackend>;
  // torchrun's etcd-v2 is the same, except that it needs version 2 of etcd's interface.
  constexpr std::array kBackends{
      Named{"static", RendezvousBackend::kStatic}, Named{"c10d", RendezvousBackend::kC10d},
      Named{"etcd", RendezvousBackend::kEtcd}, Named{"etcd-v2", RendezvousBackend::kEtcd},
      Named{"file", RendezvousBackend::kFile}};
  const auto found = std::ranges::find(kBackends, given.value, &Named::first);
  if (found == kBackends.end()) return wrong(given, "expected c10d, static, etcd or file");
  options.backend = found->second;
  return {};
}

bool has_registry(const RunOptions& options) {
  return options.backend == RendezvousBackend::kEtcd || options.backend == RendezvousBackend::kFile;
}

// Refuses --master-addr and --master-port, which would have no effect.
Status check_has_master(const GivenOption& given, const RunOptions& options) {
  if (!has_registry(options) || options.max_hosts == 1 || given.name == "--rdzv-endpoint") {
    return {};
  }
  return wrong(given,
               "belongs to --rdzv-backend static; leave it out, because the hosts find each other "
               "at --rdzv-endpoint");
}

// Parses the value of --rdzv-endpoint: "node0", "node0:29400", "[::1]:29400", "::1", or a path. A
// job on one host needs no registry.
Status take_endpoint(const GivenOption& given, RunOptions& options) {
  CADRE_RETURN_IF_ERROR(check_has_master(given, options));
  const bool is_for_registry = has_registry(options) && given.name == "--rdzv-endpoint";
  if (is_for_registry && options.backend == RendezvousBackend::kFile) {
    options.registry_path = given.value;
    return {};
  }
  std::string host = given.value;
  std::string port = "0";
  const size_t colon = host.rfind(':');
  const size_t bracket = host.rfind(']');
  const bool is_bare_ipv6 = bracket == std::string::npos && host.find(':') != colon;
  if (colon != std::string::npos && !is_bare_ipv6 &&
      (bracket == std::string::npos || bracket < colon)) {
    port = host.substr(colon + 1);
    host.resize(colon);
  }
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  const auto number = parse_port(port);
  if (!number || host.find('/') != std::string::npos) {
    return wrong(given, "expected HOST or HOST:PORT, the port a number up to 65535");
  }
  if (options.max_hosts > 1) {
    if (!host.empty()) options.several.endpoint.host = host;
    if (*number != 0) options.several.endpoint.port = *number;
    return {};
  }
  if (is_for_registry) return {};
  if (!host.empty()) options.hosts.push_back({.given = given, .host = host});
  if (*number != 0) options.store_port = *number;
  return {};
}

Status take_port(const GivenOption& given, RunOptions& options) {
  const auto port = parse_port(given.value);
  if (!port) return wrong_port(given);
  CADRE_RETURN_IF_ERROR(check_has_master(given, options));
  (options.max_hosts > 1 ? options.several.endpoint.port : options.store_port) = *port;
  return {};
}

Status take_shutdown_timeout(const GivenOption& given, RunOptions& options) {
  const auto seconds = parse_seconds(given);
  if (!seconds.ok()) return seconds.error();
  options.shutdown_timeout = *seconds;
  return {};
}

Status take_flight_folder(const GivenOption& given, RunOptions& options) {
  CADRE_RETURN_IF_ERROR(check_output_folder(given));
  options.flight_folder = given.value;
  return {};
}

// Stores what `kParse` makes of the value in a member of RunOptions::logs.
template <auto kParse, auto kMember>
Status take_log_option(const GivenOption& given, RunOptions& options) {
  auto parsed = kParse(given);
  if (!parsed.ok()) return parsed.error();
  options.logs.*kMember = *std::move(parsed);
  return {};
}

// The folder itself is created by the launcher, when the job starts.
Status take_log_folder(const GivenOption& given, RunOptions& options) {
  if (given.value.empty()) return {};
  std::error_code failure;
  const std::filesystem::path folder = std::filesystem::absolute(given.value, failure);
  if (failure) return wrong(given, failure.message());
  if (folder != launch::LogSpec::kNoFolder && std::filesystem::exists(folder, failure) &&
      !std::filesystem::is_directory(folder, failure)) {
    return wrong(given, "expected a folder, which is created if it does not exist");
  }
  options.logs.folder = folder.string();
  return {};
}

Status take_stop_signals(const GivenOption& given, RunOptions& options) {
  if (given.value.empty()) return {};
  auto signals = parse_stop_signals(given);
  if (!signals.ok()) return signals.error();
  options.stop_signals = *std::move(signals);
  return {};
}

// A path has a slash, so that a mistyped name of a handler is not the name of a file.
Status take_event_handler(const GivenOption& given, RunOptions& options) {
  options.events = {.has_console = given.value == "console"};
  if (given.value.empty() || given.value == "null" || given.value == "console") return {};
  if (given.value.find('/') == std::string::npos) {
    return wrong(given,
                 "expected null, console, or the path of a file with a slash, such as "
                 "./events.jsonl");
  }
  options.events.file = given.value;
  return check_output_file(&given);
}

Status take_input_rank(const GivenOption& given, RunOptions& options) {
  options.input_rank = parse_integer(given.value);
  if (options.input_rank && *options.input_rank >= 0) return {};
  return wrong(given, "expected a local rank, such as 0");
}

Status take_binding(const GivenOption& given, RunOptions& options) {
  if (given.value.empty()) return {};
  options.binding = parse_binding_mode(given.value);
  if (options.binding) return {};
  return wrong(given, "expected node, socket, exclusive or core-complex");
}

template <auto kMember>
Status take_text(const GivenOption& given, RunOptions& options) {
  options.*kMember = given.value;
  return {};
}

template <auto kMember>
Status set_flag(const GivenOption&, RunOptions& options) {
  options.*kMember = true;
  return {};
}

// The flags are applied in this order: the port of an endpoint replaces that of --master-port, as
// in torchrun.
constexpr std::array kAccepted{
    AcceptedFlag{{"--help", "", 'h'}, Origin::kCadre, ignore},
    AcceptedFlag{{"--nproc-per-node", "N"},
                 Origin::kTorchrun,
                 [](const GivenOption& given, RunOptions& options) {
                   options.num_workers = given;
                   return Status();
                 }},
    AcceptedFlag{{"--module", "", 'm'}, Origin::kTorchrun, set_flag<&RunOptions::is_module>},
    AcceptedFlag{{"--no-python", ""}, Origin::kTorchrun, set_flag<&RunOptions::no_python>},
    AcceptedFlag{{"--run-path", ""}, Origin::kTorchrun, set_flag<&RunOptions::is_python>},
    AcceptedFlag{{"--log-line-prefix-template", "TEXT"},
                 Origin::kCadre,
                 take_text<&RunOptions::prefix_template>},
    AcceptedFlag{{"--log-dir", "FOLDER"}, Origin::kTorchrun, take_log_folder},
    AcceptedFlag{{"--redirects", "STREAMS", 'r'},
                 Origin::kTorchrun,
                 take_log_option<parse_streams, &launch::LogSpec::redirects>},
    AcceptedFlag{{"--tee", "STREAMS", 't'},
                 Origin::kTorchrun,
                 take_log_option<parse_streams, &launch::LogSpec::tees>},
    AcceptedFlag{{"--local-ranks-filter", "RANKS"},
                 Origin::kTorchrun,
                 take_log_option<parse_local_ranks, &launch::LogSpec::shown_ranks>},
    AcceptedFlag{{"--duplicate-stdout-filters", "TEXTS"},
                 Origin::kTorchrun,
                 take_log_option<parse_filters, &launch::LogSpec::output_filters>},
    AcceptedFlag{{"--duplicate-stderr-filters", "TEXTS"},
                 Origin::kTorchrun,
                 take_log_option<parse_filters, &launch::LogSpec::error_filters>},
    AcceptedFlag{{"--virtual-local-rank", ""},
                 Origin::kTorchrun,
                 set_flag<&RunOptions::has_virtual_local_ranks>},
    AcceptedFlag{{"--event-log-handler", "HANDLER"}, Origin::kTorchrun, take_event_handler},
    AcceptedFlag{{"--numa-binding", "MODE"}, Origin::kTorchrun, take_binding},
    AcceptedFlag{{"--stdin", "RANK"}, Origin::kCadre, take_input_rank},
    AcceptedFlag{{"--dry-run", ""}, Origin::kCadre, set_flag<&RunOptions::is_dry_run>},
    AcceptedFlag{{"--role", "NAME"}, Origin::kTorchrun, take_text<&RunOptions::role>},
    AcceptedFlag{{"--flight-records", "FOLDER"}, Origin::kCadre, take_flight_folder},
    // The program knows the strategies, and refuses others by name.
    AcceptedFlag{{"--strategy", "NAME"}, Origin::kCadre, take_text<&RunOptions::strategy>},
    AcceptedFlag{{"--token-file", "FILE"}, Origin::kCadre, take_text<&RunOptions::token_file>},
    AcceptedFlag{{"--rdzv-id", "ID"}, Origin::kTorchrun, take_text<&RunOptions::run_id>},
    AcceptedFlag{{"--shutdown-timeout", "SECONDS"}, Origin::kTorchrun, take_shutdown_timeout},
    AcceptedFlag{{"--standalone", ""}, Origin::kTorchrun, ignore},
    AcceptedFlag{{"--nnodes", "N"}, Origin::kTorchrun, take_num_nodes},
    AcceptedFlag{{"--node-rank", "N"}, Origin::kTorchrun, take_node_rank},
    AcceptedFlag{{"--max-restarts", "N"}, Origin::kTorchrun, take_max_restarts},
    AcceptedFlag{{"--monitor-interval", "SECONDS"}, Origin::kTorchrun, check_monitor_interval},
    AcceptedFlag{{"--start-method", "METHOD"}, Origin::kTorchrun, check_start_method},
    AcceptedFlag{{"--use-env", ""}, Origin::kCadre, ignore},  // torch.distributed.launch's
    AcceptedFlag{{"--signals-to-handle", "NAMES"}, Origin::kTorchrun, take_stop_signals},
    AcceptedFlag{{"--rdzv-backend", "BACKEND"}, Origin::kTorchrun, take_backend},
    AcceptedFlag{{"--rdzv-conf", "SETTINGS"},
                 Origin::kTorchrun,
                 [](const GivenOption& given, RunOptions& options) {
                   return options.max_hosts > 1 ? take_rendezvous_settings(given, options)
                                                : check_rendezvous_settings(given);
                 }},
    AcceptedFlag{{"--local-addr", "HOST"},
                 Origin::kTorchrun,
                 [](const GivenOption& given, RunOptions& options) {
                   if (options.max_hosts > 1) {
                     options.several.local_host = given.value;
                   } else if (!given.value.empty()) {
                     options.hosts.push_back({given, given.value});
                   }
                   return Status();
                 }},
    AcceptedFlag{{"--master-addr", "HOST"}, Origin::kTorchrun, take_endpoint},
    AcceptedFlag{{"--master-port", "PORT"}, Origin::kTorchrun, take_port},
    AcceptedFlag{{"--rdzv-endpoint", "HOST:PORT"}, Origin::kTorchrun, take_endpoint},
};

constexpr const char* kElasticShutdownTimeout = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT";

// torchrun reads no variable for these two flags.
bool has_variable(std::string_view name) {
  return name != "--logs-specs" && name != "--numa-binding";
}

std::string variable_of(std::string_view name) {
  std::string variable = "PET_";
  for (const char c : name.substr(2)) {
    variable += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return variable;
}

// The options that say how PROGRAM is executed.
constexpr std::array<std::string_view, 3> kProgramOptions{"--module", "--no-python", "--run-path"};

std::vector<OptionSpec> known_options(const JobCommand& command) {
  std::vector<OptionSpec> known(command.own_options.begin(), command.own_options.end());
  for (const AcceptedFlag& flag : kAccepted) {
    const bool is_about_program = std::ranges::count(kProgramOptions, flag.option.name) > 0;
    if (command.takes_program || !is_about_program) known.push_back(flag.option);
  }
  for (const RefusedFlag& flag : refused_torchrun_flags()) known.push_back(flag.option);
  return known;
}

std::vector<OptionSpec> options_with_variables() {
  std::vector<OptionSpec> specs;
  for (const AcceptedFlag& flag : kAccepted) {
    if (flag.origin == Origin::kTorchrun && has_variable(flag.option.name)) {
      specs.push_back(flag.option);
    }
  }
  for (const RefusedFlag& flag : refused_torchrun_flags()) {
    if (has_variable(flag.option.name)) specs.push_back(flag.option);
  }
  return specs;
}

// Returns the options from environment variables. An empty variable counts as unset, and the value
// of a switch is 0 or 1. PET_SHUTDOWN_TIMEOUT takes precedence over TORCH_ELASTIC_SHUTDOWN_TIMEOUT.
Result<std::vector<GivenOption>> read_variables(const os::Environment& environment,
                                                std::vector<std::string>& warnings) {
  std::vector<GivenOption> given;
  const std::string elastic = environment.get_or(kElasticShutdownTimeout, "");
  if (!elastic.empty()) {
    given.push_back(
        {.name = "--shutdown-timeout", .spelling = kElasticShutdownTimeout, .value = elastic});
  }
  std::vector<std::string> known;
  for (const OptionSpec& spec : options_with_variables()) {
    const std::string& variable = known.emplace_back(variable_of(spec.name));
    const std::string value = environment.get_or(variable, "");
    const bool is_switch = spec.value.empty();
    if (value.empty() || (is_switch && value == "0")) continue;
    given.push_back(
        {.name = spec.name, .spelling = variable, .value = value, .is_switch = is_switch});
    if (is_switch && value != "1") return wrong(given.back(), "expected 0 or 1");
  }
  for (const std::string& text : environment.to_texts()) {
    const std::string name = text.substr(0, text.find('='));
    if (!name.starts_with("PET_") || std::ranges::find(known, name) != known.end()) continue;
    warnings.push_back(
        cadre::format("warning: {} is ignored: torchrun has no such variable", name));
  }
  return given;
}

// If an invalid value came from an environment variable, adds to the error how to override or unset
// it, because the user finds no such option on the command line.
Status with_remedy(const GivenOption& given, Status applied) {
  if (applied.ok() || given.spelling.starts_with('-')) return applied;
  return Error(applied.error().code(),
               cadre::format("{}; unset the variable {}, or give {}, which "
                             "takes precedence",
                             applied.error().message(), given.spelling, given.name));
}

// Several `cadre run` that a scheduler has started on several hosts are one job, unless --nnodes 1
// or --standalone says that each is a job of its own.
Status take_scheduler(const ParsedWords& parsed, const os::Environment& environment,
                      RunOptions& options) {
  if (parsed.find("--standalone") != nullptr || parsed.find("--nnodes") != nullptr) return {};
  auto start = read_scheduler_start(environment);
  if (!start.ok()) return start.error();
  if (!*start) return {};
  options.scheduled = **std::move(start);
  options.min_hosts = options.max_hosts = static_cast<size_t>(options.scheduled->num_nodes);
  return {};
}

Status apply_all(const ParsedWords& parsed, RunOptions& options) {
  // --standalone overrides three other options, as in torchrun.
  const bool is_standalone = parsed.find("--standalone") != nullptr;
  for (const AcceptedFlag& flag : kAccepted) {
    const GivenOption* given = parsed.find(flag.option.name);
    if (given == nullptr) continue;
    const bool is_replaced = flag.option.name == "--rdzv-backend" ||
                             flag.option.name == "--rdzv-endpoint" ||
                             flag.option.name == "--master-addr";
    if (is_standalone && is_replaced) continue;
    CADRE_RETURN_IF_ERROR(with_remedy(*given, flag.apply(*given, options)));
  }
  for (const RefusedFlag& flag : refused_torchrun_flags()) {
    const GivenOption* given = parsed.find(flag.option.name);
    if (given != nullptr) {
      CADRE_RETURN_IF_ERROR(with_remedy(*given, check_refused_flag(*given)));
    }
  }
  return {};
}

// Completes the endpoint of a job that a scheduler has started without naming one.
Status take_endpoint_of_scheduler(const SchedulerStart& start, const os::Environment& environment,
                                  RunOptions& options) {
  options.several.endpoint.host = start.first_host;
  if (options.run_id.empty()) options.run_id = start.job;
  if (!start.first_host.empty() || has_process_manager(environment)) return {};
  return Error(
      ErrorCode::kInvalidArgument,
      cadre::format("{} has started it on {} hosts ({}), but no variable says which is the "
                    "first one: give --master-addr HOST, an address of the host of process "
                    "0, or --nnodes 1 if these are independent jobs",
                    start.scheduler, start.num_nodes, start.evidence));
}

Status finish_registry(RunOptions& options) {
  const bool is_file = options.backend == RendezvousBackend::kFile;
  os::Address& endpoint = options.several.endpoint;
  options.several.node_rank.reset();
  if (options.run_id.empty() && options.scheduled) options.run_id = options.scheduled->job;
  if (is_file ? options.registry_path.empty() : endpoint.host.empty()) {
    return Error(ErrorCode::kInvalidArgument,
                 is_file
                     ? "--rdzv-backend file needs --rdzv-endpoint PATH, a file or a folder that "
                       "all hosts of the job share"
                     : "--rdzv-backend etcd needs --rdzv-endpoint HOST:PORT, the address of "
                       "etcd");
  }
  if (options.run_id.empty() || !is_utf8(options.run_id)) {
    return Error(
        ErrorCode::kInvalidArgument,
        cadre::format("--rdzv-backend {} needs --rdzv-id ID, a text that is the same on all "
                      "hosts of the job and that no other job has",
                      is_file ? "file" : "etcd"));
  }
  if (options.several.is_endpoint_host) {
    return Error(ErrorCode::kInvalidArgument,
                 "is_host of --rdzv-conf belongs to --rdzv-backend c10d; leave it out");
  }
  if (is_file) {
    std::error_code failure;
    options.registry_path = std::filesystem::absolute(options.registry_path, failure).string();
    return {};
  }
  if (endpoint.port == 0) endpoint.port = kEtcdPort;
  options.etcd.address = endpoint.host_and_port();
  return {};
}

// Completes and checks the options about several hosts, whose defaults are those of torchrun, or
// those of the scheduler that has started this host.
Status finish_hosts(const os::Environment& environment, RunOptions& options) {
  launch::HostsSpec& several = options.several;
  several.min_hosts = options.min_hosts;
  several.max_hosts = options.max_hosts;
  if (has_registry(options)) return finish_registry(options);
  const bool is_static = options.backend == RendezvousBackend::kStatic;
  if (several.endpoint.host.empty() && options.scheduled) {
    CADRE_RETURN_IF_ERROR(take_endpoint_of_scheduler(*options.scheduled, environment, options));
  } else if (several.endpoint.host.empty()) {
    return Error(ErrorCode::kInvalidArgument,
                 is_static
                     ? "a job on several hosts needs --master-addr HOST, an address of the host "
                       "with --node-rank 0, or --rdzv-backend c10d with --rdzv-endpoint HOST:PORT"
                     : "a job on several hosts needs --rdzv-endpoint HOST:PORT, the same on all "
                       "hosts: an address of one of them");
  } else if (several.endpoint.port == 0) {
    several.endpoint.port = is_static ? kStaticPort : kC10dPort;
  }
  if (!is_static) {
    several.node_rank.reset();  // the coordinator gives the ranks, as in torchrun
    return {};
  }
  if (options.min_hosts != options.max_hosts) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("--nnodes {}:{} needs --rdzv-backend c10d, because a static "
                               "rendezvous has a fixed number of hosts",
                               options.min_hosts, options.max_hosts));
  }
  if (!several.node_rank) {
    several.node_rank = options.scheduled ? static_cast<uint32_t>(options.scheduled->node_rank) : 0;
  }
  return {};
}

}  // namespace

Result<RunOptions> parse_run_options(Words words, const os::Environment& environment,
                                     const JobCommand& command) {
  auto parsed = parse_words(
      command.name, known_options(command),
      command.takes_program ? OtherWords::kEndTheOptions : OtherWords::kAmongOptions, words);
  if (!parsed.ok()) return parsed.error();
  RunOptions options;
  if (parsed->find("--help") != nullptr) {
    options.wants_help = true;
    return options;
  }
  const auto variables = read_variables(environment, options.warnings);
  if (!variables.ok()) return variables.error();
  parsed->options.insert(parsed->options.begin(), variables->begin(), variables->end());
  CADRE_RETURN_IF_ERROR(take_scheduler(*parsed, environment, options));
  CADRE_RETURN_IF_ERROR(apply_all(*parsed, options));
  if (options.max_hosts > 1) {
    if (parsed->find("--standalone") != nullptr) {
      return Error(ErrorCode::kInvalidArgument,
                   "--standalone is for a job on one host; leave it or --nnodes out");
    }
    CADRE_RETURN_IF_ERROR(finish_hosts(environment, options));
  }
  options.program = std::move(parsed->others);
  options.given = *std::move(parsed);
  if (command.takes_program && options.program.empty()) {
    return Error(ErrorCode::kInvalidArgument,
                 "no program to run; for example: cadre run --nproc-per-node 2 ./train");
  }
  return options;
}

Result<int> num_workers_of(const GivenOption& given, const os::MachineInfo& machine) {
  const std::string& text = given.value;
  if (text == "cpu") return machine.num_cores;
  if (text == "auto") return machine.num_gpus > 0 ? machine.num_gpus : machine.num_cores;
  if (text == "gpu") {
    if (machine.num_gpus > 0) return machine.num_gpus;
    return Error(ErrorCode::kInvalidArgument,
                 given.text() + ": this machine has no GPU; pass auto or a number");
  }
  const auto count = parse_integer(text);
  if (!count || *count < 1 || *count > kMaxWorkers) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("{}: expected a number from 1 to {}, auto, gpu or cpu", given.text(),
                               kMaxWorkers));
  }
  return *count;
}

}  // namespace cadre::cli
