#include "cadre/launch/cli/flight_folder.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/private_folder.h"
#include "cadre/launch/cli/option_words.h"

namespace cadre::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kVariable = "CADRE_FLIGHT_RECORDS";
constexpr std::string_view kRank = "rank";
constexpr std::string_view kJob = "-job";

// Returns whether the name has the form rankR-jobN, such as "rank1-job2".
bool is_nested_name(std::string_view name) {
  const size_t dash = name.find(kJob);
  return name.starts_with(kRank) && dash != std::string_view::npos &&
         parse_integer(name.substr(kRank.size(), dash - kRank.size())) &&
         parse_integer(name.substr(dash + kJob.size()));
}

// Returns whether `cadre run` or torchrun started this process. A rank that was started by hand has
// no run id in its environment.
bool is_worker(const os::Environment& environment) {
  return environment.get("RANK") && environment.get("TORCHELASTIC_RUN_ID");
}

// Creates the folder rankR-jobN with the lowest free N. The creation is atomic, so two jobs that
// this rank starts at the same time get different numbers.
fs::path make_nested_folder(const fs::path& folder, const std::string& rank,
                            std::error_code& failure) {
  for (int number = 1;; ++number) {
    const fs::path nested = folder / cadre::format("{}{}{}{}", kRank, rank, kJob, number);
    if (fs::create_directory(nested, failure) || failure) {
      if (!failure) fs::permissions(nested, fs::perms::owner_all, failure);
      return nested;
    }
  }
}

}  // namespace

Status prepare_flight_folder(os::Environment& environment) {
  const std::string named = environment.get_or(kVariable, "");
  if (named.empty()) return {};
  std::error_code failure;
  fs::path folder = fs::absolute(named, failure);
  if (!failure) {
    const Status made = os::make_private_folder(folder.string());
    if (!made.ok()) return made.error().with_context("the folder for flight records");
  }
  if (!failure && is_worker(environment)) {
    folder = make_nested_folder(folder, *environment.get("RANK"), failure);
  }
  if (failure) {
    return Error(ErrorCode::kUnavailable,
                 cadre::format("the folder for flight records, {}: {}", named, failure.message()));
  }
  environment.set(kVariable, folder.string());
  return {};
}

std::vector<std::string> nested_flight_folders(const std::string& folder) {
  std::vector<std::string> folders;
  std::error_code failure;
  for (fs::directory_iterator entry(folder, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    const std::string path = entry->path().string();
    // Symbolic links are skipped, because they may lead out of the folder or form a cycle.
    if (!is_nested_name(entry->path().filename().string()) || entry->is_symlink(failure) ||
        !entry->is_directory(failure)) {
      continue;
    }
    folders.push_back(path);
    const std::vector<std::string> inner = nested_flight_folders(path);
    folders.insert(folders.end(), inner.begin(), inner.end());
  }
  std::ranges::sort(folders);
  return folders;
}

}  // namespace cadre::cli
