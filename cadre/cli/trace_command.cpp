// `cadre trace`: reads the ranks' flight records and says who owes what.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <span>
#include <system_error>

#include "cadre/base/format.h"
#include "cadre/cli/command.h"
#include "cadre/comm/trace/process_start.h"
#include "cadre/comm/trace/trace.h"
#include "cadre/os/host/monotonic_clock.h"
#include "cadre/os/io/file.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kCommand = "cadre trace";
constexpr std::string_view kHelp = R"(cadre trace [options] FOLDER | FILE...

Reads the flight records that the ranks of a job left (also after kill -9 or a hang that is still
going on), puts them together, and says for each group at which collective it stopped, which ranks
waited there, which rank owes its part, and where calls disagree.

  cadre run --nproc-per-node 4 --flight-records records ./train
  cadre trace records                      every record in the folder
  cadre trace records/*.flight --last 50   some of them, with a longer table

Options
  --last N   rows of the table of the last collectives (default 10; 0 for none)
  --json     the same for programs, with every recorded operation
  --help     this text
)";
constexpr std::string_view kSuffix = ".flight";
// A record has 128 KiB; this leaves room for other capacities.
constexpr size_t kMaxRecordBytes = 64 << 20;

struct TraceOptions {
  std::vector<std::string> paths;
  size_t num_operations = 10;
  bool wants_json = false;
  bool wants_help = false;
};

Result<TraceOptions> parse_options(Words words) {
  TraceOptions options;
  CLI::App app;
  app.set_help_flag();
  app.add_flag("-h,--help", options.wants_help);
  app.add_flag("--json", options.wants_json);
  app.add_option("--last", options.num_operations);
  app.add_option("paths", options.paths);
  try {
    // CLI11 takes the words last first.
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::Error& error) {
    return Error(ErrorCode::kInvalidArgument, error.what());
  }
  if (options.paths.empty() && !options.wants_help) {
    return Error(ErrorCode::kInvalidArgument,
                 "name a folder or files with flight records (cadre run --flight-records FOLDER "
                 "makes them)");
  }
  return options;
}

// The files themselves, and of folders those that end in .flight.
Result<std::vector<std::string>> find_files(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code failure;
    if (!std::filesystem::is_directory(path, failure)) {
      files.push_back(path);
      continue;
    }
    const size_t num_before = files.size();
    for (const auto& entry : std::filesystem::directory_iterator(path, failure)) {
      if (entry.path().extension() == kSuffix) files.push_back(entry.path().string());
    }
    if (failure || files.size() == num_before) {
      return Error(ErrorCode::kUnavailable,
                   cadre::format("\"{}\" has no file that ends in {}{}", path, kSuffix,
                                 failure ? ": " + failure.message() : ""));
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

// The time is taken after the reading: nothing in the record is later.
Result<FlightRecord> read_record(const std::string& path) {
  const auto text = os::read_file(path, kMaxRecordBytes);
  if (!text.ok()) return text.error();
  auto record = parse_flight_record(std::as_bytes(std::span(*text)));
  if (record.ok() && writer_lives(record->identity)) record->alive_at = os::monotonic_now();
  return record;
}

}  // namespace

int trace_command(Words words) {
  const auto options = parse_options(words);
  if (!options.ok()) return fail(kCommand, options.error().message(), kUsageExitCode);
  if (options->wants_help) {
    print(kHelp);
    return 0;
  }
  const auto files = find_files(options->paths);
  if (!files.ok()) return fail(kCommand, files.error().message(), 1);
  std::vector<FlightRecord> records;
  int num_refused = 0;
  for (const std::string& path : *files) {
    auto record = read_record(path);
    if (record.ok()) {
      records.push_back(std::move(record).value());
    } else {
      ++num_refused;
      fail(kCommand, cadre::format("{}: {}", path, record.error().message()), 0);
    }
  }
  const std::vector<GroupTrace> traces = trace_groups(std::move(records));
  if (options->wants_json) {
    print(to_json(traces));
  } else {
    for (const GroupTrace& trace : traces) print(to_text(trace, options->num_operations));
  }
  return num_refused == 0 ? 0 : 1;
}

}  // namespace cadre::cli
