// `cadre doctor`: checks this host, or the network between two hosts.
#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/host/secret_file.h"
#include "cadre/core/os/host/secret_variable.h"
#include "cadre/core/os/host/stderr_log.h"
#include "cadre/core/os/proc/output_stream.h"
#include "cadre/core/rendezvous/exchange_addresses.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/doctor/checks.h"
#include "cadre/launch/cli/doctor/finding.h"
#include "cadre/launch/cli/doctor/host_view.h"
#include "cadre/launch/cli/doctor/peer_check.h"
#include "cadre/launch/cli/option_words.h"
#include "cadre/launch/cli/path_options.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kDoctorCommand = "cadre doctor";
constexpr std::string_view kDoctorHelp = R"(cadre doctor [options]
cadre doctor --listen [HOST:PORT] [options]     on one host, and then
cadre doctor HOST:PORT [options]                on another one

Checks whether jobs can run on this host, or between two hosts. Each finding is "ok", a "note" (jobs
run, but may be slower or meet a limit) or a "problem" (jobs fail), with what was seen, what it
means, and a command that repairs it or shows more. Nothing is changed, and nothing that was found
(libraries, Python) is loaded or executed. Takes about 1 s, at most 20 s if a resolver or a file
system does not answer.

  cadre doctor                                  this host
  cadre doctor --port 29500                     and the port that a job will use
  head -c 32 /dev/urandom | base64 > token; chmod 600 token; scp token node2:
  cadre doctor --listen --token-file token      on node1; prints the command for node2
  cadre doctor 10.0.0.1:41234 --token-file token    on node2

One host: its name, addresses, ports and firewall, clocks, limits, control group, shared memory, huge
pages, cores and the distance between them, disks, GPUs and driver, MPI, NCCL, CUDA, Python, torch.
Two hosts: they form a group as two ranks of a job do, then measure round trips, the bandwidth in
both directions and the difference of their clocks, and connect once more from the other side.
Both print what they have found. The listener serves one peer, then ends.

Options
  --listen           wait for a peer at HOST:PORT; without HOST:PORT at a free port of the address
                     that other hosts reach, or of 127.0.0.1 if there is no token
  --token-file FILE  the secret of the two, the first line of FILE; else CADRE_JOB_TOKEN. Needed
                     unless HOST is a loopback address
  --timeout SECONDS  how long to wait for the peer (default 60 with --listen, else 10)
  --port PORT        check that a job's store can listen at this port of this host
  --folder FOLDER    check this folder for snapshots and logs (default: the working folder)
  --json             print JSON: {version, num_problems, num_notes, findings: [{section, name, state,
                     seen, meaning, remedy, numbers}]}
  --help             this text

The exit code is 0 without a problem, 1 with one, 2 for an invalid command line. NO_COLOR turns
colours off.
)";

constexpr int kListenSeconds = 60;
constexpr int kConnectSeconds = 10;

struct DoctorOptions {
  bool wants_json = false;
  bool wants_help = false;
  bool has_peer = false;
  PeerOptions peer = {};
  HostViewOptions host = {};
  // Whether other users may read the token's file.
  bool is_token_exposed = false;
  std::string token_path = {};
};

Error invalid(std::string message) {
  return Error(ErrorCode::kInvalidArgument, std::move(message));
}

Result<int> parse_number_option(const GivenOption& given, int largest) {
  const auto number = parse_integer(given.value);
  if (number && *number >= 1 && *number <= largest) return *number;
  return invalid(cadre::format("{}: expected a number from 1 to {}", given.text(), largest));
}

Status read_token(const ParsedWords& parsed, DoctorOptions& options) {
  auto variable = os::take_secret_variable("CADRE_JOB_TOKEN");
  if (variable) options.peer.token = *std::move(variable);
  const GivenOption* given = parsed.find("--token-file");
  if (given == nullptr) return {};
  auto file = os::read_secret_file(given->value);
  if (!file.ok()) return invalid(cadre::format("{}: {}", given->text(), file.error().message()));
  options.peer.token = std::move(file->secret);
  options.is_token_exposed = !file->is_private;
  options.token_path = given->value;
  return {};
}

// Returns the address at which to listen if the user gives none.
os::Address default_address(const os::Secret& token) {
  os::Address address{os::Address::Kind::kTcp, "127.0.0.1", 0};
  const std::string host = token.empty() ? "" : own_address_for_peers();
  if (!host.empty()) address.host = host;
  return address;
}

Status parse_peer(const ParsedWords& parsed, DoctorOptions& options) {
  PeerOptions& peer = options.peer;
  peer.listens = parsed.find("--listen") != nullptr;
  options.has_peer = peer.listens || !parsed.others.empty();
  if (parsed.others.size() > 1) {
    return invalid(cadre::format("one HOST:PORT is expected, but \"{}\" follows \"{}\"",
                                 parsed.others[1], parsed.others[0]));
  }
  CADRE_RETURN_IF_ERROR(read_token(parsed, options));
  peer.patience = std::chrono::seconds(peer.listens ? kListenSeconds : kConnectSeconds);
  if (const GivenOption* given = parsed.find("--timeout")) {
    constexpr int kDaySeconds = 24 * 60 * 60;
    const auto seconds = parse_number_option(*given, kDaySeconds);
    if (!seconds.ok()) return seconds.error();
    peer.patience = std::chrono::seconds(*seconds);
  }
  if (!options.has_peer) return {};
  if (parsed.others.empty()) {
    peer.address = default_address(peer.token);
    return {};
  }
  const std::string& word = parsed.others.front();
  auto address = os::Address::parse("tcp:" + word);
  if (!address.ok()) return invalid(cadre::format("\"{}\": expected HOST:PORT", word));
  if (!peer.listens && address->port == 0) {
    return invalid(
        cadre::format("\"{}\": port 0 is no port; name the one that --listen printed", word));
  }
  peer.address = *std::move(address);
  if (peer.token.empty() && !is_loopback_host(peer.address.host)) {
    return invalid(
        cadre::format("{} is not a loopback address: both hosts need one secret, in --token-file "
                      "FILE or CADRE_JOB_TOKEN (head -c 32 /dev/urandom | base64 > FILE)",
                      peer.address.host));
  }
  return {};
}

Result<DoctorOptions> parse_options(Words words) {
  constexpr std::array kDoctorOptions{
      OptionSpec{"--listen", ""},         OptionSpec{"--token-file", "FILE"},
      OptionSpec{"--timeout", "SECONDS"}, OptionSpec{"--port", "PORT"},
      OptionSpec{"--folder", "FOLDER"},   OptionSpec{"--json", ""},
      OptionSpec{"--help", "", 'h'}};
  const auto parsed = parse_words(kDoctorCommand, kDoctorOptions, OtherWords::kAmongOptions, words);
  if (!parsed.ok()) return parsed.error();
  DoctorOptions options{.wants_json = parsed->find("--json") != nullptr,
                        .wants_help = parsed->find("--help") != nullptr};
  if (options.wants_help) return options;
  CADRE_RETURN_IF_ERROR(parse_peer(*parsed, options));
  for (const char* name : {"--token-file", "--timeout", "--port", "--folder"}) {
    const GivenOption* given = parsed->find(name);
    const bool is_for_peer =
        std::string_view(name) == "--token-file" || std::string_view(name) == "--timeout";
    if (given == nullptr || is_for_peer == options.has_peer) continue;
    return invalid(cadre::format("{} has a meaning only {} --listen or HOST:PORT", given->text(),
                                 is_for_peer ? "with" : "without"));
  }
  if (const GivenOption* given = parsed->find("--port")) {
    constexpr int kLargestPort = 65535;
    const auto port = parse_number_option(*given, kLargestPort);
    if (!port.ok()) return port.error();
    options.host.port = static_cast<uint16_t>(*port);
  }
  if (const GivenOption* given = parsed->find("--folder")) options.host.run_folder = given->value;
  return options;
}

// A wildcard address, at which the listener listens everywhere, means nothing to the peer.
os::Address address_for_peer(os::Address address) {
  if (address.host != "0.0.0.0" && address.host != "::") return address;
  const std::string host = own_address_for_peers();
  address.host = host.empty() ? "127.0.0.1" : host;
  return address;
}

void announce(const os::Address& address, const DoctorOptions& options) {
  const std::string token =
      options.token_path.empty() ? "" : cadre::format(" --token-file {}", options.token_path);
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(options.peer.patience);
  const os::Address reached = address_for_peer(address);
  fail(kDoctorCommand,
       cadre::format("waits for {} s; run on {} host: cadre doctor {}{}", seconds.count(),
                     is_loopback_host(reached.host) ? "this" : "the other", host_and_port(reached),
                     token),
       0);
}

Finding exposed_token(const std::string& path) {
  return {.section = "peer",
          .name = "token file",
          .state = FindingState::kNote,
          .seen = cadre::format("other users may read {}", path),
          .meaning = "Whoever has the token of a job can read and change its data.",
          .remedy = cadre::format("chmod 600 {}", path)};
}

std::vector<Finding> find(DoctorOptions& options, const os::Inherited& inherited) {
  const auto system = os::make_native_system();
  if (!options.has_peer) {
    options.host.inherited_descriptors = inherited.limits.descriptors;
    return check_host(read_host_view(*system, os::read_environment(), options.host));
  }
  os::StderrLog log(LogLevel::kWarning, 0);
  options.peer.log = &log;
  options.peer.on_listening = [&](const os::Address& address) { announce(address, options); };
  std::vector<Finding> findings = check_peer(*system, options.peer);
  if (options.is_token_exposed) findings.push_back(exposed_token(options.token_path));
  return findings;
}

}  // namespace

int doctor_command(Words words, const os::Inherited& inherited) {
  auto options = parse_options(words);
  if (!options.ok()) return fail(kDoctorCommand, options.error().message(), kUsageExitCode);
  if (options->wants_help) return print(kDoctorHelp);
  const std::vector<Finding> findings = find(*options, inherited);
  const bool has_colour =
      os::OutputStream(os::OutputStream::Target::kStandardOutput).is_terminal() &&
      os::read_environment().get_or("NO_COLOR", "").empty();
  const int written = print(options->wants_json ? to_json(findings)
                                                : to_table(findings, {.has_colour = has_colour}));
  return written != 0 ? written : exit_code_of(findings);
}

}  // namespace cadre::cli
