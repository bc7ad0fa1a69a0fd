#include "cadre/core/rendezvous/job_environment.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <limits>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/host/secret_variable.h"
#include "cadre/core/rendezvous/file_rendezvous.h"
#include "cadre/core/rendezvous/tcp_rendezvous.h"
#include "cadre/core/wire/recovery/recovery_files.h"

namespace cadre {
namespace {

// Reads environment variables and keeps the first error.
class Parser {
 public:
  explicit Parser(const VariableLookup& look_up) : look_up_(look_up) {}

  std::optional<std::string> text(std::string_view name) const {
    std::optional<std::string> value = look_up_(name);
    return value && value->empty() ? std::nullopt : value;
  }

  // Returns why a variable has no value, as a part of an error message.
  std::string_view absence(std::string_view name) const {
    return look_up_(name) ? "is empty" : "is not set";
  }

  // Reads a decimal number in [low, high].
  std::optional<int> number(std::string_view name, int low, int high) {
    const std::optional<std::string> value = text(name);
    if (!value) return std::nullopt;
    int parsed = 0;
    const char* end = value->data() + value->size();
    const auto [stop, code] = std::from_chars(value->data(), end, parsed);
    if (code != std::errc() || stop != end || parsed < low || parsed > high) {
      fail(format("{} is \"{}\", expected a number from {} to {}", name, *value, low, high));
      return std::nullopt;
    }
    return parsed;
  }

  // Reads "True" and "False", as Python writes them, and 1 and 0.
  bool flag(std::string_view name) {
    const std::string value = text(name).value_or("False");
    if (value == "True" || value == "true" || value == "1") return true;
    if (value != "False" && value != "false" && value != "0") {
      fail(format("{} is \"{}\", expected True or False", name, value));
    }
    return false;
  }

  void fail(std::string message) {
    if (!error_) error_ = Error(ErrorCode::kInvalidArgument, "environment: " + std::move(message));
  }
  const std::optional<Error>& error() const { return error_; }

 private:
  const VariableLookup& look_up_;
  std::optional<Error> error_;
};

constexpr int kMaxWorldSize = 1 << 20;
constexpr int kMaxInt = std::numeric_limits<int>::max();

// The variables through which one launcher (torchrun, mpirun, srun) passes the rank and the world
// size to each process.
struct PlaceVariables {
  std::string_view rank;
  std::string_view world_size;
  std::string_view local_rank;
  std::string_view local_world_size;  // is empty if this launcher sets no such variable
};

constexpr PlaceVariables kTorchrun = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr std::array kOtherStarters{
    PlaceVariables{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                   "OMPI_COMM_WORLD_LOCAL_SIZE"},
    PlaceVariables{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    PlaceVariables{"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""}};

// Returns the variables of mpirun or srun, if these started more than one process. If they were
// ignored, each process would train alone, without an error.
const PlaceVariables* other_starter(const Parser& parser) {
  const auto found = std::ranges::find_if(kOtherStarters, [&](const PlaceVariables& names) {
    const auto size = parser.text(names.world_size);
    return size && *size != "1" && parser.text(names.rank);
  });
  return found == kOtherStarters.end() ? nullptr : &*found;
}

void parse_place(Parser& parser, const PlaceVariables& names, JobEnvironment& environment) {
  environment.world_size = parser.number(names.world_size, 1, kMaxWorldSize).value_or(1);
  environment.rank = parser.number(names.rank, 0, environment.world_size - 1).value_or(0);
  if (!names.local_world_size.empty()) {
    environment.local_world_size = parser.number(names.local_world_size, 1, environment.world_size);
  }
  const int local_limit = environment.local_world_size.value_or(environment.world_size);
  if (const auto local_rank = parser.number(names.local_rank, 0, local_limit - 1)) {
    environment.local_rank = Rank(*local_rank);
  }
}

// Returns an error text that says what the store's address lacks, and what to do.
std::string no_address(const Parser& parser, std::string_view absent, std::string_view choice,
                       const PlaceVariables& names, int world_size) {
  const std::string alone =
      names.rank == kTorchrun.rank
          ? ""
          : "; for processes that have nothing to do with each other set RANK=0 WORLD_SIZE=1";
  return format("{} {}, but {} is {}: start the program with cadre run, or {}{}", absent,
                parser.absence(absent), names.world_size, world_size, choice, alone);
}

void parse_store(Parser& parser, const PlaceVariables& names, JobEnvironment& environment) {
  environment.master_addr = parser.text("MASTER_ADDR").value_or("");
  const auto port = parser.number("MASTER_PORT", 1, std::numeric_limits<uint16_t>::max());
  environment.master_port = static_cast<uint16_t>(port.value_or(0));
  const bool needs_address = environment.world_size > 1 && environment.store_file.empty();
  if (needs_address && environment.master_addr.empty()) {
    parser.fail(
        no_address(parser, "MASTER_ADDR", "name rank 0's host", names, environment.world_size));
  }
  if (needs_address && !port) {
    parser.fail(no_address(parser, "MASTER_PORT", "choose a free port of rank 0's host", names,
                           environment.world_size));
  }
  environment.uses_agent_store = parser.flag("TORCHELASTIC_USE_AGENT_STORE");
  const bool is_torchrun = environment.uses_agent_store && environment.job_token.empty();
  const std::string protocol =
      parser.text("CADRE_STORE_PROTOCOL").value_or(is_torchrun ? "c10d" : "native");
  if (protocol == "c10d") {
    environment.store_protocol = StoreProtocol::kC10d;
  } else if (protocol != "native") {
    parser.fail(format("CADRE_STORE_PROTOCOL is \"{}\", expected native or c10d", protocol));
  }
}

bool is_from_variables(const JobPlace& place) {
  return place.init_method.empty() || place.init_method == "env://";
}

Status check_given_place(const JobPlace& place) {
  if (place.rank && place.world_size) return check_place(*place.rank, *place.world_size);
  if (!place.rank && !place.world_size) return {};
  return Error(
      ErrorCode::kInvalidArgument,
      format("the program gives the {} {} without the {}; give both, or neither and set "
             "RANK and WORLD_SIZE",
             place.rank ? "rank" : "world size", *(place.rank ? place.rank : place.world_size),
             place.rank ? "world size" : "rank"));
}

// Returns the value that the program gives in `place`, or else the variable's value. A launcher's
// variable that contradicts the program counts as not set.
std::optional<std::string> look_up_in_place(std::string_view name, const JobPlace& place,
                                            const os::Address& address,
                                            const VariableLookup& variables) {
  if (place.rank) {
    if (name == kTorchrun.rank) return format("{}", *place.rank);
    if (name == kTorchrun.world_size) return format("{}", *place.world_size);
    if (name == kTorchrun.local_rank || name == kTorchrun.local_world_size) return std::nullopt;
  }
  if (!is_from_variables(place)) {
    if (name == "TORCHELASTIC_USE_AGENT_STORE") return std::nullopt;
    const bool has_address = !address.host.empty();
    if (name == "MASTER_ADDR") return has_address ? std::optional(address.host) : std::nullopt;
    if (name == "MASTER_PORT") {
      return has_address ? std::optional(format("{}", address.port)) : std::nullopt;
    }
  }
  return variables(name);
}

// Returns the path of a file in which the launcher tells this process something; empty if there is
// no such launcher.
std::string launchers_file(std::string_view suffix) {
  const char* const path = std::getenv(kRecoveryVariable);
  return path == nullptr || *path == '\0' ? "" : std::string(path).append(suffix);
}

// The names are in the order of LogLevel.
constexpr std::array<std::string_view, 5> kLogLevelNames = {"debug", "info", "warning", "error",
                                                            "off"};

}  // namespace

std::string_view log_level_name(LogLevel level) {
  return kLogLevelNames[static_cast<size_t>(level)];
}

Result<LogLevel> parse_log_level(std::string_view text) {
  if (text.empty()) return LogLevel::kWarning;
  const auto found = std::find(kLogLevelNames.begin(), kLogLevelNames.end(), text);
  if (found != kLogLevelNames.end()) {
    return static_cast<LogLevel>(found - kLogLevelNames.begin());
  }
  return Error(ErrorCode::kInvalidArgument,
               format("environment: CADRE_LOG is \"{}\", expected debug, info, warning, error or "
                      "off",
                      text));
}

Result<JobEnvironment> parse_job_environment(const VariableLookup& variables,
                                             const os::Secret& job_token, const JobPlace& place) {
  CADRE_RETURN_IF_ERROR(check_given_place(place));
  JobEnvironment environment;
  os::Address address;
  if (place.init_method.starts_with("file:")) {
    auto path = parse_file_url(place.init_method);
    if (!path.ok()) return path.error();
    environment.store_file = std::move(path).value();
  } else if (!is_from_variables(place)) {
    auto parsed = parse_tcp_url(place.init_method);
    if (!parsed.ok()) return parsed.error();
    address = std::move(parsed).value();
  }
  const VariableLookup look_up = [&](std::string_view name) {
    return look_up_in_place(name, place, address, variables);
  };
  Parser parser(look_up);
  const Result<LogLevel> log_level = parse_log_level(parser.text("CADRE_LOG").value_or(""));
  if (!log_level.ok()) return log_level.error();
  environment.log_level = *log_level;
  environment.flight_folder = parser.text("CADRE_FLIGHT_RECORDS").value_or("");
  environment.tuning_file = parser.text("CADRE_TUNING_FILE").value_or("");
  environment.nccl_library = parser.text("CADRE_NCCL_LIBRARY").value_or("");
  const bool has_rank = parser.text("RANK").has_value();
  const bool has_world_size = parser.text("WORLD_SIZE").has_value();
  const PlaceVariables* other = has_rank || has_world_size ? nullptr : other_starter(parser);
  if (!has_rank && !has_world_size && other == nullptr) {
    if (is_from_variables(place)) return environment;
    return Error(ErrorCode::kInvalidArgument,
                 format("the program gives the address {}, but no rank and no world size; give "
                        "both, or set RANK and WORLD_SIZE",
                        place.init_method));
  }
  if (has_rank != has_world_size) {
    const std::string_view absent = has_rank ? "WORLD_SIZE" : "RANK";
    return Error(ErrorCode::kInvalidArgument,
                 format("environment: {} is set but {} {}; give both a value, or start the program "
                        "with cadre run",
                        has_rank ? "RANK" : "WORLD_SIZE", absent, parser.absence(absent)));
  }
  environment.is_launched = true;
  environment.job_token = job_token;
  const PlaceVariables& names = other != nullptr ? *other : kTorchrun;
  parse_place(parser, names, environment);
  environment.restart_count = parser.number("TORCHELASTIC_RESTART_COUNT", 0, kMaxInt).value_or(0);
  environment.attempt =
      parser.number("CADRE_ATTEMPT", 0, kMaxInt).value_or(environment.restart_count);
  environment.max_restarts = parser.number("TORCHELASTIC_MAX_RESTARTS", 0, kMaxInt).value_or(0);
  environment.run_id = parser.text("TORCHELASTIC_RUN_ID").value_or("");
  environment.job_id = parser.text("CADRE_JOB_ID").value_or("");
  parse_store(parser, names, environment);
  if (parser.error()) return *parser.error();
  return environment;
}

std::optional<MembershipFile> read_given_membership() {
  const std::string path = launchers_file(kMembershipFileSuffix);
  if (path.empty()) return std::nullopt;
  const auto content = os::read_file(path, kMaxMembershipFileBytes);
  return content.ok() ? parse_membership_file(*content) : std::nullopt;
}

std::function<std::vector<Rank>()> lost_ranks_from_launcher(int world_size) {
  const std::string path = launchers_file(kLostRanksFileSuffix);
  if (path.empty()) return nullptr;
  const auto given = read_given_membership();
  const uint64_t num_memberships = given ? given->number : 0;
  return [path, num_memberships, world_size] {
    std::vector<Rank> lost;
    const auto content = os::read_file(path, kMaxLostRanksFileBytes);
    const auto file = content.ok() ? parse_lost_ranks_file(*content) : std::nullopt;
    if (!file || file->num_memberships != num_memberships) return lost;
    for (const RankRange& range : file->ranks) {
      const int first = std::max(range.first, lost.empty() ? 0 : lost.back() + 1);
      for (int rank = first; rank <= std::min(range.last, world_size - 1); ++rank) {
        lost.emplace_back(rank);
      }
    }
    return lost;
  };
}

Result<JobEnvironment> read_job_environment(const JobPlace& place) {
  const auto given = read_given_membership();
  const auto look_up = [&](std::string_view name) -> std::optional<std::string> {
    if (given) {
      if (auto value = given->find(name)) return value;
    }
    const char* value = std::getenv(std::string(name).c_str());
    return value ? std::optional<std::string>(value) : std::nullopt;
  };
  return parse_job_environment(
      look_up, os::take_secret_variable("CADRE_JOB_TOKEN").value_or(os::Secret()), place);
}

}  // namespace cadre
