#include "cadre/launch/cli/scheduler/process_manager.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/native/poll.h"
#include "cadre/core/os/proc/shared_library.h"

namespace cadre::cli {
namespace {

Error refused(std::string_view manager, std::string_view what) {
  return Error(ErrorCode::kUnavailable,
               cadre::format("{}: {}; give --rdzv-endpoint HOST:PORT, an address of one of the "
                             "hosts",
                             manager, what));
}

// --- PMIx ---

// These types have the parts of PMIx's interface that are used here, with the layout of
// pmix_common.h of version 4.
struct PmixProcess {
  std::array<char, 256> name_space;
  uint32_t rank;
};
struct PmixValue {
  uint16_t type;
  union {
    char* text;
    std::array<void*, 3> largest;  // makes this as large as the largest value
  } data;
};
constexpr uint16_t kPmixString = 3;
constexpr int kPmixSuccess = 0;

using PmixInit = int(PmixProcess* self, void* info, size_t num_info);
using PmixGet = int(const PmixProcess* process, const char* key, const void* info, size_t num_info,
                    PmixValue** value);
using PmixFinalize = int(const void* info, size_t num_info);

// Ends the connection to the server; a process that ends without that makes mpirun stop the job.
struct PmixSession {
  PmixFinalize* finalize;
  ~PmixSession() { finalize(nullptr, 0); }
};

Result<ManagedJob> ask_pmix(const os::Environment& environment) {
  const auto library = os::SharedLibrary::load("libpmix.so.2", "libpmix2");
  if (!library.ok()) return refused("PMIx", library.error().message());
  PmixInit* init = nullptr;
  PmixGet* get = nullptr;
  PmixFinalize* finalize = nullptr;
  for (const Status& found : {library->find("PMIx_Init", init), library->find("PMIx_Get", get),
                              library->find("PMIx_Finalize", finalize)}) {
    if (!found.ok()) return refused("PMIx", found.error().message());
  }
  PmixProcess process = {};
  if (const int status = init(&process, nullptr, 0); status != kPmixSuccess) {
    return refused("PMIx", cadre::format("PMIx_Init failed with status {}", status));
  }
  const PmixSession session{finalize};
  ManagedJob job{.id = process.name_space.data(), .first_host = {}, .secret = {}};
  process.rank = 0;
  PmixValue* value = nullptr;
  const int status = get(&process, "pmix.hname", nullptr, 0, &value);
  if (status != kPmixSuccess || value == nullptr || value->type != kPmixString) {
    return refused(
        "PMIx", cadre::format("PMIx_Get of the host of process 0 failed with status {}", status));
  }
  job.first_host = value->data.text;
  std::free(value->data.text);
  std::free(value);
  // A random number that mpirun of Open MPI gives to the processes of one job only.
  job.secret = environment.get_or("OMPI_MCA_orte_precondition_transports", "");
  return job;
}

// --- PMI-1 ---

constexpr std::string_view kKey = "cadre_first_host";
constexpr size_t kMaxLineBytes = 4096;

// A connection to Hydra, on a descriptor that this process has inherited. A request and its answer
// are lines of NAME=VALUE pairs between spaces, the first of which is "cmd".
class PmiConnection {
 public:
  PmiConnection(os::Fd fd, Deadline deadline) : fd_(std::move(fd)), deadline_(deadline) {}

  // Returns the value of `name` in the answer; empty if `name` is empty.
  Result<std::string> ask(const std::string& request, std::string_view answer,
                          std::string_view name) {
    CADRE_RETURN_IF_ERROR(send(request + "\n"));
    const auto line = read_line();
    if (!line.ok()) return line.error();
    const auto status = value_of(*line, "rc");
    if (value_of(*line, "cmd") != answer || (status && status != "0")) {
      return refused("PMI", cadre::format("\"{}\" was answered with \"{}\"", request, *line));
    }
    if (name.empty()) return std::string();
    const auto value = value_of(*line, name);
    if (value) return std::string(*value);
    return refused("PMI", cadre::format("the answer \"{}\" has no {}", *line, name));
  }

 private:
  static std::optional<std::string_view> value_of(std::string_view line, std::string_view name) {
    while (!line.empty()) {
      const std::string_view word = line.substr(0, line.find(' '));
      const size_t equals = word.find('=');
      if (equals != std::string_view::npos && word.substr(0, equals) == name) {
        return word.substr(equals + 1);
      }
      line.remove_prefix(std::min(line.size(), word.size() + 1));
    }
    return std::nullopt;
  }

  Status send(std::string_view text) {
    while (!text.empty()) {
      if (!os::poll_one(fd_.get(), POLLOUT, deadline_)) return too_late();
      const ssize_t sent = ::send(fd_.get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (sent < 0) return refused("PMI", std::generic_category().message(errno));
      text.remove_prefix(static_cast<size_t>(sent));
    }
    return {};
  }

  // Reads no byte beyond the line, because a later user of the connection needs it.
  Result<std::string> read_line() {
    std::string line;
    while (line.size() <= kMaxLineBytes) {
      if (!os::poll_one(fd_.get(), POLLIN, deadline_)) return too_late();
      char next = 0;
      const ssize_t received = ::recv(fd_.get(), &next, 1, MSG_DONTWAIT);
      if (received < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (received < 0) return refused("PMI", std::generic_category().message(errno));
      if (received == 0) return refused("PMI", "the process manager has closed the connection");
      if (next == '\n') return line;
      line += next;
    }
    return refused("PMI", cadre::format("an answer has more than {} bytes", kMaxLineBytes));
  }

  Error too_late() const {
    return Error(ErrorCode::kTimeout,
                 "PMI: the process manager did not answer in time; a process of the job may be "
                 "missing that has to start cadre run too");
  }

  os::Fd fd_;
  Deadline deadline_;
};

Result<ManagedJob> ask_pmi(const os::Environment& environment, const std::string& own_host,
                           Deadline deadline) {
  const std::string text = environment.get_or("PMI_FD", "");
  int number = -1;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || number < 0) {
    return refused("PMI", cadre::format("PMI_FD is \"{}\", expected a descriptor", text));
  }
  // The inherited descriptor stays open for a library that the program may load.
  os::Fd connection(::fcntl(number, F_DUPFD_CLOEXEC, 0));
  if (!connection.is_open()) {
    return refused("PMI", cadre::format("descriptor {} (PMI_FD) is not open", number));
  }
  PmiConnection pmi(std::move(connection), deadline);
  auto started =
      pmi.ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init", "pmi_version");
  if (!started.ok()) return started.error();
  auto space = pmi.ask("cmd=get_my_kvsname", "my_kvsname", "kvsname");
  if (!space.ok()) return space.error();
  if (environment.get_or("PMI_RANK", "") == "0") {
    const auto put =
        pmi.ask(cadre::format("cmd=put kvsname={} key={} value={}", *space, kKey, own_host),
                "put_result", "");
    if (!put.ok()) return put.error();
  }
  const auto met = pmi.ask("cmd=barrier_in", "barrier_out", "");
  if (!met.ok()) return met.error();
  auto host =
      pmi.ask(cadre::format("cmd=get kvsname={} key={}", *space, kKey), "get_result", "value");
  if (!host.ok()) return host.error();
  const auto ended = pmi.ask("cmd=finalize", "finalize_ack", "");
  if (!ended.ok()) return ended.error();
  return ManagedJob{.id = *std::move(space), .first_host = *std::move(host), .secret = {}};
}

bool has_pmix(const os::Environment& environment) {
  return environment.get("PMIX_NAMESPACE").has_value();
}

}  // namespace

bool has_process_manager(const os::Environment& environment) {
  return has_pmix(environment) || environment.get("PMI_FD").has_value();
}

Result<ManagedJob> ask_process_manager(const os::Environment& environment,
                                       const std::string& own_host, Deadline deadline) {
  if (has_pmix(environment)) return ask_pmix(environment);
  return ask_pmi(environment, own_host, deadline);
}

}  // namespace cadre::cli
