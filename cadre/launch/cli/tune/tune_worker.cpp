// A rank of the job that `cadre tune` starts. Rank 0 prints the result and writes the tuning file.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/defaults.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/host/stderr_log.h"
#include "cadre/core/os/host/wall_clock.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/environment_rendezvous.h"
#include "cadre/core/rendezvous/job_environment.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/option_words.h"
#include "cadre/launch/cli/path_options.h"
#include "cadre/launch/cli/tune/tune_options.h"

namespace cadre::cli {
namespace {

constexpr size_t kDateBytes = 10;  // the length of "2026-11-28"

class TuneRank {
 public:
  explicit TuneRank(TuneOptions options) : options_(std::move(options)) {}

  int run() {
    const JobEnvironment environment = read_job_environment().value_or_throw();
    check(environment);
    const auto log = std::make_shared<os::StderrLog>(environment.log_level, environment.rank);
    EnvironmentRendezvous rendezvous(*system_, environment, log.get());
    const Membership membership =
        rendezvous.join(system_->deadline_in(kDefaultConnectTimeout)).value_or_throw();
    const auto connect = [&](const std::string& name, TransportChoice transport,
                             std::string tuning) {
      return Communicator::connect(
          *system_, membership,
          {.name = name, .transport = transport, .tuning = std::move(tuning), .log = log},
          system_->deadline_in(kDefaultConnectTimeout));
    };
    const auto world = connect("tune", TransportChoice::kAuto, "");
    const bool is_one_host = world->shares_memory();
    // Ranks that share memory would use no algorithm with sizes.
    const auto transport = is_one_host ? TransportChoice::kTcp : TransportChoice::kAuto;
    const auto first = connect("tune/first", transport, tuning_of_first());
    const auto second = connect("tune/second", transport, tuning_of_second());
    const TunedGroups groups{*world, *first, *second};
    const auto results = measure(groups, options_.measured, [&](const MeasuredOperation& next) {
      if (world->rank() == 0 && next.obstacle.empty()) {
        fail(kTuneCommand, cadre::format("measures {}", to_string(next.kind)), 0);
      }
    });
    const int exit_code = world->rank() == 0 ? report(groups, results, is_one_host) : 0;
    for (const auto* group : {&second, &first, &world}) {
      (*group)->close(system_->deadline_in(kDefaultCloseTimeout));
    }
    return exit_code;
  }

 private:
  // Checks what would make a result impossible, before the ranks measure.
  void check(const JobEnvironment& environment) const {
    if (environment.world_size < 2) {
      throw Error(ErrorCode::kInvalidArgument,
                  "one rank has nothing to measure; give --nproc-per-node 2 or more, or --nnodes");
    }
    if (environment.rank != 0) return;
    const GivenOption output{.name = "--output", .spelling = "--output", .value = options_.output};
    const Status checked = check_output_file(&output);
    if (!checked.ok()) throw checked.error();
  }

  int report(const TunedGroups& groups, const std::vector<MeasuredOperation>& results,
             bool is_one_host) const {
    const std::vector<int> hosts = groups.world.hosts();
    const TuningFile file{
        .table = table_of(results, num_nodes_of(groups)),
        .measured = TuningOrigin{.engine = std::string(groups.first.backend_name()),
                                 .hosts = hosts_text(hosts),
                                 .date = os::wall_clock_text().substr(0, kDateBytes),
                                 .version = CADRE_VERSION}};
    const std::string path = std::filesystem::absolute(options_.output).string();
    const Status written = os::replace_file(path, wire::as_bytes(to_text(file)));
    if (!written.ok()) throw written.error();
    std::string text = cadre::format(
        "{} ranks, {} (hosts x ranks), engine {}. Median of the maximum over the ranks.\n\n{}",
        groups.world.world_size(), file.measured->hosts, file.measured->engine, text_of(results));
    if (is_one_host) {
      text +=
          "All ranks are on one host: the sizes are for groups with TransportChoice::kTcp; ranks "
          "that share\nmemory use none.\n";
    }
    text += cadre::format(
        "The file is {}\nUse it on the host of rank 0: CADRE_TUNING_FILE={} cadre run ...\n", path,
        path);
    return print(text);
  }

  const TuneOptions options_;
  const std::unique_ptr<os::System> system_ = os::make_native_system();
};

}  // namespace

int tune_worker_command(Words words) {
  const auto parsed = parse_words(kTuneCommand, kTuneOptions, OtherWords::kAmongOptions, words);
  if (!parsed.ok()) return fail(kTuneCommand, parsed.error().message(), kUsageExitCode);
  auto options = parse_tune_options(*parsed);
  if (!options.ok()) return fail(kTuneCommand, options.error().message(), kUsageExitCode);
  try {
    return TuneRank(*std::move(options)).run();
  } catch (const Error& error) {
    return fail(kTuneCommand, error.message(), 1);
  }
}

}  // namespace cadre::cli
