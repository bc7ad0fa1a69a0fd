// Tests the command line of `cadre run`: which options and variables of torchrun are accepted or
// refused.
#include "cadre/launch/cli/run_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "cadre/launch/cli/torchrun_flags.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

using RunWords = std::vector<std::string>;

Result<RunOptions> parse(RunWords words, const os::Environment& environment = {}) {
  words.push_back("./train");
  return parse_run_options(words, environment);
}

std::string refusal_of(RunWords words, const os::Environment& environment = {}) {
  const auto options = parse(std::move(words), environment);
  return options.ok() ? "accepted" : options.error().message();
}

os::Environment variable(const std::string& name, const std::string& value) {
  os::Environment environment;
  environment.set(name, value);
  return environment;
}

// Returns a valid value for a placeholder in the help.
std::string sample(const std::string& placeholder, const std::string& option) {
  static const std::map<std::string, std::string> kSamples{
      {"PORT", "8000"},
      {"SECONDS", "1"},
      {"BACKEND", "c10d"},
      {"METHOD", "fork"},
      {"HOST", "localhost"},
      {"HOST:PORT", "localhost:0"},
      {"SETTINGS", "timeout=3"},
      {"NAMES", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"},
      {"STREAMS", "3"},
      {"RANKS", "0"},
      {"RANK", "0"},
      {"HANDLER", "console"},
      {"MODE", "core-complex"}};
  if (placeholder == "N") return option == "--nproc-per-node" || option == "--nnodes" ? "1" : "0";
  const auto found = kSamples.find(placeholder);
  return found == kSamples.end() ? "x" : found->second;
}

TEST(RunOptions, AcceptsBothSpellingsOfEveryOptionOfTheHelp) {
  const std::string help = run_help();
  const std::string accepted = help.substr(0, help.find("Options of torchrun that are refused"));
  const std::regex option("\n  (?:-[a-z], )?(--[a-z-]+)(?: ([A-Z:]+))?");
  int num_found = 0;
  for (std::sregex_iterator match(accepted.begin(), accepted.end(), option), end; match != end;
       ++match) {
    const std::string placeholder = (*match)[2];
    std::string name = (*match)[1];
    const std::string value = sample(placeholder, name);
    for (int spelling = 0; spelling < 2; ++spelling) {
      RunWords words{name};
      if (!placeholder.empty()) {
        words.push_back(value);
        EXPECT_EQ(refusal_of({name + "=" + value}), "accepted") << name;
      }
      EXPECT_EQ(refusal_of(words), "accepted") << name;
      std::replace(name.begin() + 2, name.end(), '-', '_');
    }
    ++num_found;
  }
  EXPECT_GE(num_found, 20);
}

TEST(RunOptions, LeavesTheProgramsOwnOptionsAlone) {
  const RunWords words{"--nproc-per-node", "2", "./train", "--nproc-per-node", "7", "--help", "--",
                       "--role",           "x"};
  const auto options = parse_run_options(words, {});
  ASSERT_TRUE(options.ok());
  EXPECT_EQ(options->num_workers.value, "2");
  EXPECT_FALSE(options->wants_help);
  EXPECT_EQ(options->role, "default");
  EXPECT_EQ(options->program, RunWords(words.begin() + 2, words.end()));
}

TEST(RunOptions, AWordOfTwoDashesBeginsTheProgram) {
  const auto options = parse_run_options(RunWords{"--role", "x", "--", "--odd", "1"}, {});
  ASSERT_TRUE(options.ok());
  EXPECT_EQ(options->program, (RunWords{"--odd", "1"}));
}

TEST(RunOptions, OfAnOptionGivenTwiceTheLastCounts) {
  const auto options =
      parse({"--role", "a", "--nproc_per_node=2", "--role=b", "--nproc-per-node", "3"});
  ASSERT_TRUE(options.ok());
  EXPECT_EQ(options->role, "b");
  EXPECT_EQ(options->num_workers.value, "3");
}

TEST(RunOptions, AnEmptyValueIsAValue) {
  const auto options = parse_run_options(RunWords{"--rdzv-id=", "echo", "hi"}, {});
  ASSERT_TRUE(options.ok());
  EXPECT_EQ(options->run_id, "");
  EXPECT_EQ(options->program, (RunWords{"echo", "hi"}));
}

TEST(RunOptions, AMissingValueIsASentence) {
  EXPECT_EQ(parse_run_options(RunWords{"--nproc-per-node"}, {}).error().message(),
            "--nproc-per-node needs a value: --nproc-per-node N");
  EXPECT_EQ(refusal_of({"--rdzv_id", "--role", "x"}), "--rdzv_id needs a value: --rdzv_id ID");
  EXPECT_EQ(refusal_of({"--standalone=1"}), "--standalone=1: --standalone takes no value");
}

TEST(RunOptions, AFolderForRecordsIsAFolder) {
  const cadre::testing::TemporaryFolder folder;
  std::ofstream(folder.file("plain")) << "";
  EXPECT_EQ(refusal_of({"--flight-records="}), "--flight-records needs a value");
  EXPECT_EQ(refusal_of({"--flight-records", folder.file("plain")}),
            "--flight-records " + folder.file("plain") +
                ": that is a file; expected a folder, which is created if it is missing");
  EXPECT_EQ(refusal_of({"--flight-records", folder.file("new/and/deep/")}), "accepted");
  EXPECT_EQ(refusal_of({"--flight-records", folder.path()}), "accepted");
}

TEST(RunOptions, OfALetterThatIsNoneNamesTheHelp) {
  EXPECT_EQ(refusal_of({"-x"}), "unknown option -x; cadre run --help lists all");
}

TEST(RunOptions, AcceptsWhatIsTrueOnOneHost) {
  const std::vector<RunWords> lines{
      {"--nnodes=1", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"},
      {"--nnodes=1:1", "--node_rank=0", "--master_addr", "localhost", "--master_port", "29500"},
      {"--standalone", "--nnodes=1", "--rdzv_backend=etcd", "--rdzv_endpoint=elsewhere:1"},
      {"--rdzv_conf", "timeout=900,is_host=1,store_type=tcp,rank=0,"},
      {"--rdzv_backend=etcd-v2", "--rdzv_endpoint=elsewhere:1", "--rdzv_conf=protocol=https"},
      {"--rdzv_backend=file", "--rdzv_endpoint=/a/folder:x", "--master_addr", "localhost"},
      {"--max_restarts=0", "--monitor_interval=0.1", "--start_method=spawn"},
      {"-t", "0", "-r0", "--tee=0", "--redirects=0", "--event_log_handler=null", "--log_dir="},
      {"--signals-to-handle=SIGINT,SIGTERM,SIGHUP,SIGQUIT,SIGUSR1", "--run_path"}};
  for (const RunWords& line : lines) EXPECT_EQ(refusal_of(line), "accepted") << line[0];
}

TEST(RunOptions, TakesHostAndPortOfAnEndpoint) {
  struct Case {
    std::string text;
    std::string host;
    int port;
  };
  for (const auto& [text, host, port] :
       {Case{"localhost:0", "localhost", 0}, Case{"node0:29400", "node0", 29400},
        Case{"node0", "node0", 0}, Case{"[::1]:29400", "::1", 29400}, Case{"::1", "::1", 0},
        Case{"[::1]", "::1", 0}}) {
    for (const char* option : {"--rdzv-endpoint", "--master-addr"}) {
      const auto options = parse({option, text});
      ASSERT_TRUE(options.ok()) << text;
      ASSERT_EQ(options->hosts.size(), 1U) << text;
      EXPECT_EQ(options->hosts[0].host, host);
      EXPECT_EQ(options->store_port, port) << text;
    }
  }
  // --rdzv-endpoint takes precedence over --master-port, as in torchrun.
  EXPECT_EQ(parse({"--rdzv-endpoint", "localhost:2", "--master-port", "1"})->store_port, 2);
  EXPECT_EQ(parse({"--rdzv-endpoint", "localhost:0", "--master-port", "1"})->store_port, 1);
  EXPECT_EQ(refusal_of({"--rdzv-endpoint", "localhost:http"}),
            "--rdzv-endpoint localhost:http: expected HOST or HOST:PORT, the port a number up to "
            "65535");
  EXPECT_THAT(refusal_of({"--rdzv-backend=etcd", "--rdzv-endpoint", "http://node0:2379"}),
              HasSubstr("expected HOST or HOST:PORT"));
}

TEST(RunOptions, RefusesWithTheReason) {
  EXPECT_THAT(refusal_of({"--nnodes", "2"}),
              StartsWith("a job on several hosts needs --master-addr HOST"));
  EXPECT_THAT(refusal_of({"--nnodes=2:1"}),
              StartsWith("--nnodes 2:1: expected a number of hosts, N or MIN:MAX"));
  EXPECT_THAT(refusal_of({"--node_rank=1"}), StartsWith("--node_rank 1: with one host"));
  EXPECT_THAT(refusal_of({"--rdzv-backend=zeus"}),
              HasSubstr("expected c10d, static, etcd or file"));
  EXPECT_THAT(refusal_of({"--rdzv-conf", "timeout=3,is_host=0"}), HasSubstr("\"is_host=0\""));
  EXPECT_THAT(refusal_of({"--signals-to-handle=SIGALRM"}), HasSubstr("is not among the signals"));
  EXPECT_THAT(refusal_of({"--tee", "4"}), StartsWith("--tee 4: expected 0 (no stream)"));
  EXPECT_THAT(refusal_of({"--event-log-handler", "mine"}), HasSubstr("expected null, console, or"));
  EXPECT_THAT(refusal_of({"--numa-binding", "core"}), HasSubstr("expected node, socket,"));
  EXPECT_THAT(refusal_of({"--logs-specs", "mine"}), StartsWith("--logs-specs mine: this launcher"));
}

TEST(RunOptions, TakesTheNumberOfRestarts) {
  EXPECT_EQ(parse({})->max_restarts, 0);
  EXPECT_EQ(parse({"--max_restarts=3"})->max_restarts, 3);
  EXPECT_EQ(parse({}, variable("PET_MAX_RESTARTS", "2"))->max_restarts, 2);
  for (const char* value : {"-1", "many", "1.5", "99999999999"}) {
    EXPECT_EQ(refusal_of({cadre::format("--max-restarts={}", value)}),
              cadre::format("--max-restarts {}: expected a number of restarts, from 0", value));
  }
}

TEST(RunOptions, EveryRefusedFlagIsInTheHelpWithItsReason) {
  const std::string help = run_help();
  for (const RefusedFlag& flag : refused_torchrun_flags()) {
    const std::string name(flag.option.name);
    const std::string value(flag.option.value);
    EXPECT_THAT(help, HasSubstr(name + (value.empty() ? "" : " ") + value + "\n"));
    RunWords words{name};
    if (!value.empty()) words.push_back("value");
    EXPECT_THAT(refusal_of(words), HasSubstr(std::string(flag.reason)));
  }
}

TEST(RunOptions, ReadsTorchrunsVariables) {
  const auto options = parse({}, variable("PET_NPROC_PER_NODE", "3"));
  ASSERT_TRUE(options.ok());
  EXPECT_EQ(options->num_workers.value, "3");
  EXPECT_EQ(parse({"--nproc-per-node=2"}, variable("PET_NPROC_PER_NODE", "3"))->num_workers.value,
            "2");
  EXPECT_EQ(parse({}, variable("PET_MASTER_PORT", "8000"))->store_port, 8000);
  EXPECT_EQ(parse({}, variable("PET_RDZV_ENDPOINT", "localhost:29400"))->store_port, 29400);
  EXPECT_TRUE(parse({}, variable("PET_NO_PYTHON", "1"))->no_python);
  EXPECT_FALSE(parse({}, variable("PET_NO_PYTHON", "0"))->no_python);
  EXPECT_EQ(refusal_of({}, variable("PET_NO_PYTHON", "yes")), "PET_NO_PYTHON=yes: expected 0 or 1");
  EXPECT_EQ(refusal_of({}, variable("PET_VIRTUAL_LOCAL_RANK", "0")), "accepted");
}

TEST(RunOptions, NamesTheVariableThatIsRefusedOrIgnored) {
  EXPECT_THAT(refusal_of({}, variable("PET_NNODES", "many")),
              StartsWith("PET_NNODES=many: expected a number of hosts"));
  EXPECT_THAT(refusal_of({}, variable("PET_TEE", "4")), StartsWith("PET_TEE=4: expected 0 (no"));
  // The flag takes precedence over the variable.
  EXPECT_TRUE(parse({"--tee=0"}, variable("PET_TEE", "3"))->logs.tees.is_empty());
  const auto options = parse({}, variable("PET_ODD", "3"));
  ASSERT_TRUE(options.ok());
  EXPECT_EQ(options->warnings,
            (RunWords{"warning: PET_ODD is ignored: torchrun has no such variable"}));
  EXPECT_TRUE(parse({}, variable("PET_TEE", "0"))->warnings.empty());
}

// The test checks the environment of a worker that is started with a usual torchrun command line.
TEST(RunOptionsEndToEnd, AnOrdinaryTorchrunLineRuns) {
  const auto result = run_cadre({"run", "--nnodes=1", "--nproc_per_node=2", "--rdzv_backend=c10d",
                                 "--rdzv_endpoint=localhost:0", "--rdzv_id=", "sh", "-c",
                                 "echo $RANK of $WORLD_SIZE"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr("[1] 1 of 2\n"));
}

TEST(RunOptionsEndToEnd, AHostIsThisOneWhenItCanBeListenedAt) {
  const std::string own_name = os::make_native_system()->host().name;
  for (const std::string& host : {std::string("127.0.0.1"), own_name}) {
    const auto result = run_cadre({"run", "--master_addr", host, "true"});
    EXPECT_EQ(result.exit_code, 0) << result.error;
  }
  // This address belongs to TEST-NET-1, which is reserved for documentation.
  const auto result = run_cadre({"run", "--master_addr", "192.0.2.1", "true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.error, StartsWith("cadre run: --master_addr 192.0.2.1: \"192.0.2.1\" is not "
                                       "this host"));
}

TEST(RunOptionsEndToEnd, AVariableCountsAndAnUnknownOneIsNamed) {
  const auto result = run_cadre({"run", "sh", "-c", "echo $WORLD_SIZE"},
                                {{"PET_NPROC_PER_NODE", "2"}, {"PET_ODD", "1"}});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr("[1] 2\n"));
  EXPECT_EQ(result.error,
            "cadre run: warning: PET_ODD is ignored: torchrun has no such variable\n");
}

TEST(RunOptions, OfAVariableSaysToUnsetIt) {
  EXPECT_THAT(refusal_of({}, variable("PET_LOG_DIR", "/dev/zero")),
              HasSubstr("unset the variable PET_LOG_DIR, or give --log-dir"));
  EXPECT_EQ(refusal_of({"--log-dir", "/dev/zero"}),
            "--log-dir /dev/zero: expected a folder, which is created if it does not exist");
}

// The clock counts nanoseconds in 64 bits, so "inf" must not overflow to a time in the past.
TEST(RunOptions, AShutdownTimeoutIsANumberOfSecondsThatAClockHolds) {
  for (const char* value : {"inf", "nan", "1e300", "1e10", "-1", "abc"}) {
    EXPECT_THAT(
        refusal_of({"--shutdown-timeout", value}),
        StartsWith(cadre::format("--shutdown-timeout {}: expected a number of seconds", value)));
    for (const char* name : {"PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}) {
      EXPECT_THAT(refusal_of({}, variable(name, value)),
                  StartsWith(cadre::format("{}={}: expected a number of seconds", name, value)));
    }
  }
}

TEST(RunOptions, TheShutdownTimeoutsOptionGoesBeforeItsVariables) {
  os::Environment environment = variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1e6");
  const auto seconds = [&](const RunWords& words) {
    return std::chrono::duration<double>(*parse(words, environment)->shutdown_timeout).count();
  };
  EXPECT_EQ(parse({})->shutdown_timeout, std::nullopt);
  EXPECT_EQ(seconds({}), 1e6);
  environment.set("PET_SHUTDOWN_TIMEOUT", "0.5");
  EXPECT_EQ(seconds({}), 0.5);
  EXPECT_EQ(seconds({"--shutdown-timeout", "7"}), 7);
}

// The rules are those of Python's argparse, which torchrun uses.
TEST(RunOptions, TakesAbbreviationsThatAreUnambiguous) {
  for (const RunWords& words : {RunWords{"--nproc", "3"}, RunWords{"--nproc_per=3"}}) {
    const auto options = parse(words);
    ASSERT_TRUE(options.ok()) << options.error().message();
    EXPECT_EQ(options->num_workers.value, "3");
  }
  const std::string ambiguous = refusal_of({"--n", "3"});
  EXPECT_THAT(ambiguous, HasSubstr("--n is ambiguous"));
  EXPECT_THAT(ambiguous, HasSubstr("--nproc-per-node"));
  EXPECT_THAT(ambiguous, HasSubstr("--nnodes"));
  EXPECT_EQ(refusal_of({"--rdzv-i", "x"}), "accepted");
}

TEST(RunOptions, MpirunsSpellingOfTheNumberGetsOurs) {
  for (const RunWords& words :
       {RunWords{"-n", "2"}, RunWords{"-np", "2"}, RunWords{"-n2"}, RunWords{"-np=2"}}) {
    EXPECT_THAT(refusal_of(words), HasSubstr("use --nproc-per-node")) << words.front();
  }
}

}  // namespace
}  // namespace cadre::cli
