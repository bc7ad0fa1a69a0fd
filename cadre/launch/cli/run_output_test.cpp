// Tests the output of workers under `cadre run`, and their environment.
#include <map>
#include <set>
#include <sstream>

#include "cadre/core/comm/connect.h"
#include "cadre/core/os/proc/executable.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(RunOutput, PrefixesEachLineWithItsRank) {
  const auto result = run_cadre(shell_job(2, "echo out $RANK; echo err $RANK >&2"));
  EXPECT_EQ(result.exit_code, 0);
  const auto output = lines_of(result.output);
  EXPECT_EQ(std::set(output.begin(), output.end()),
            (std::set<std::string>{"[0] out 0", "[1] out 1"}));
  const auto error = lines_of(result.error);
  EXPECT_EQ(std::set(error.begin(), error.end()),
            (std::set<std::string>{"[0] err 0", "[1] err 1"}));
}

TEST(RunOutput, TakesAPrefixTemplate) {
  const auto result =
      run_cadre({"run", "--role", "trainer", "--log_line_prefix_template",
                 "<${role_name} ${rank} ${local_rank}> ", "echo", "hello", "${local_rank}"});
  EXPECT_EQ(result.output, "<trainer 0 0> hello 0\n");
}

TEST(RunOutput, TakesTorchrunsVariableForTheTemplate) {
  constexpr const char* kVariable = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE";
  EXPECT_EQ(run_cadre({"run", "--role", "trainer", "echo", "hello"},
                      {{kVariable, "<${role_name}:${rank}> "}})
                .output,
            "<trainer:0> hello\n");
  EXPECT_EQ(run_cadre({"run", "echo", "hello"}, {{kVariable, ""}}).output, "[0] hello\n");
  EXPECT_EQ(run_cadre({"run", "--log-line-prefix-template", "> ", "echo", "hello"},
                      {{kVariable, "<${rank}> "}})
                .output,
            "> hello\n");
}

TEST(RunOutput, AnEmptyTemplateMeansNoPrefix) {
  const auto result = run_cadre({"run", "--log-line-prefix-template", "", "echo", "hello"});
  EXPECT_EQ(result.output, "hello\n");
}

TEST(RunOutput, EndsAPartialLineAndKeepsBytesAsTheyAre) {
  const auto result = run_cadre(shell_job(1, R"(printf 'a\000b\377\nlast')"));
  EXPECT_EQ(result.output, std::string("[0] a\0b\xff\n[0] last\n", 18));
}

TEST(RunOutput, LosesNothingOfAFlood) {
  constexpr int kLines = 200000;
  const auto result = run_cadre(shell_job(2, cadre::format("seq 1 {}", kLines)));
  EXPECT_EQ(result.exit_code, 0);
  // The number that the next line of each rank must have: the launcher keeps the order of a rank's
  // lines.
  std::map<std::string, int> next;
  for (const std::string& line : lines_of(result.output)) {
    const std::string prefix = line.substr(0, 4);
    ASSERT_EQ(line, prefix + std::to_string(++next[prefix]));
  }
  EXPECT_EQ(next, (std::map<std::string, int>{{"[0] ", kLines}, {"[1] ", kLines}}));
}

uint64_t resident_bytes(int pid) {
  std::ifstream file(cadre::format("/proc/{}/statm", pid));
  uint64_t total_pages = 0;
  uint64_t resident_pages = 0;
  file >> total_pages >> resident_pages;
  return resident_pages * 4096;
}

TEST(RunOutput, ASleepingReaderBoundsMemoryAndHidesNoDeath) {
  // `yes` writes gigabytes in a second, and the test does not read the launcher's output. The
  // launcher must still notice the failure.
  CadreCommand command({"run", "--nproc-per-node", "2", "--shutdown-timeout", "1", "sh", "-c",
                        "if [ $RANK = 0 ]; then yes; else sleep 1; exit 7; fi"},
                       {.reads_output = false});
  const auto system = os::make_native_system();
  system->poll({}, system->deadline_in(std::chrono::milliseconds(800)));
  for (const int pid : command.marked_processes()) {
    // Each launcher process needs about 10 MB, and more with a sanitizer. If the launcher's output
    // buffer had no limit, it would need a gigabyte.
    EXPECT_LT(resident_bytes(pid), 200U << 20) << "process " << pid;
  }
  EXPECT_EQ(command.wait().exit_code, 7);
}

TEST(RunOutput, GivesWorkersTorchrunsEnvironment) {
  const auto result =
      run_cadre({"run", "--nproc-per-node=2", "--rdzv-id", "job7", "--role=trainer", "env"},
                {{"OMP_NUM_THREADS", "3"}});
  std::map<std::string, std::string> found;
  for (const std::string& line : lines_of(result.output)) {
    const size_t equals = line.find('=');
    if (line.starts_with("[1] ")) found[line.substr(4, equals - 4)] = line.substr(equals + 1);
  }
  const std::map<std::string, std::string> expected = {{"RANK", "1"},
                                                       {"LOCAL_RANK", "1"},
                                                       {"GROUP_RANK", "0"},
                                                       {"ROLE_RANK", "1"},
                                                       {"WORLD_SIZE", "2"},
                                                       {"LOCAL_WORLD_SIZE", "2"},
                                                       {"GROUP_WORLD_SIZE", "1"},
                                                       {"ROLE_WORLD_SIZE", "2"},
                                                       {"ROLE_NAME", "trainer"},
                                                       {"MASTER_ADDR", "127.0.0.1"},
                                                       {"TORCHELASTIC_RESTART_COUNT", "0"},
                                                       {"CADRE_ATTEMPT", "0"},
                                                       {"TORCHELASTIC_MAX_RESTARTS", "0"},
                                                       {"TORCHELASTIC_RUN_ID", "job7"},
                                                       {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                       {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
                                                       {"OMP_NUM_THREADS", "3"},
                                                       {"CADRE_STORE_PROTOCOL", "native"}};
  for (const auto& [name, value] : expected) EXPECT_EQ(found[name], value) << name;
  EXPECT_GT(std::atoi(found["MASTER_PORT"].c_str()), 0);
  EXPECT_TRUE(std::regex_match(found["CADRE_JOB_TOKEN"], std::regex("[0-9a-f]{32}")));
  EXPECT_TRUE(found["TORCHELASTIC_ERROR_FILE"].ends_with("/attempt0-rank1.json"));
}

// Runs a job whose user has not set OMP_NUM_THREADS, whatever the environment of the tests has.
// Returns the values of that variable in the workers.
std::set<std::string> threads_of_workers(int num_workers) {
  const std::string inner = cadre::format(
      "unset OMP_NUM_THREADS; exec {} run --log-line-prefix-template= "
      "--nproc-per-node {} sh -c 'echo threads $OMP_NUM_THREADS'",
      testing::build_path("bin/cadre"), num_workers);
  const auto result = run_cadre({"run", "--log-line-prefix-template=", "sh", "-c", inner});
  const auto lines = lines_of(result.output);
  EXPECT_EQ(lines.size(), static_cast<size_t>(num_workers)) << result.error;
  return {lines.begin(), lines.end()};
}

TEST(RunOutput, SharesTheCoresWhenTheUserDoesNot) {
  const int num_cores = os::make_native_system()->host().num_cores;
  for (const int num_workers : {1, 2, num_cores, num_cores + 1}) {
    const int share = std::max(1, num_cores / num_workers);
    EXPECT_EQ(threads_of_workers(num_workers),
              std::set<std::string>{cadre::format("threads {}", share)})
        << num_workers << " workers on " << num_cores << " cores";
  }
}

// This test is the program of the workers that tests below start with `cadre run`. If it is run
// directly, the group has one rank.
TEST(RunOutputWorker, ConnectsAGroup) {
  const auto system = os::make_native_system();
  const auto world = connect_from_environment(*system, {}, system->deadline_in(kPatience));
  world->close(system->deadline_in(kPatience));
}

CommandResult run_group(const std::string& level) {
  return run_cadre({"run", "--nproc-per-node", "2", os::own_executable().value_or_throw(),
                    "--gtest_filter=RunOutputWorker.ConnectsAGroup"},
                   {{"CADRE_LOG", level}});
}

TEST(RunOutput, AtInfoEachGroupSaysOnceWhatItIs) {
  for (const char* level : {"info", "debug"}) {
    const auto result = run_group(level);
    EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
    const std::regex line(
        R"re(\[0\] info \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z rank=0 comm connected group=world round=0 world_size=2 hosts=1 )re"
        R"re(host=\S+ pid=\d+ engine=\S+ transport=shared_memory timeout_s=60 version=\S+ )re"
        R"re(algorithms="inline to \d+ B, [^"]+"\n)re");
    const auto begin = std::sregex_iterator(result.error.begin(), result.error.end(), line);
    EXPECT_EQ(std::distance(begin, std::sregex_iterator()), 1) << result.error;
  }
}

// A flight record that cannot be written must cause a warning, and must not make the job fail.
TEST(RunOutput, AFlightRecordThatCannotBeWrittenIsAWarning) {
  const cadre::testing::TemporaryFolder folder;
  std::filesystem::create_directory(folder.file("world-round0-rank1.flight"));
  const auto result = run_cadre({"run", "--nproc-per-node", "2", "--flight-records", folder.path(),
                                 os::own_executable().value_or_throw(),
                                 "--gtest_filter=RunOutputWorker.ConnectsAGroup"});
  EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
  EXPECT_NE(result.error.find("rank=1 comm flight_record=none reason="), std::string::npos)
      << result.error;
  EXPECT_EQ(result.error.find("rank=0"), std::string::npos) << result.error;
}

TEST(RunOutput, AWorkerLearnsTheStrategy) {
  const auto strategy_with = [](std::vector<std::string> given) {
    given.insert(given.begin(), "run");
    for (const char* const word : {"--no-python", "/bin/sh", "-c", "echo =$CADRE_STRATEGY="}) {
      given.emplace_back(word);
    }
    return run_cadre(given).output;
  };
  EXPECT_EQ(strategy_with({"--strategy", "fsdp"}), "[0] =fsdp=\n");
  EXPECT_EQ(strategy_with({}), "[0] ==\n");
}

TEST(RunOutput, AboveInfoAGroupThatConnectsSaysNothing) {
  for (const char* level : {"", "warning", "error", "off"}) {
    const auto result = run_group(level);
    EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
    EXPECT_EQ(result.error, "") << level;
  }
}

TEST(RunOutput, ALevelThatIsNoneIsRefusedBeforeAnythingStarts) {
  const auto result = run_cadre(shell_job(2, "echo started"), {{"CADRE_LOG", "loud"}});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.output, "");
  EXPECT_EQ(
      result.error,
      "cadre run: environment: CADRE_LOG is \"loud\", expected debug, info, warning, error or "
      "off\n");
}

TEST(RunOutput, WorkersInheritNoDescriptorAndNoInput) {
  const auto result = run_cadre(shell_job(1, "readlink /proc/self/fd/0; ls /proc/$$/fd"));
  EXPECT_EQ(result.output, "[0] /dev/null\n[0] 0\n[0] 1\n[0] 2\n");
}

}  // namespace
}  // namespace cadre::cli
