#include "cadre/launch/job/output/job_logs.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/private_folder.h"
#include "cadre/core/os/proc/temporary_folder.h"

namespace cadre::launch {
namespace {

constexpr size_t kMaxNameBytes = 100;

std::string file_name_of(std::string_view run_id) {
  std::string name;
  for (const char c : run_id.substr(0, kMaxNameBytes)) {
    const bool is_kept = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' ||
                         (c == '.' && !name.empty());
    name += is_kept ? c : '_';
  }
  return name;
}

}  // namespace

Result<std::unique_ptr<JobLogs>> JobLogs::make(const LogSpec& spec, const std::string& run_id,
                                               const std::string& temporary) {
  if (!spec.folder.empty()) {
    const Status made = os::make_private_folder(spec.folder);
    if (!made.ok()) return made.error().with_context("the folder for log files");
  }
  const auto folder =
      spec.folder.empty()
          ? os::make_unique_folder(temporary, "cadre-logs-" + file_name_of(run_id) + "_")
          : os::make_unique_folder(spec.folder, file_name_of(run_id) + "_");
  if (!folder.ok()) return folder.error().with_context("the folder for log files");
  return std::make_unique<JobLogs>(spec, *folder);
}

JobLogs::JobLogs(LogSpec spec, std::string folder)
    : spec_(std::move(spec)), folder_(std::move(folder)) {}

std::string JobLogs::rank_folder(int attempt, int local_rank) const {
  return cadre::format("{}/attempt_{}/{}", folder_, attempt, local_rank);
}

Result<LogFile*> JobLogs::create(const std::string& path) {
  auto file = file_system_.create(path);
  if (!file.ok()) return file.error();
  return &files_.emplace_back(*std::move(file), path);
}

Status JobLogs::begin_attempt(int attempt, int num_workers) {
  output_filter_.reset();
  error_filter_.reset();
  reported_.clear();
  files_.clear();
  files_of_.assign(static_cast<size_t>(num_workers), {});
  const Status opened = open_files(attempt, num_workers);
  if (!opened.ok()) {
    has_failed_ = true;
    files_of_.assign(static_cast<size_t>(num_workers), {});
  }
  return opened;
}

Status JobLogs::open_files(int attempt, int num_workers) {
  for (int rank = 0; rank < num_workers; ++rank) {
    const std::string folder = rank_folder(attempt, rank);
    CADRE_RETURN_IF_ERROR(os::make_private_folder(folder));
    RankFiles& files = files_of_[static_cast<size_t>(rank)];
    if (spec_.route(Stream::kOutput, rank).is_kept) {
      const auto file = create(folder + "/stdout.log");
      if (!file.ok()) return file.error();
      files.output = *file;
    }
    if (spec_.route(Stream::kError, rank).is_kept) {
      const auto file = create(folder + "/stderr.log");
      if (!file.ok()) return file.error();
      files.error = *file;
    }
  }
  const auto open_filter = [&](const std::vector<std::string>& texts, std::string_view name,
                               std::optional<LineFilter>& filter) -> Status {
    if (texts.empty()) return {};
    const auto file = create(cadre::format("{}/attempt_{}/{}", folder_, attempt, name));
    if (!file.ok()) return file.error();
    filter.emplace(texts, **file);
    return {};
  };
  CADRE_RETURN_IF_ERROR(open_filter(spec_.output_filters, "filtered_stdout.log", output_filter_));
  return open_filter(spec_.error_filters, "filtered_stderr.log", error_filter_);
}

StreamTargets JobLogs::targets(Stream stream, int local_rank) {
  const bool is_output = stream == Stream::kOutput;
  const RankFiles& files = files_of_[static_cast<size_t>(local_rank)];
  const StreamRoute route = spec_.route(stream, local_rank);
  std::optional<LineFilter>& filter = is_output ? output_filter_ : error_filter_;
  LogFile* const file = is_output ? files.output : files.error;
  return {.is_shown = route.is_shown || (route.is_kept && file == nullptr),
          .file = file,
          .filter = filter && route.is_shown ? &*filter : nullptr};
}

std::vector<Error> JobLogs::take_failures() {
  std::vector<Error> failures;
  for (const LogFile& file : files_) {
    if (!file.failure() || std::ranges::count(reported_, &file) > 0) continue;
    reported_.push_back(&file);
    failures.push_back(*file.failure());
    has_failed_ = true;
  }
  return failures;
}

}  // namespace cadre::launch
