#include "cadre/core/rendezvous/job_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/os/files/file.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using ::testing::ElementsAre;

using Variables = std::map<std::string, std::string, std::less<>>;

Result<JobEnvironment> parse(const Variables& variables, const JobPlace& place = {}) {
  const auto look_up = [&](std::string_view name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
  return parse_job_environment(look_up, look_up("CADRE_JOB_TOKEN").value_or(""), place);
}

Variables launched() {
  return {{"RANK", "1"},
          {"WORLD_SIZE", "4"},
          {"LOCAL_RANK", "1"},
          {"LOCAL_WORLD_SIZE", "2"},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", "29500"}};
}

TEST(JobEnvironment, WithoutALauncherIsAWorldOfOne) {
  const auto environment = parse({{"MASTER_PORT", "no port"}, {"LOCAL_RANK", "7"}});
  ASSERT_TRUE(environment.ok());
  EXPECT_FALSE(environment->is_launched);
  EXPECT_EQ(environment->rank, 0);
  EXPECT_EQ(environment->world_size, 1);
}

TEST(JobEnvironment, ReadsWhatALauncherSays) {
  Variables variables = launched();
  variables["TORCHELASTIC_RESTART_COUNT"] = "2";
  variables["TORCHELASTIC_MAX_RESTARTS"] = "3";
  variables["TORCHELASTIC_RUN_ID"] = "job-7";
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  variables["CADRE_JOB_TOKEN"] = "secret";
  const auto environment = parse(variables);
  ASSERT_TRUE(environment.ok()) << environment.error().message();
  EXPECT_TRUE(environment->is_launched);
  EXPECT_EQ(environment->rank, 1);
  EXPECT_EQ(environment->world_size, 4);
  EXPECT_EQ(environment->local_rank, std::optional(Rank(1)));
  EXPECT_EQ(environment->local_world_size, std::optional(2));
  EXPECT_EQ(environment->master_addr, "127.0.0.1");
  EXPECT_EQ(environment->master_port, 29500);
  EXPECT_EQ(environment->restart_count, 2);
  EXPECT_EQ(environment->attempt, 2);
  EXPECT_EQ(environment->max_restarts, 3);
  EXPECT_EQ(environment->run_id, "job-7");
  EXPECT_TRUE(environment->uses_agent_store);
  EXPECT_EQ(environment->job_token, "secret");
  EXPECT_EQ(environment->store_protocol, StoreProtocol::kNative);
  variables["CADRE_ATTEMPT"] = "4";
  variables["CADRE_JOB_ID"] = "00ff";
  EXPECT_EQ(parse(variables)->attempt, 4);
  EXPECT_EQ(parse(variables)->job_id, "00ff");
}

struct Starter {
  Variables variables;  // the environment of process 2 of 3
  std::optional<int> local_world_size;
};

const std::vector<Starter> kStarters = {
    {{{"OMPI_COMM_WORLD_RANK", "2"},
      {"OMPI_COMM_WORLD_SIZE", "3"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
     2},
    {{{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}}, 2},
    {{{"SLURM_PROCID", "2"},
      {"SLURM_STEP_NUM_TASKS", "3"},
      {"SLURM_LOCALID", "1"},
      {"SLURM_NTASKS", "3"}},
     std::nullopt}};

TEST(JobEnvironment, ReadsWhatMpirunAndSrunSay) {
  for (const Starter& starter : kStarters) {
    Variables variables = starter.variables;
    variables["MASTER_ADDR"] = "node0";
    variables["MASTER_PORT"] = "29500";
    const auto environment = parse(variables);
    ASSERT_TRUE(environment.ok()) << environment.error().message();
    EXPECT_TRUE(environment->is_launched);
    EXPECT_EQ(environment->rank, 2);
    EXPECT_EQ(environment->world_size, 3);
    EXPECT_EQ(environment->local_rank, std::optional(Rank(1)));
    EXPECT_EQ(environment->local_world_size, starter.local_world_size);
    variables["RANK"] = "0";
    variables["WORLD_SIZE"] = "1";
    EXPECT_EQ(parse(variables)->world_size, 1) << "RANK and WORLD_SIZE take precedence";
  }
}

// mpirun and srun pass no address of a store. Without this error each process would train alone.
TEST(JobEnvironment, UnderMpirunWithoutAnAddressIsAnErrorWithBothRemedies) {
  for (const Starter& starter : kStarters) {
    const auto environment = parse(starter.variables);
    ASSERT_FALSE(environment.ok());
    const std::string message = environment.error().message();
    EXPECT_TRUE(message.starts_with("environment: MASTER_ADDR is not set, but ")) << message;
    EXPECT_NE(message.find("SIZE is 3: ") == std::string::npos,
              message.find("TASKS is 3: ") == std::string::npos);
    EXPECT_TRUE(message.ends_with("set RANK=0 WORLD_SIZE=1")) << message;
  }
}

TEST(JobEnvironment, OneProcessOfMpirunAndAnAllocationOfSlurmAreAWorldOfOne) {
  for (const Variables& variables :
       {Variables{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}},
        Variables{{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}},
        Variables{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "0"}}}) {
    const auto environment = parse(variables);
    ASSERT_TRUE(environment.ok()) << environment.error().message();
    EXPECT_FALSE(environment->is_launched);
    EXPECT_EQ(environment->world_size, 1);
  }
}

TEST(JobEnvironment, UnderTorchrunSpeaksC10d) {
  Variables variables = launched();
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_EQ(parse(variables)->store_protocol, StoreProtocol::kC10d);
  variables["CADRE_STORE_PROTOCOL"] = "native";
  EXPECT_EQ(parse(variables)->store_protocol, StoreProtocol::kNative);
}

TEST(JobEnvironment, NamesTheNcclLibraryLaunchedOrNot) {
  EXPECT_EQ(parse({})->nccl_library, "");
  EXPECT_EQ(parse({{"CADRE_NCCL_LIBRARY", "/a/libnccl.so"}})->nccl_library, "/a/libnccl.so");
  Variables variables = launched();
  variables["CADRE_NCCL_LIBRARY"] = "/b/libnccl.so";
  EXPECT_EQ(parse(variables)->nccl_library, "/b/libnccl.so");
}

TEST(JobEnvironment, LogsAtTheLevelThatIsNamedLaunchedOrNot) {
  const std::map<std::string, LogLevel> levels = {
      {"debug", LogLevel::kDebug}, {"info", LogLevel::kInfo}, {"warning", LogLevel::kWarning},
      {"error", LogLevel::kError}, {"off", LogLevel::kOff},   {"", LogLevel::kWarning}};
  for (const auto& [text, level] : levels) {
    EXPECT_EQ(parse({{"CADRE_LOG", text}})->log_level, level) << text;
    Variables variables = launched();
    variables["CADRE_LOG"] = text;
    EXPECT_EQ(parse(variables)->log_level, level) << text;
  }
  EXPECT_EQ(parse({})->log_level, LogLevel::kWarning);
  EXPECT_NE(parse({{"CADRE_LOG", "INFO"}}).error().message().find("CADRE_LOG is \"INFO\""),
            std::string::npos);
}

TEST(JobEnvironment, AWorldOfOneNeedsNoMaster) {
  const auto environment = parse({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  ASSERT_TRUE(environment.ok());
  EXPECT_TRUE(environment->is_launched);
}

// Each change makes the environment invalid. The message must name the variable and its value.
struct Wrong {
  const char* variable;
  const char* value;  // null: the variable is removed from the environment
};

class WrongEnvironment : public ::testing::TestWithParam<Wrong> {};

void PrintTo(const Wrong& wrong, std::ostream* out) {
  *out << wrong.variable;
}

TEST_P(WrongEnvironment, IsRefusedByName) {
  const auto [variable, value] = GetParam();
  Variables variables = launched();
  if (value) {
    variables[variable] = value;
  } else {
    variables.erase(variable);
  }
  const auto environment = parse(variables);
  ASSERT_FALSE(environment.ok());
  EXPECT_EQ(environment.error().code(), ErrorCode::kInvalidArgument);
  const std::string& message = environment.error().message();
  EXPECT_NE(message.find(variable), std::string::npos) << message;
  EXPECT_NE(message.find(value ? value : ""), std::string::npos) << message;
}

INSTANTIATE_TEST_SUITE_P(
    All, WrongEnvironment,
    ::testing::Values(Wrong{"RANK", nullptr}, Wrong{"RANK", ""}, Wrong{"RANK", "4"},
                      Wrong{"RANK", "-1"}, Wrong{"RANK", "1x"}, Wrong{"RANK", "99999999999"},
                      Wrong{"WORLD_SIZE", nullptr}, Wrong{"WORLD_SIZE", "0"},
                      Wrong{"WORLD_SIZE", "two"}, Wrong{"LOCAL_RANK", "2"},
                      Wrong{"LOCAL_WORLD_SIZE", "5"}, Wrong{"MASTER_ADDR", nullptr},
                      Wrong{"MASTER_PORT", nullptr}, Wrong{"MASTER_PORT", "0"},
                      Wrong{"MASTER_PORT", "65536"}, Wrong{"TORCHELASTIC_RESTART_COUNT", "-3"},
                      Wrong{"CADRE_ATTEMPT", "one"}, Wrong{"TORCHELASTIC_USE_AGENT_STORE", "maybe"},
                      Wrong{"CADRE_STORE_PROTOCOL", "etcd"}, Wrong{"CADRE_LOG", "loud"}));

TEST(JobEnvironment, AnEmptyVariableIsSaidToBeEmpty) {
  const auto message = [](const Variables& variables) {
    return parse(variables).error().message();
  };
  EXPECT_EQ(message({{"WORLD_SIZE", "2"}, {"RANK", ""}}),
            "environment: WORLD_SIZE is set but RANK is empty; give both a value, or start the "
            "program with cadre run");
  EXPECT_EQ(message({{"RANK", "0"}}),
            "environment: RANK is set but WORLD_SIZE is not set; give both a value, or start the "
            "program with cadre run");
  Variables variables = launched();
  variables["MASTER_PORT"] = "";
  EXPECT_NE(message(variables).find("MASTER_PORT is empty, but WORLD_SIZE is 4"),
            std::string::npos);
}

TEST(JobEnvironment, WhatTheProgramSaysTakesThePlaceOfVariables) {
  Variables variables = launched();
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  auto environment = parse(variables, {.rank = 6, .world_size = 8});
  ASSERT_TRUE(environment.ok()) << environment.error().message();
  EXPECT_EQ(environment->rank, 6);
  EXPECT_EQ(environment->world_size, 8);
  EXPECT_EQ(environment->local_rank, std::nullopt) << "LOCAL_RANK belongs to another rank";
  EXPECT_EQ(environment->master_port, 29500);
  EXPECT_TRUE(environment->uses_agent_store);

  environment = parse(variables, {.init_method = "tcp://10.0.0.7:4000"});
  ASSERT_TRUE(environment.ok()) << environment.error().message();
  EXPECT_EQ(environment->rank, 1);
  EXPECT_EQ(environment->master_addr, "10.0.0.7");
  EXPECT_EQ(environment->master_port, 4000);
  EXPECT_FALSE(environment->uses_agent_store) << "rank 0 hosts the store";

  environment = parse({}, {.rank = 1, .world_size = 2, .init_method = "file:///shared/job"});
  ASSERT_TRUE(environment.ok()) << environment.error().message();
  EXPECT_TRUE(environment->is_launched);
  EXPECT_EQ(environment->rank, 1);
  EXPECT_EQ(environment->store_file, "/shared/job");

  // The address comes from variables and the rank from arguments, as in PyTorch's tutorials.
  environment = parse({{"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "29500"}},
                      {.rank = 0, .world_size = 2, .init_method = "env://"});
  ASSERT_TRUE(environment.ok()) << environment.error().message();
  EXPECT_EQ(environment->master_addr, "localhost");
}

TEST(JobEnvironment, NamesWhatIsWrongInWhatTheProgramSays) {
  const auto message = [](const Variables& variables, const JobPlace& place) {
    const auto environment = parse(variables, place);
    return environment.ok() ? "no error" : environment.error().message();
  };
  EXPECT_EQ(message(launched(), {.rank = 2}),
            "the program gives the rank 2 without the world size; give both, or neither and set "
            "RANK and WORLD_SIZE");
  EXPECT_EQ(message({}, {.rank = 2, .world_size = 2}),
            "rank 2 is not in a world of 2; ranks go from 0 to the size less one");
  EXPECT_EQ(message({}, {.init_method = "tcp://10.0.0.7:4000"}),
            "the program gives the address tcp://10.0.0.7:4000, but no rank and no world size; "
            "give both, or set RANK and WORLD_SIZE");
  EXPECT_EQ(message(launched(), {.init_method = "10.0.0.7:4000"}),
            "rendezvous \"10.0.0.7:4000\" is not of the form tcp://HOST:PORT");
  EXPECT_EQ(message(launched(), {.init_method = "file://job"}),
            "rendezvous \"file://job\" is not of the form file:///ABSOLUTE/PATH");
}

// A process that this process starts must not inherit the token of the launcher.
TEST(JobEnvironment, ProcessesThatThisOneStartsDoNotInheritTheToken) {
  Variables variables = launched();
  variables["CADRE_JOB_TOKEN"] = "secret";
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  for (int call = 0; call < 2; ++call) {  // a later call finds the token, too
    const auto environment = read_job_environment();
    ASSERT_TRUE(environment.ok()) << environment.error().message();
    EXPECT_EQ(environment->job_token, "secret");
    EXPECT_EQ(std::system("test -z \"$CADRE_JOB_TOKEN\""), 0);
  }
  for (const auto& variable : variables) ::unsetenv(variable.first.c_str());
}

// The launcher's file names ranks of one membership. The next membership numbers them differently.
TEST(JobEnvironment, OnlyRanksOfThePresentMembershipAreLost) {
  EXPECT_EQ(lost_ranks_from_launcher(4), nullptr) << "no launcher";
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("rank0.recovery");
  ::setenv(kRecoveryVariable, path.c_str(), 1);
  const auto write = [&](std::string_view suffix, const std::string& text) {
    os::replace_file(path + std::string(suffix), std::as_bytes(std::span(text))).value_or_throw();
  };
  const auto write_lost = [&](const LostRanksFile& file) {
    write(kLostRanksFileSuffix, encode_lost_ranks_file(file));
  };
  const auto lost = lost_ranks_from_launcher(4);
  EXPECT_THAT(lost(), ElementsAre()) << "no file";
  write_lost({.num_memberships = 0, .ranks = {{1, 2}, {0, 2}, {1, 3}}});
  EXPECT_THAT(lost(), ElementsAre(1, 2, 3)) << "ranges that overlap";
  write_lost({.num_memberships = 0, .ranks = {{0, 0}, {2, std::numeric_limits<int>::max()}}});
  EXPECT_THAT(lost(), ElementsAre(0, 2, 3));
  write(kLostRanksFileSuffix, "anything else");
  EXPECT_THAT(lost(), ElementsAre());

  MembershipFile membership{.number = 1, .variables = {}};
  for (const auto name : kMembershipVariables) membership.variables.emplace_back(name, "1");
  write(kMembershipFileSuffix, encode_membership_file(membership));
  const auto lost_next = lost_ranks_from_launcher(4);
  write_lost({.num_memberships = 0, .ranks = {{1, 1}}});
  EXPECT_THAT(lost(), ElementsAre(1));
  EXPECT_THAT(lost_next(), ElementsAre());
  write_lost({.num_memberships = 1, .ranks = {{3, 3}}});
  EXPECT_THAT(lost(), ElementsAre());
  EXPECT_THAT(lost_next(), ElementsAre(3));
  ::unsetenv(kRecoveryVariable);
}

}  // namespace
}  // namespace cadre
