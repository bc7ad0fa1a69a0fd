#include "cadre/core/fabric/flight_files.h"

#include <algorithm>
#include <filesystem>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/fabric/flight/flight_record.h"
#include "cadre/core/fabric/flight/flight_recorder.h"
#include "cadre/core/fabric/flight/process_start.h"
#include "cadre/core/os/files/file.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".flight";
constexpr char kSeparator = '+';
constexpr size_t kMaxRecordBytes = 1 << 20;

// Removes the oldest files, which come first, until at most `max_count` are left.
void keep(std::deque<std::string>& files, size_t max_count) {
  while (files.size() > max_count) {
    std::error_code failure;
    fs::remove(files.front(), failure);
    files.pop_front();
  }
}

// Returns whether the record is marked as closed or its writer has ended, so that it will not
// change.
bool is_over(const std::string& path) {
  const auto text = os::read_file(path, kMaxRecordBytes);
  if (!text.ok()) return false;
  const ConstBytes bytes = std::as_bytes(std::span(*text));
  const auto record = parse_flight_record(bytes);
  return record.ok() && (FlightRecorder::is_closed(bytes) || !writer_lives(record->identity));
}

}  // namespace

// The first group of a fabric can be a rejoined subgroup of another fabric. The path of its record
// is NAME+GROUP@BIRTH.flight, so NAME ends before the first separator.
FlightFiles::FlightFiles(std::string path) : first_(std::move(path)) {
  if (first_.empty()) return;
  folder_ = fs::path(first_).parent_path().string();
  name_ = fs::path(first_).stem().string();
  name_ = name_.substr(0, name_.find(kSeparator));
  adopt_earlier();
}

std::string FlightFiles::path_for(const GroupIdentity& identity, std::string_view name) const {
  if (first_.empty()) return "";
  const std::string file = format("{}{}{}{}", name_, kSeparator, identity.file_name(name), kSuffix);
  return (fs::path(folder_) / file).string();
}

std::string FlightFiles::path_for_first(const GroupIdentity& identity,
                                        std::string_view name) const {
  const bool is_of_other =
      fs::path(first_).filename().string().find(kSeparator) != std::string::npos;
  return is_of_other ? path_for(identity, name) : first_;
}

void FlightFiles::release(const std::string& path, bool has_failed) {
  if (path.empty() || path == first_) return;
  const std::lock_guard lock(mutex_);
  (has_failed ? failed_ : closed_).push_back(path);
  keep(closed_, kMaxClosed);
  keep(failed_, kMaxFailed);
}

void FlightFiles::adopt_earlier() {
  std::vector<std::pair<fs::file_time_type, std::string>> found;
  std::error_code failure;
  for (fs::directory_iterator entry(folder_.empty() ? "." : folder_, failure), end;
       !failure && entry != end; entry.increment(failure)) {
    const std::string file = entry->path().filename().string();
    if (!file.starts_with(name_ + kSeparator) || !file.ends_with(kSuffix)) continue;
    if (entry->path() == fs::path(first_) || !is_over(entry->path().string())) continue;
    found.emplace_back(entry->last_write_time(failure), entry->path().string());
  }
  std::ranges::sort(found);
  for (auto& [time, path] : found) closed_.push_back(std::move(path));
  keep(closed_, kMaxClosed);
}

}  // namespace cadre
