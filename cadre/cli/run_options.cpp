#include "cadre/cli/run_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <system_error>

#include "cadre/base/format.h"
#include "cadre/cli/nearest.h"

namespace cadre::cli {
namespace {

// What is checked after parsing: the port, and torchrun's flags that mean something only for
// several hosts or restarts.
struct OtherOptions {
  std::string master_port = "0";
  std::string num_nodes = "1";
  int node_rank = 0;
  int max_restarts = 0;
  bool standalone = false;
};

// "--nproc-per-node,--nproc_per_node": torchrun accepts both.
std::string both_spellings(const std::string& name) {
  std::string other = name;
  std::replace(other.begin() + 2, other.end(), '-', '_');
  return other == name ? name : name + "," + other;
}

void declare(CLI::App& app, RunOptions& options, OtherOptions& other) {
  app.set_help_flag();
  app.prefix_command();
  app.add_flag("-h,--help", options.wants_help);
  app.add_option(both_spellings("--nproc-per-node"), options.num_workers);
  app.add_flag("-m,--module", options.is_module);
  app.add_flag(both_spellings("--no-python"), options.no_python);
  app.add_flag("--standalone", other.standalone);
  app.add_option(both_spellings("--rdzv-id"), options.run_id);
  app.add_option("--role", options.role);
  app.add_option(both_spellings("--master-port"), other.master_port);
  app.add_option(both_spellings("--log-line-prefix-template"), options.prefix_template);
  app.add_option(both_spellings("--flight-records"), options.flight_folder);
  app.add_option(both_spellings("--shutdown-timeout"), options.shutdown_timeout_s)
      ->check(CLI::NonNegativeNumber);
  app.add_option("--nnodes", other.num_nodes);
  app.add_option(both_spellings("--node-rank"), other.node_rank);
  app.add_option(both_spellings("--max-restarts"), other.max_restarts);
}

Result<uint16_t> parse_port(const std::string& text) {
  uint16_t port = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, port);
  if (parsed.ec == std::errc() && parsed.ptr == end) return port;
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("--master-port {}: expected a number from 1 to 65535, or 0 for a free "
                             "port",
                             text));
}

Status check_one_host(const OtherOptions& other) {
  if (other.num_nodes != "1" && other.num_nodes != "1:1") {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("--nnodes {}: this launcher starts workers on one host only",
                               other.num_nodes));
  }
  if (other.node_rank != 0) {
    return Error(
        ErrorCode::kInvalidArgument,
        cadre::format("--node-rank {}: with one host the only node is 0", other.node_rank));
  }
  if (other.max_restarts != 0) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("--max-restarts {}: this launcher does not restart workers; run it "
                               "again from the last snapshot",
                               other.max_restarts));
  }
  return {};
}

Error unknown_option(const CLI::App& app, const std::string& word) {
  const std::string name = word.substr(0, word.find('='));
  std::vector<std::string> known;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& spelling : option->get_lnames()) known.push_back("--" + spelling);
  }
  const std::string near = nearest(name, known);
  return Error(ErrorCode::kInvalidArgument,
               near.empty() ? cadre::format("unknown option {}; cadre run --help lists all", name)
                            : cadre::format("unknown option {}; did you mean {}?", name, near));
}

}  // namespace

Result<RunOptions> parse_run_options(std::span<const std::string> words) {
  RunOptions options;
  OtherOptions other;
  CLI::App app;
  declare(app, options, other);
  try {
    // CLI11 takes the words last first.
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::Error& error) {
    return Error(ErrorCode::kInvalidArgument, error.what());
  }
  options.program = app.remaining();
  if (!options.program.empty() && options.program.front() == "--") {
    options.program.erase(options.program.begin());
  } else if (!options.program.empty() && options.program.front().starts_with('-')) {
    return unknown_option(app, options.program.front());
  }
  if (options.wants_help) return options;
  CADRE_RETURN_IF_ERROR(check_one_host(other));
  const Result<uint16_t> port = parse_port(other.master_port);
  if (!port.ok()) return port.error();
  options.master_port = *port;
  if (options.program.empty()) {
    return Error(ErrorCode::kInvalidArgument,
                 "no program to run; for example: cadre run --nproc-per-node 2 ./train");
  }
  return options;
}

}  // namespace cadre::cli
