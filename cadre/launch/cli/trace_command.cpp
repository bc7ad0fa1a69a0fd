// `cadre trace`: reads the ranks' flight records and prints which rank has not entered an
// operation.
#include <algorithm>
#include <array>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>

#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/core/comm/trace/trace.h"
#include "cadre/core/fabric/flight/process_start.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/host/wall_clock.h"
#include "cadre/core/os/native/monotonic_clock.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/flight_folder.h"
#include "cadre/launch/cli/option_words.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kTraceCommand = "cadre trace";
constexpr std::string_view kTraceHelp = R"(cadre trace [options] FOLDER | FILE...

Merges the flight records of the ranks of a job, also after kill -9 or while the job hangs, and
prints for each group the collective at which it stopped, the ranks that waited in it, the ranks that
have not entered it (owes), and calls that disagree.

  cadre run --nproc-per-node 4 --flight-records records ./train
  cadre trace records                      every record in the folder
  cadre trace records/*.flight --last 50   some of them, with a longer table

A folder rank1-job2 among the records has the records of the second job that rank 1 started with
`cadre run` or `cadre train`; it is shown as a separate job.

Options
  --last N   rows of the table of the last collectives (default 10; 0 for none)
  --json     print JSON, with every recorded operation
  --help     this text
)";
constexpr std::string_view kSuffix = ".flight";
// A flight record has 128 KiB by default. The limit allows larger ones.
constexpr size_t kMaxRecordBytes = 64 << 20;

struct TraceOptions {
  std::vector<std::string> paths;
  size_t num_operations = 10;
  bool wants_json = false;
  bool wants_help = false;
};

Result<TraceOptions> parse_options(Words words) {
  constexpr std::array kTraceOptions{OptionSpec{"--last", "N"}, OptionSpec{"--json", ""},
                                     OptionSpec{"--help", "", 'h'}};
  auto parsed = parse_words(kTraceCommand, kTraceOptions, OtherWords::kAmongOptions, words);
  if (!parsed.ok()) return parsed.error();
  TraceOptions options{.paths = std::move(parsed->others),
                       .wants_json = parsed->find("--json") != nullptr,
                       .wants_help = parsed->find("--help") != nullptr};
  if (const GivenOption* last = parsed->find("--last"); last != nullptr) {
    const auto count = parse_integer(last->value);
    if (!count || *count < 0) {
      return Error(ErrorCode::kInvalidArgument,
                   last->text() + ": expected a number of rows, 0 for no table");
    }
    options.num_operations = static_cast<size_t>(*count);
  }
  if (options.paths.empty() && !options.wants_help) {
    return Error(ErrorCode::kInvalidArgument,
                 "name a folder or files with flight records (cadre run --flight-records FOLDER "
                 "makes them)");
  }
  return options;
}

// The records of one job.
struct JobFiles {
  // The subfolder of a job that a worker started (flight_folder.h); empty for any other job.
  std::string nested_folder;
  std::vector<std::string> files;
};

std::vector<std::string> flight_files_in(const std::string& folder) {
  std::vector<std::string> files;
  std::error_code failure;
  for (std::filesystem::directory_iterator entry(folder, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    if (entry->path().extension() == kSuffix) files.push_back(entry->path().string());
  }
  return files;
}

Error no_records_in(const std::string& folder) {
  std::error_code failure;
  const auto num_entries = std::distance(std::filesystem::directory_iterator(folder, failure), {});
  if (failure) {
    return Error(ErrorCode::kUnavailable, cadre::format("\"{}\": {}", folder, failure.message()));
  }
  const std::string found =
      num_entries == 0 ? "is empty"
                       : cadre::format("has no file that ends in {} (of {})", kSuffix, num_entries);
  return Error(
      ErrorCode::kUnavailable,
      cadre::format("\"{}\" {}: no flight records. Only Cadre's groups keep them, from the "
                    "moment they connect under cadre run --flight-records; groups of "
                    "torch.distributed (gloo, nccl) keep none",
                    folder, found));
}

// Returns first one job with all given files and all files *.flight of the given folders, and then
// each job that one of its workers started.
Result<std::vector<JobFiles>> find_jobs(const std::vector<std::string>& paths) {
  std::vector<JobFiles> jobs(1);
  for (const std::string& path : paths) {
    std::error_code failure;
    const auto status = std::filesystem::status(path, failure);
    if (!std::filesystem::exists(status)) {
      return Error(ErrorCode::kUnavailable,
                   cadre::format("there is no file or folder \"{0}\"; a job that is started with "
                                 "cadre run --flight-records {0} makes it",
                                 path));
    }
    if (!std::filesystem::is_directory(status)) {
      jobs[0].files.push_back(path);
      continue;
    }
    std::vector<std::string> files = flight_files_in(path);
    bool has_records = !files.empty();
    jobs[0].files.insert(jobs[0].files.end(), files.begin(), files.end());
    for (const std::string& nested : nested_flight_folders(path)) {
      files = flight_files_in(nested);
      if (files.empty()) continue;
      has_records = true;
      jobs.push_back({.nested_folder = nested, .files = std::move(files)});
    }
    if (!has_records) return no_records_in(path);
  }
  for (JobFiles& job : jobs) std::ranges::sort(job.files);
  return jobs;
}

// Reads the clock after the record, so that no operation in the record is later than `alive_at`.
// Opens regular files only, because reading a pipe may block indefinitely.
Result<FlightRecord> read_record(const std::string& path) {
  std::error_code failure;
  if (!std::filesystem::is_regular_file(path, failure)) {
    return Error(ErrorCode::kInvalidArgument, "is not a regular file");
  }
  const auto text = os::read_file(path, kMaxRecordBytes);
  if (!text.ok()) return text.error();
  auto record = parse_flight_record(std::as_bytes(std::span(*text)));
  if (record.ok() && writer_lives(record->identity)) record->alive_at = os::monotonic_now();
  return record;
}

// Returns the records that can be read; reports problems with the others.
std::vector<FlightRecord> read_records(const std::vector<std::string>& files, int& num_refused) {
  std::vector<FlightRecord> records;
  for (const std::string& path : files) {
    auto record = read_record(path);
    if (record.ok()) {
      records.push_back(std::move(record).value());
    } else {
      ++num_refused;
      fail(kTraceCommand, cadre::format("{}: {}", printable(path), record.error().message()), 0);
    }
  }
  return records;
}

// Appends the traces of one job. Each gets the number of the job and the subfolder of a nested job,
// because groups of different jobs may have the same name.
void append_json(const JobFiles& files, size_t number, const std::vector<GroupTrace>& traces,
                 nlohmann::ordered_json& json) {
  for (auto& group : nlohmann::ordered_json::parse(to_json(traces))) {
    group["job"] = number;
    if (!files.nested_folder.empty()) group["nested_folder"] = files.nested_folder;
    json.push_back(std::move(group));
  }
}

// Returns the heading of a job, which is shown if a folder has the records of several jobs.
std::string title_of_job(size_t number, size_t num_jobs, int64_t made_at_s) {
  const std::string time = made_at_s == 0 ? "" : ", begun " + os::wall_clock_text(made_at_s);
  const std::string_view rest =
      number == num_jobs ? " (the last one)"
                         : "; a later job may have written its records over some of these";
  return cadre::format("{}job {} of {} whose records lie here{}{}\n", number == 1 ? "" : "\n",
                       number, num_jobs, time, rest);
}

}  // namespace

int trace_command(Words words) {
  const auto options = parse_options(words);
  if (!options.ok()) return fail(kTraceCommand, options.error().message(), kUsageExitCode);
  if (options->wants_help) return print(kTraceHelp);
  const auto jobs = find_jobs(options->paths);
  if (!jobs.ok()) return fail(kTraceCommand, jobs.error().message(), 1);
  int num_refused = 0;
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  std::string text;
  for (const JobFiles& job : *jobs) {
    const auto together = split_jobs(read_records(job.files, num_refused));
    if (!job.nested_folder.empty()) {
      text += cadre::format("\njob of its own, started by a worker: {}\n",
                            printable(job.nested_folder));
    }
    for (size_t number = 1; number <= together.size(); ++number) {
      const std::vector<FlightRecord>& records = together[number - 1];
      const std::vector<GroupTrace> traces = trace_groups(records);
      if (options->wants_json) append_json(job, number, traces, json);
      if (together.size() > 1) {
        text += title_of_job(number, together.size(), records.front().identity.made_at_s);
      }
      for (const GroupTrace& trace : traces) text += to_text(trace, options->num_operations);
    }
  }
  const int written = print(options->wants_json ? json.dump(2) + "\n" : text);
  return num_refused == 0 ? written : 1;
}

}  // namespace cadre::cli
