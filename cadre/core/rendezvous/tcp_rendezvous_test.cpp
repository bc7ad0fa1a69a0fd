// Tests the rendezvous of ranks that are threads, over sockets of this host.
#include "cadre/core/rendezvous/tcp_rendezvous.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/rendezvous/environment_rendezvous.h"
#include "cadre/core/store/tcp/tcp_store_server.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class RendezvousTest : public ::testing::Test {
 protected:
  // Returns an address that no other test and no other run uses.
  os::Address fresh_address() {
    static std::atomic<int> count = 0;
    return {os::Address::Kind::kUnix,
            format("cadre-rendezvous-{}-{}", system_->host().pid, count.fetch_add(1)), 0};
  }

  std::vector<Result<Membership>> join_all(const std::vector<TcpRendezvousOptions>& options,
                                           Duration budget) {
    std::vector<std::optional<Result<Membership>>> joined(options.size());
    std::vector<std::unique_ptr<os::Thread>> threads;
    for (size_t i = 0; i < options.size(); ++i) {
      threads.push_back(system_->spawn("rank", [&, i] {
        joined[i] = TcpRendezvous(*system_, options[i]).join(system_->deadline_in(budget));
      }));
    }
    for (auto& thread : threads) thread->join();
    std::vector<Result<Membership>> results;
    for (auto& result : joined) results.push_back(std::move(*result));
    return results;
  }

  std::unique_ptr<os::System> system_ = os::make_native_system();
};

TEST_F(RendezvousTest, Rank0HostsTheStoreAndAllMeet) {
  const os::Address address = fresh_address();
  std::vector<TcpRendezvousOptions> options;
  for (int rank = 0; rank < 4; ++rank) {
    options.push_back({.address = address, .rank = rank, .world_size = 4, .job_token = "t"});
  }
  const auto joined = join_all(options, seconds(20));
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_TRUE(joined[rank].ok()) << joined[rank].error().message();
    EXPECT_EQ(joined[rank]->rank, rank);
    EXPECT_EQ(joined[rank]->world_size, 4);
    EXPECT_EQ(joined[rank]->job_token, "t");
  }
  const Deadline soon = system_->deadline_in(seconds(10));
  EXPECT_TRUE(joined[3]->store->set("hello", "from 3", soon).ok());
  EXPECT_EQ(joined[1]->store->get("hello", soon).value(), "from 3");
}

TEST_F(RendezvousTest, TheHostedStoreEndsWithRank0sMembership) {
  const os::Address address = fresh_address();
  auto joined = join_all({{.address = address, .rank = 0, .world_size = 2},
                          {.address = address, .rank = 1, .world_size = 2}},
                         seconds(20));
  ASSERT_TRUE(joined[0].ok() && joined[1].ok());
  joined[0]->store.reset();
  const auto gone = joined[1]->store->get("x", system_->deadline_in(seconds(20)));
  ASSERT_FALSE(gone.ok());
  EXPECT_EQ(gone.error().code(), ErrorCode::kPeerLost) << gone.error().message();
}

TEST_F(RendezvousTest, AWorldOfOneNeedsNoStore) {
  const auto joined =
      TcpRendezvous(*system_, {.rank = 0, .world_size = 1}).join(system_->deadline_in(seconds(5)));
  ASSERT_TRUE(joined.ok());
  EXPECT_EQ(joined->store, nullptr);
}

TEST_F(RendezvousTest, ARankThatNeverComesIsNamed) {
  // The test starts the store itself, because a store hosted by rank 0 would end when rank 0 gives
  // up.
  auto server = TcpStoreServer::start(*system_, {}).value_or_throw();
  const os::Address address = server->address();
  const auto joined = join_all({{.address = address, .rank = 0, .world_size = 3},
                                {.address = address, .rank = 1, .world_size = 3}},
                               seconds(2));
  for (const auto& result : joined) {
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.error().code(), ErrorCode::kTimeout) << result.error().message();
  }
  EXPECT_NE(joined[0].error().message().find("but rank 2 did not come"), std::string::npos)
      << joined[0].error().message();
}

TEST_F(RendezvousTest, Rank0TellsWhyItDoesNotHostTheStoreWhenSomethingElseListens) {
  const auto busy = system_->listen({os::Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
  const auto joined = join_all({{.address = busy->address(),
                                 .rank = 0,
                                 .world_size = 2,
                                 .greeting_timeout = milliseconds(100)}},
                               seconds(1));
  ASSERT_FALSE(joined[0].ok());
  EXPECT_EQ(joined[0].error().code(), ErrorCode::kTimeout);
  const std::string& message = joined[0].error().message();
  EXPECT_NE(message.find("if it is no Cadre store"), std::string::npos) << message;
  const std::string begin = format(
      "rank 0 of 2: port {} of rank 0 is in use by another program (store server: listen on "
      "tcp:127.0.0.1:",
      busy->address().port);
  EXPECT_EQ(message.substr(0, begin.size()), begin);
  EXPECT_NE(message.find("Address already in use"), std::string::npos) << message;
}

TEST_F(RendezvousTest, Port0IsForAWorldOfOneAlone) {
  const os::Address address = parse_tcp_url("tcp://127.0.0.1:0").value_or_throw();
  for (const int rank : {0, 1}) {
    const auto refused =
        TcpRendezvous(*system_, {.address = address, .rank = rank, .world_size = 2})
            .join(system_->deadline_in(seconds(20)));
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(refused.error().message().find("tcp://127.0.0.1:0: port 0 stands for any free port"),
              std::string::npos)
        << refused.error().message();
  }
  EXPECT_TRUE(
      TcpRendezvous(*system_, {.address = address}).join(system_->deadline_in(seconds(20))).ok());
}

TEST_F(RendezvousTest, WorldSizesThatDifferAreNamed) {
  const os::Address address = fresh_address();
  const auto joined = join_all({{.address = address, .rank = 0, .world_size = 2},
                                {.address = address, .rank = 1, .world_size = 2},
                                {.address = address, .rank = 2, .world_size = 3}},
                               seconds(5));
  EXPECT_TRUE(joined[0].ok() && joined[1].ok());
  ASSERT_FALSE(joined[2].ok());
  EXPECT_EQ(joined[2].error().code(), ErrorCode::kInvalidArgument) << joined[2].error().message();
  EXPECT_NE(joined[2].error().message().find("a world of 2"), std::string::npos);
  EXPECT_NE(joined[2].error().message().find("a world of 3"), std::string::npos);
}

TEST_F(RendezvousTest, WorldSizesThatDifferAreNamedToBothAlsoWhenTheHostOfTheStoreFails) {
  // The rank with the smaller world notices the difference first. The other one waits for a rank
  // that does not exist.
  for (const auto& [world_of_0, world_of_1] : {std::pair(2, 3), std::pair(3, 2)}) {
    const os::Address address = fresh_address();
    const auto joined = join_all(
        {{.address = address, .rank = 0, .world_size = world_of_0, .warn_after = milliseconds(300)},
         {.address = address, .rank = 1, .world_size = world_of_1}},
        seconds(20));
    for (const auto& result : joined) {
      ASSERT_FALSE(result.ok());
      EXPECT_EQ(result.error().code(), ErrorCode::kInvalidArgument) << result.error().message();
      const std::string& message = result.error().message();
      for (const char* part :
           {"a world of 2", "a world of 3", "give all ranks the same WORLD_SIZE"}) {
        EXPECT_NE(message.find(part), std::string::npos) << message;
      }
    }
  }
}

TEST_F(RendezvousTest, ARankOutsideTheWorldIsRefused) {
  const auto joined =
      TcpRendezvous(*system_, {.rank = 2, .world_size = 2}).join(system_->deadline_in(seconds(5)));
  ASSERT_FALSE(joined.ok());
  EXPECT_EQ(joined.error().code(), ErrorCode::kInvalidArgument);
}

TEST_F(RendezvousTest, RanksOfALauncherAreClientsOnlyAndRoundsFollowTheAttempts) {
  auto server = TcpStoreServer::start(*system_, {.token = "job"}).value_or_throw();
  JobEnvironment environment{.is_launched = true,
                             .world_size = 2,
                             .master_addr = "127.0.0.1",
                             .master_port = server->address().port,
                             .attempt = 1,
                             .uses_agent_store = true,
                             .job_token = "job"};
  std::vector<std::optional<Result<Membership>>> joined(2);
  std::vector<std::unique_ptr<os::Thread>> threads;
  for (int rank = 0; rank < 2; ++rank) {
    environment.rank = rank;
    threads.push_back(system_->spawn("rank", [&, rank, environment] {
      joined[rank] =
          EnvironmentRendezvous(*system_, environment).join(system_->deadline_in(seconds(20)));
    }));
  }
  for (auto& thread : threads) thread->join();
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(joined[rank]->ok()) << joined[rank]->error().message();
    EXPECT_EQ((*joined[rank])->rank, rank);
    EXPECT_GT((*joined[rank])->round, 0u);
  }
  environment.attempt = 2;
  environment.world_size = 1;
  environment.rank = 0;
  const auto later =
      EnvironmentRendezvous(*system_, environment).join(system_->deadline_in(seconds(5)));
  ASSERT_TRUE(later.ok());
  EXPECT_GT(later->round, (*joined[0])->round);
}

TEST_F(RendezvousTest, AnotherJobsTokenIsRefused) {
  auto server = TcpStoreServer::start(*system_, {.token = "job"}).value_or_throw();
  const auto joined = join_all(
      {{.address = server->address(), .rank = 1, .world_size = 2, .job_token = "another job"}},
      seconds(20));
  ASSERT_FALSE(joined[0].ok());
  EXPECT_EQ(joined[0].error().code(), ErrorCode::kInvalidArgument) << joined[0].error().message();
  EXPECT_NE(joined[0].error().message().find("CADRE_JOB_TOKEN"), std::string::npos);
}

TEST_F(RendezvousTest, UrlsAreAddresses) {
  const auto address = parse_tcp_url("tcp://node0:29500");
  ASSERT_TRUE(address.ok());
  EXPECT_EQ(*address, (os::Address{os::Address::Kind::kTcp, "node0", 29500}));
  for (const char* wrong : {"node0:29500", "file:///tmp/x", "tcp://node0", "tcp://:1"}) {
    const auto refused = parse_tcp_url(wrong);
    ASSERT_FALSE(refused.ok()) << wrong;
    EXPECT_EQ(refused.error().code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(refused.error().message().find(wrong), std::string::npos);
  }
}

}  // namespace
}  // namespace cadre
