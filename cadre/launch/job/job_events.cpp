#include "cadre/launch/job/job_events.h"

#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/files/native_file_system.h"
#include "cadre/launch/job/error_file.h"

namespace cadre::launch {
namespace {

// Keeps the order of torchelastic's fields.
using OrderedJson = nlohmann::ordered_json;

// Bytes that are not UTF-8 are replaced, because an error file may contain any bytes.
std::string dumped(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

OrderedJson or_null(const auto& value) {
  return value ? OrderedJson(*value) : OrderedJson();
}

// torchelastic writes these values as a JSON text in a field, and each of a worker as a list.
std::string details_of(const JobEvent& event, const EventContext& context) {
  const HostRanks ranks = ranks_of(context.job);
  OrderedJson details = {{"group_world_size", ranks.num_hosts},
                         {"entry_point", context.entry_point}};
  if (event.rank) {
    const int local_rank = local_rank_of(context.job, *event.rank);
    details["local_rank"] = OrderedJson::array({local_rank});
    details["role_rank"] =
        OrderedJson::array({ranks.first_role_rank + static_cast<uint64_t>(local_rank)});
    details["role_world_size"] = OrderedJson::array({ranks.role_world_size});
    details["exit_code"] = OrderedJson::array({or_null(event.exit_code)});
    details["worker_pid"] = OrderedJson::array({or_null(event.pid)});
  }
  return dumped(details);
}

// Returns the negative number of a signal, as Python's subprocess does.
std::optional<int> exit_code_of(const os::ExitStatus& status) {
  if (!status.is_known) return std::nullopt;
  return status.signal != 0 ? -status.signal : status.code;
}

}  // namespace

JobEvent end_of_worker(const WorkerExit& ended, const std::string& error_file) {
  JobEvent event{.state = "SUCCEEDED",
                 .rank = ended.rank,
                 .pid = ended.pid,
                 .exit_code = exit_code_of(ended.status),
                 .duration = ended.lifetime};
  if (ended.was_asked_to_stop) {
    event.state = "TERMINATED";
  } else if (!ended.status.is_success()) {
    event.state = "FAILED";
    auto content = os::read_file(error_file, kMaxErrorFileBytes);
    if (content.ok()) event.error = *std::move(content);
  }
  return event;
}

std::string to_json(const JobEvent& event, const EventContext& context) {
  OrderedJson rank;
  OrderedJson worker_id;
  if (event.rank) {
    rank = event.rank->value;
    worker_id = cadre::format("{}", event.pid.value_or(0));
  }
  OrderedJson duration_ms;
  if (event.duration) {
    duration_ms = std::chrono::duration<double, std::milli>(*event.duration).count();
  }
  const auto run_time = std::chrono::duration_cast<std::chrono::seconds>(context.total_run_time);
  const OrderedJson metadata = {
      {"run_id", context.job.run_id},
      {"global_rank", rank},
      {"group_rank", ranks_of(context.job).group_rank},
      {"worker_id", worker_id},
      {"role", context.job.role},
      {"hostname", context.host},
      {"state", event.state},
      {"total_run_time", run_time.count()},
      {"rdzv_backend", context.job.ranks ? "c10d" : "static"},
      {"raw_error", event.error.empty() ? OrderedJson() : OrderedJson(event.error)},
      {"metadata", details_of(event, context)},
      {"agent_restarts", context.job.restart_count},
      {"duration_ms", duration_ms}};
  return dumped({{"name", "torchelastic.worker.status." + event.state},
                 {"source", event.rank ? "WORKER" : "AGENT"},
                 {"timestamp", context.timestamp_ms},
                 {"metadata", metadata}});
}

Result<std::unique_ptr<JobEvents>> JobEvents::open(const EventTargets& targets,
                                                   BufferedOutput& console) {
  std::optional<LogFile> file;
  if (!targets.file.empty()) {
    auto created = os::NativeFileSystem().create(targets.file);
    if (!created.ok()) return created.error().with_context("the file for events");
    file.emplace(*std::move(created), targets.file);
  }
  return std::make_unique<JobEvents>(targets.has_console, std::move(file), console);
}

void JobEvents::write(const JobEvent& event, const EventContext& context) {
  const std::string line = to_json(event, context);
  if (has_console_) console_.append_line("", line);
  if (file_) file_->write(line + "\n");
}

std::optional<Error> JobEvents::take_failure() {
  if (!has_failed() || std::exchange(has_taken_failure_, true)) return std::nullopt;
  return file_->failure();
}

}  // namespace cadre::launch
