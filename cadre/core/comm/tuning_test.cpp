// Tests that all ranks of a group, and of the groups that are split off it, have the sizes of rank
// 0's tuning file, and that an error in that file is reported by all ranks.
#include "cadre/core/comm/tuning.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/net/tuning_file.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/comm/connect.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/core/on_host.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::RankContext;
using testing::require;

constexpr Duration kTuningBudget = std::chrono::seconds(20);
constexpr uint64_t kFirstSize = 1000;

// The shape of a group, and the engine that it has.
struct Shape {
  std::string engine;
  TransportChoice transport;
  std::vector<int> ranks_per_host;
};
const std::array kShapes{Shape{"net", TransportChoice::kTcp, {4}},
                         Shape{"net", TransportChoice::kAuto, {1, 1, 1}},
                         Shape{"hierarchical", TransportChoice::kAuto, {2, 2}}};

class Tuning : public ::testing::Test {
 protected:
  // Writes a file in which all sizes that divide small from large are `size`. Returns its path.
  std::string file_with(uint64_t size, std::optional<TuningOrigin> measured = {}) {
    const std::string path = folder_.file(format("{}.toml", size));
    const TuningFile file{.table = {.all_reduce_ring_bytes = size,
                                    .broadcast_chain_bytes = size,
                                    .all_gather_ring_bytes = size,
                                    .gather_linear_bytes = size},
                          .measured = std::move(measured)};
    std::ofstream(path) << to_text(file);
    return path;
  }
  std::string file_with_text(const std::string& name, const std::string& text) {
    std::ofstream(folder_.file(name)) << text;
    return folder_.file(name);
  }

  static testing::RanksResult run(const Shape& shape, const std::vector<std::string>& file_of_rank,
                                  const std::function<void(RankContext&, Communicator&)>& body,
                                  const std::shared_ptr<LogSink>& log = nullptr) {
    const std::vector<int> host_of_rank = testing::hosts_of_ranks(shape.ranks_per_host);
    return testing::run_ranks_as_threads(
        static_cast<int>(host_of_rank.size()), [&](RankContext& on_machine) {
          const auto at = static_cast<size_t>(on_machine.rank.value);
          testing::run_on_host(on_machine, host_of_rank[at], [&](RankContext& context) {
            const auto world = testing::connect_ranks(context,
                                                      {.timeout = kTuningBudget,
                                                       .transport = shape.transport,
                                                       .tuning_file = file_of_rank[at],
                                                       .log = log},
                                                      kTuningBudget);
            require(world->backend_name() == shape.engine,
                    format("the engine is {}", world->backend_name()));
            body(context, *world);
            world->close(context.system.deadline_in(kTuningBudget));
          });
        });
  }

  static const std::string& algorithms_of(const Communicator& group) {
    return CommunicatorParts::impl_of(group).engines.host_capabilities().algorithms;
  }
  static void require_size(const Communicator& group, uint64_t size) {
    for (const char* const operation :
         {"all_reduce recursive doubling, ring", "broadcast tree, chain", "all_gather Bruck, ring",
          "gather tree, linear"}) {
      const std::string wanted = format("{} from {} B;", operation, size);
      require(algorithms_of(group).find(wanted) != std::string::npos,
              format("{} in \"{}\" of group {}", wanted, algorithms_of(group), group.name()));
    }
  }

  const testing::TemporaryFolder folder_;
};

TEST_F(Tuning, AllRanksAndSplitGroupsUseTheFileOfRank0) {
  for (const Shape& shape : kShapes) {
    std::vector<std::string> files;
    for (size_t rank = 0; rank < 4; ++rank) files.push_back(file_with(kFirstSize + rank));
    const auto result = run(shape, files, [](RankContext& context, Communicator& world) {
      const Deadline soon = context.system.deadline_in(kTuningBudget);
      require_size(world, kFirstSize);
      // The halves have the ranks 0 and 2, and 1 and 3: rank 1 is the first rank of its group.
      const auto half = split(world, {.color = world.rank() % 2}, soon);
      if (half->world_size() > 1) require_size(*half, kFirstSize);
      const std::vector<Rank> reversed = {2, 1, 0};
      const auto listed = new_group(world, reversed, soon);
      if (listed != nullptr) {
        require_size(*listed, kFirstSize);
        const auto child = split(*listed, {.color = 0}, soon);
        require_size(*child, kFirstSize);
      }
      // An operation fails if its ranks choose different algorithms.
      std::vector<float> values(kFirstSize / 4, 1.0F);
      for (Communicator* const group : {&world, half.get(), listed.get()}) {
        if (group == nullptr) continue;
        const Bytes bytes = std::as_writable_bytes(std::span(values));
        group->all_reduce(bytes, bytes, DType::kFloat32, ReduceOp::kMax, {.deadline = soon});
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST_F(Tuning, OnlyRank0NeedsTheFile) {
  const Shape& shape = kShapes.back();
  const std::string broken = file_with_text("broken", "version = 9\n");
  const std::string absent = folder_.file("absent");
  const auto result =
      run(shape, {file_with(kFirstSize), absent, broken, ""},
          [](RankContext&, Communicator& world) { require_size(world, kFirstSize); });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST_F(Tuning, FilesOfOtherRanksAreNotUsed) {
  const std::string other = file_with(kFirstSize);
  const auto result =
      run(kShapes.front(), {"", other, other, other}, [](RankContext&, Communicator& world) {
        require(algorithms_of(world) == to_string(CrossoverTable{}), algorithms_of(world));
      });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST_F(Tuning, AllRanksReportABrokenFileOfRank0) {
  const std::string zero = "version = 1\nall_reduce_ring_bytes = 0\n";
  for (const Shape& shape : kShapes) {
    for (const auto& [path, code, sentence] :
         {std::tuple{file_with_text("zero", zero), "kInvalidArgument",
                     "zero\": line 2: all_reduce_ring_bytes is 0, expected a number of bytes"},
          {folder_.file("absent"), "kUnavailable", "absent\": "},
          {folder_.file(""), "kUnavailable", "Is a directory"}}) {
      const auto result = run(shape, {path, "", "", ""}, [](RankContext&, Communicator&) {});
      for (const testing::RankOutcome& rank : result.ranks) {
        EXPECT_THAT(rank.failure,
                    AllOf(HasSubstr(code), HasSubstr(sentence), HasSubstr("cadre tune")));
      }
    }
  }
}

TEST_F(Tuning, AGroupThatIsConnectedAgainKeepsTheSizes) {
  const Shape& shape = kShapes.front();
  const auto result = run(
      shape, {file_with(kFirstSize), "", "", ""}, [](RankContext& context, Communicator& world) {
        // Rank 3 becomes rank 0 of the next group, as after a loss.
        Membership next = world.membership();
        next.rank = 3 - world.rank();
        next.round += 1;
        CommunicatorOptions options = world.options();
        options.tuning_file.clear();
        const Deadline soon = context.system.deadline_in(kTuningBudget);
        const auto again = Communicator::connect(context.system, next, options, soon);
        require_size(*again, kFirstSize);
        again->close(soon);
      });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// connect_from_environment() makes a group of one here, which checks the file all the same.
TEST_F(Tuning, TheVariableNamesTheFileUnlessTheOptionsDo) {
  const auto system = os::make_native_system();
  const auto tuning_of = [&](const CommunicatorOptions& options) {
    return connect_from_environment(*system, options, system->deadline_in(kTuningBudget))
        ->options()
        .tuning;
  };
  const std::string of_variable = file_with(kFirstSize);
  const std::string of_options = file_with(kFirstSize + 1);
  ::setenv("CADRE_TUNING_FILE", of_variable.c_str(), 1);
  EXPECT_THAT(tuning_of({}), HasSubstr("all_reduce_ring_bytes = 1000\n"));
  EXPECT_THAT(tuning_of({.tuning_file = of_options}), HasSubstr("all_reduce_ring_bytes = 1001\n"));
  ::setenv("CADRE_TUNING_FILE", folder_.file("absent").c_str(), 1);
  EXPECT_THAT(testing::failure_of([&] { tuning_of({}); }), HasSubstr("absent"));
  ::setenv("CADRE_TUNING_FILE", "", 1);
  EXPECT_EQ(tuning_of({}), "");
  ::unsetenv("CADRE_TUNING_FILE");
}

TEST_F(Tuning, Rank0WarnsOnceIfTheFileWasMeasuredElsewhere) {
  const std::string file =
      file_with(kFirstSize, TuningOrigin{"hierarchical", "2x2", "2026-11-28", "0.1.0"});
  for (const Shape& shape : kShapes) {
    const auto log = std::make_shared<testing::LogLines>();
    const auto result = run(
        shape, {file, file, file, file},
        [](RankContext& context, Communicator& world) {
          const Deadline soon = context.system.deadline_in(kTuningBudget);
          split(world, {.color = 0}, soon)->close(soon);
        },
        log);
    EXPECT_TRUE(result.ok()) << result.failures();
    const size_t num_warnings = shape.engine == "hierarchical" ? 0 : 1;
    EXPECT_EQ(log->get().size(), num_warnings) << ::testing::PrintToString(log->get());
    for (const std::string& line : log->get()) {
      EXPECT_THAT(line, HasSubstr("comm group=world the tuning file was measured with engine "
                                  "hierarchical on 2x2"));
    }
  }
}

TEST_F(Tuning, TheWarningNamesBothGroups) {
  const std::string text = to_text(
      {.table = {}, .measured = TuningOrigin{"hierarchical", "2x2", "2026-11-28", "0.1.0"}});
  const std::vector<int> two_hosts = {0, 0, 1, 1};
  EXPECT_EQ(tuning_mismatch(text, "hierarchical", two_hosts), "");
  EXPECT_EQ(tuning_mismatch("", "net", two_hosts), "");
  EXPECT_EQ(tuning_mismatch(to_text({}), "net", two_hosts), "");
  EXPECT_THAT(tuning_mismatch(text, "hierarchical", std::vector{0, 0, 1}),
              AllOf(HasSubstr("measured with engine hierarchical on 2x2 (hosts x ranks) on "
                              "2026-11-28"),
                    HasSubstr("has engine hierarchical on 1x2,1x1:"), Not(HasSubstr("share"))));
  EXPECT_THAT(tuning_mismatch(text, "host", std::vector{0, 0, 0, 0}),
              AllOf(HasSubstr("has engine host on 1x4:"),
                    HasSubstr("ranks that share memory use none of them")));
}

}  // namespace
}  // namespace cadre
