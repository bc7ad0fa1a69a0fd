// Tests a program whose rank 0 closes all descriptors of Cadre, as a library that turns a process
// into a daemon does, and then opens a file, which gets the numbers of the closed descriptors.
// Nothing may be written to the file, the errors on both ranks must name rank 0, and all objects
// must be destructible.
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/rendezvous/tcp_rendezvous.h"
#include "cadre/testing/core/process_ranks.h"
#include "cadre/testing/core/program_file.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using testing::RankContext;
using testing::require;

// Calls barriers until one fails, and returns its error.
std::optional<Error> first_failure(RankContext& context, Communicator& group) {
  const Deadline end = context.system.deadline_in(seconds(20));
  while (!end.has_passed(context.system.now())) {
    try {
      group.barrier({.deadline = end});
      context.system.make_waiter()->park(context.system.deadline_in(std::chrono::milliseconds(5)));
    } catch (const Error& error) {
      return error;
    }
  }
  return std::nullopt;
}

void check_failure(RankContext& context, const std::optional<Error>& error) {
  require(error.has_value(), "the group fails");
  require(error->details().culprit == Rank(0), error->message());
  if (context.rank == 0) {
    require(error->code() == ErrorCode::kInvalidArgument, error->message());
    require(error->message().find("let the program close only descriptors that it has opened "
                                  "itself, and start the job anew") != std::string::npos,
            error->message());
  } else {
    require(error->code() == ErrorCode::kPeerLost, error->message());
  }
}

class ClosedDescriptors : public ::testing::TestWithParam<TransportChoice> {};

INSTANTIATE_TEST_SUITE_P(BothTransports, ClosedDescriptors,
                         ::testing::Values(TransportChoice::kAuto, TransportChoice::kTcp));

TEST_P(ClosedDescriptors, BothRanksNameTheOneThatClosedThemAndItsFilesAreKept) {
  const testing::TemporaryFolder folder;
  const auto result = testing::run_ranks_as_processes(2, [&](RankContext& context) {
    const testing::ProgramFile file(folder.file(format("file of rank {}", context.rank)));
    const std::set<int> before = testing::open_descriptors();
    std::set<int> stolen;
    {
      const Deadline soon = context.system.deadline_in(seconds(20));
      const TcpRendezvousOptions options{.address = context.rendezvous_address,
                                         .rank = context.rank,
                                         .world_size = 2,
                                         .job_token = "token"};
      TcpRendezvous rendezvous(context.system, options);
      const Membership membership = rendezvous.join(soon).value_or_throw();
      CommunicatorOptions group_options;
      group_options.transport = GetParam();
      const auto group = Communicator::connect(context.system, membership, group_options, soon);
      if (context.rank == 0) {
        // The other rank may still be in this barrier when its connection is closed.
        group->barrier({.deadline = soon});
        stolen = testing::opened_since(before);
        require(stolen.size() > 3, "a group has more than 3 descriptors");
        for (const int number : stolen) file.take_number(number);
      }
      check_failure(context, first_failure(context, *group));
    }
    require(file.is_intact(), "nothing was written to the program's file");
    for (const int number : stolen) {
      require(testing::ProgramFile::is_open(number), "the program's descriptor is still open");
    }
  });
  EXPECT_EQ(result.failures(), "");
}

}  // namespace
}  // namespace cadre
