#include "cadre/testing/core/process_job.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <iterator>
#include <regex>
#include <sstream>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/store/tcp/tcp_store.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/testing/core/process_ranks.h"

namespace cadre::testing {
namespace {

constexpr char kToken[] = "token of the test";
constexpr Duration kConnectTime = std::chrono::seconds(20);

// A pipe whose write end every rank keeps open until it ends. No rank writes to it, so its read end
// reports end-of-file when the last rank has ended.
struct LifeLine {
  os::Fd reading_end;
  os::Fd writing_end;
};

LifeLine make_life_line() {
  std::array<int, 2> ends{};
  require(::pipe2(ends.data(), O_CLOEXEC) == 0, "pipe2");
  return {os::Fd(ends[0]), os::Fd(ends[1])};
}

// Serves the store until the last rank has ended or was killed.
void hold_store(RankContext& context, LifeLine& line) {
  const auto server = TcpStoreServer::start(
                          context.system, {.address = context.rendezvous_address, .token = kToken})
                          .value_or_throw();
  line.writing_end = os::Fd();
  std::byte nothing{};
  while (::read(line.reading_end.get(), &nothing, 1) < 0 && errno == EINTR) {
  }
  server->close();
}

}  // namespace

RanksResult run_job(const JobOptions& options, const JobMain& rank_main) {
  const int world_size = options.world_size;
  LifeLine line = make_life_line();
  ProcessOptions processes = options.processes;
  processes.disturb = [&](std::span<const int> pids) {
    line.writing_end = os::Fd();
    if (options.processes.disturb) options.processes.disturb(pids);
  };
  RanksResult result = run_ranks_as_processes(
      world_size + 1,
      [&](RankContext& context) {
        if (context.rank == world_size) return hold_store(context, line);
        const std::shared_ptr<Store> store =
            TcpStore::connect(context.system, {context.rendezvous_address, kToken},
                              context.system.deadline_in(kConnectTime))
                .value_or_throw();
        const Membership membership{.rank = context.rank,
                                    .world_size = world_size,
                                    .round = 1,
                                    .store = store,
                                    .job_token = kToken};
        rank_main(context, membership);
      },
      processes);
  result.ranks.pop_back();
  return result;
}

std::unique_ptr<Communicator> connect(RankContext& context, const Membership& membership,
                                      const CommunicatorOptions& options, Duration budget) {
  return Communicator::connect(context.system, membership, options,
                               context.system.deadline_in(budget));
}

void nap(os::System& system, Duration duration) {
  system.poll({}, system.deadline_in(duration));
}

std::string to_text(const FailureReport& report) {
  return format("{} {}\n{}", report.raised.ns, report.disturbed.ns, report.message);
}

FailureReport parse_report(const std::string& text) {
  FailureReport report;
  std::istringstream in(text);
  in >> report.raised.ns >> report.disturbed.ns;
  require(in.get() == '\n', "cannot parse the report: " + text);
  report.message.assign(std::istreambuf_iterator<char>(in), {});
  return report;
}

std::string mask(std::string text) {
  const std::array<std::pair<std::regex, const char*>, 4> rules = {{
      {std::regex(R"(\((world rank [0-9]+, )?[^(),]*, pid [0-9]+\))"), "($1HOST, pid N)"},
      {std::regex(R"(\b[0-9]+(\.[0-9]+)? m?s\b)"), "N s"},
      {std::regex(R"(#[0-9]+)"), "#N"},
      {std::regex(R"((seen in [a-z_]+ #N), [a-z ]+,)"), "$1, PHASE,"},
  }};
  for (const auto& [pattern, word] : rules) text = std::regex_replace(text, pattern, word);
  return text;
}

std::string without_world_ranks(std::string text, int first_world_rank) {
  constexpr int kMostRanks = 8;
  for (int rank = 0; rank < kMostRanks; ++rank) {
    const std::string long_name =
        format("rank {} of group \"world\" (world rank {}, ", rank, rank + first_world_rank);
    const std::string short_name = format("rank {} (", rank);
    for (size_t at = text.find(long_name); at != std::string::npos; at = text.find(long_name)) {
      text.replace(at, long_name.size(), short_name);
    }
  }
  return text;
}

}  // namespace cadre::testing
