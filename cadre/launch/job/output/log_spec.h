// Says which output streams of which workers are written to log files, and which are shown.
//
// Threads: plain values. Blocking: never. Source: torchrun's --log-dir, --redirects, --tee,
// --local-ranks-filter, --duplicate-stdout-filters and --duplicate-stderr-filters.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace cadre::launch {

enum class Stream { kOutput, kError };

struct StreamSet {
  bool has_output = false;
  bool has_error = false;

  bool contains(Stream stream) const { return stream == Stream::kOutput ? has_output : has_error; }
  bool is_empty() const { return !has_output && !has_error; }
  friend bool operator==(const StreamSet&, const StreamSet&) = default;
};

// The streams that an option selects: the same streams for all local ranks, or different ones for
// some ranks.
struct StreamChoice {
  StreamSet of_all;
  std::map<int, StreamSet> of_rank;  // the key is a local rank; replaces of_all

  StreamSet of(int local_rank) const {
    const auto found = of_rank.find(local_rank);
    return found == of_rank.end() ? of_all : found->second;
  }
  bool is_empty() const {
    return of_all.is_empty() &&
           std::ranges::all_of(of_rank, [](const auto& entry) { return entry.second.is_empty(); });
  }
};

// What is done with one stream of one worker. A stream that is neither shown nor written to a file
// is dropped.
struct StreamRoute {
  bool is_shown = true;
  bool is_kept = false;  // it is written to a log file

  friend bool operator==(const StreamRoute&, const StreamRoute&) = default;
};

struct LogSpec {
  // The value of `folder` for which no log files are written and redirected streams are dropped.
  static constexpr const char* kNoFolder = "/dev/null";

  // The folder in which each job creates a folder of its own. If it is empty and a stream is
  // written to a file, a folder for temporary files is used.
  std::string folder;
  StreamChoice redirects;        // kept in a file, not shown
  StreamChoice tees;             // kept in a file and shown
  std::vector<int> shown_ranks;  // the local ranks whose output is shown; empty for all
  // Shown lines that contain one of these texts are also written to one file for all workers.
  std::vector<std::string> output_filters;
  std::vector<std::string> error_filters;

  bool has_files() const {
    if (folder == kNoFolder) return false;
    return !folder.empty() || !redirects.is_empty() || !tees.is_empty() ||
           !output_filters.empty() || !error_filters.empty();
  }
  StreamRoute route(Stream stream, int local_rank) const {
    const bool is_teed = tees.of(local_rank).contains(stream);
    const bool is_redirected = redirects.of(local_rank).contains(stream);
    const bool is_chosen = shown_ranks.empty() || std::ranges::count(shown_ranks, local_rank) > 0;
    return {.is_shown = is_chosen && (is_teed || !is_redirected),
            .is_kept = folder != kNoFolder && (is_teed || is_redirected)};
  }
};

}  // namespace cadre::launch
