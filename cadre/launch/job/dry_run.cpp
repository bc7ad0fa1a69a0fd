#include "cadre/launch/job/dry_run.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/host/host_info.h"
#include "cadre/launch/job/failure_report.h"
#include "cadre/launch/job/output/line_prefix.h"
#include "cadre/launch/job/worker_environment.h"

namespace cadre::launch {
namespace {

// Returns the word as it is written on the command line of a shell.
std::string quoted(std::string_view word) {
  const bool is_plain = !word.empty() && std::ranges::all_of(word, [](unsigned char c) {
    return std::isalnum(c) != 0 ||
           std::string_view("_-./,:=+@%").find(static_cast<char>(c)) != std::string_view::npos;
  });
  if (is_plain) return std::string(word);
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

std::string arguments_of(const JobSpec& spec, Rank rank) {
  std::string text;
  for (const std::string& argument : spec.arguments) {
    text += (text.empty() ? "" : " ") + quoted(with_local_rank(argument, rank));
  }
  return text;
}

JobIdentity planned_identity(const JobSpec& spec) {
  JobIdentity identity{.num_workers = spec.num_workers,
                       .run_id = spec.run_id.empty() ? "<random>" : spec.run_id,
                       .job_id = "<random>",
                       .role = spec.role,
                       .token = os::Secret("<secret>"),
                       .store_host = "127.0.0.1",
                       .store_port = spec.store_port,
                       .error_folder = "<temporary folder>",
                       .num_cores = os::read_host_info().num_cores,
                       .cores_of_rank = spec.cores_of_rank,
                       .max_restarts = spec.max_restarts,
                       .has_virtual_local_ranks = spec.has_virtual_local_ranks};
  if (spec.logs.has_files()) {
    identity.log_folder = spec.logs.folder.empty()
                              ? "<TMPDIR>/cadre-logs-" + identity.run_id + "_xxxxxx"
                              : cadre::format("{}/{}_xxxxxx", spec.logs.folder, identity.run_id);
  }
  return identity;
}

// Returns the variables that the launcher adds or changes for the worker, sorted.
std::vector<std::string> added_variables(const JobSpec& spec, const JobIdentity& identity,
                                         Rank rank) {
  os::Environment environment = worker_environment(spec.environment, identity, rank);
  if (identity.store_port == 0) environment.set("MASTER_PORT", "<free port>");
  if (spec.hosts) {
    for (const char* name : {"RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_RANK",
                             "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
      environment.set(name, "<known when the hosts have met>");
    }
  }
  std::vector<std::string> added = environment.to_texts();
  const std::vector<std::string> inherited = spec.environment.to_texts();
  std::erase_if(added, [&](const std::string& one) {
    return std::ranges::find(inherited, one) != inherited.end();
  });
  std::ranges::sort(added);
  return added;
}

}  // namespace

std::string dry_run_text(const JobSpec& spec) {
  const JobIdentity identity = planned_identity(spec);
  std::string text = cadre::format("program: {}\nworkers: {}\n", spec.executable, spec.num_workers);
  if (spec.hosts) {
    text += cadre::format("hosts: {} to {}\n", spec.hosts->min_hosts, spec.hosts->max_hosts);
    if (spec.hosts->registry) {
      text += cadre::format("rendezvous: {}\n", spec.hosts->registry->name);
    }
  }
  if (!identity.log_folder.empty()) {
    text += cadre::format("log files: {}/attempt_0/LOCALRANK/\n", identity.log_folder);
  }
  std::vector<std::vector<std::string>> added;
  for (int rank = 0; rank < spec.num_workers; ++rank) {
    added.push_back(added_variables(spec, identity, rank));
  }
  std::vector<std::string> common = added.front();
  for (const auto& variables : added) {
    std::erase_if(common, [&](const std::string& one) {
      return !std::ranges::binary_search(variables, one);
    });
  }
  text += "environment added for all workers:\n";
  for (const std::string& variable : common) text += cadre::format("  {}\n", variable);
  for (int rank = 0; rank < spec.num_workers; ++rank) {
    text += cadre::format("{}rank {}: {}\n", spec.hosts ? "local " : "", rank,
                          arguments_of(spec, rank));
    if (!spec.cores_of_rank.empty()) {
      text += cadre::format("  bound to cores {}\n",
                            rank_ranges(spec.cores_of_rank[static_cast<size_t>(rank)]));
    }
    for (const std::string& variable : added[static_cast<size_t>(rank)]) {
      if (!std::ranges::binary_search(common, variable)) text += cadre::format("  {}\n", variable);
    }
  }
  return text;
}

}  // namespace cadre::launch
