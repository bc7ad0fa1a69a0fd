// Tests the output of `cadre schedule`. The tests of cadre/core/schedule cover the schedules
// themselves.
#include <gmock/gmock.h>

#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(ScheduleCommand, ShowsTheStepAndItsBubble) {
  const auto result =
      run_cadre({"schedule", "--name", "1f1b", "--ranks", "2", "--microbatches", "2"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output,
            "1f1b: 2 stages on 2 ranks, 2 microbatches\n\n"
            "ms  rank 0  rank 1\n"
            " 0  0F0     .\n"
            " 1  0F1     1F0\n"
            " 2  .       1B0\n"
            " 4  0B0     1F1\n"
            " 5  |       1B1\n"
            " 7  0B1     .\n\n"
            "step 9 ms; busiest rank 6 ms; bubble 33.3 % on average\n\n"
            "rank  stages  busy ms  bubble  live activations\n"
            "   0  0       6        33.3 %  2\n"
            "   1  1       6        33.3 %  1\n");
}

TEST(ScheduleCommand, HelpTeachesAndTheListNamesAll) {
  const auto help = run_cadre({"schedule", "--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* text : {"--name NAME ", "--microbatches M ", "--from FILE ", "--lower WHERE ",
                           "--json FILE ", "Exit code: 0"}) {
    EXPECT_THAT(help.output, HasSubstr(text));
  }
  EXPECT_EQ(run_cadre({"help", "schedule"}).output, help.output);
  const auto list = run_cadre({"schedule", "--list"});
  for (const char* name : {"gpipe ", "1f1b ", "interleaved-1f1b ", "looped-bfs ", "zb-h1 ",
                           "interleaved-zero-bubble ", "zb-v ", "dualpipe-v "}) {
    EXPECT_THAT(list.output, HasSubstr(name));
  }
}

TEST(ScheduleCommand, WritesFilesAndReadsThemAgain) {
  const cadre::testing::TemporaryFolder folder;
  const std::string csv = folder.file("step.csv");
  const std::string json = folder.file("step.json");
  const std::vector<std::string> zb_v{"schedule",       "--name", "ZBVZeroBubble", "--ranks", "2",
                                      "--microbatches", "4"};
  auto words = zb_v;
  words.insert(words.end(), {"--csv", csv, "--json", json});
  const auto written = run_cadre(words);
  ASSERT_EQ(written.exit_code, 0) << written.error;
  EXPECT_TRUE(
      content_of(json).starts_with("{\"title\":\"zb-v: 4 stages on 2 ranks, 4 microbatches\","))
      << content_of(json);
  EXPECT_TRUE(content_of(csv).starts_with("0F0,0F1,0F2,3F0,3I0,3W0,")) << content_of(csv);
  const auto read = run_cadre({"schedule", "--from", csv});
  EXPECT_EQ(read.output.substr(read.output.find(':')),
            written.output.substr(written.output.find(':')));
  words = zb_v;
  words.insert(words.end(), {"--csv", "-", "--lower", "as-sent"});
  const auto lowered = run_cadre(words);
  EXPECT_TRUE(lowered.output.starts_with("0UNSHARD,3UNSHARD,0F0,0SEND_F0,")) << lowered.output;
  words = zb_v;
  words.insert(words.end(), {"--json", "-"});
  EXPECT_EQ(run_cadre(words).output, content_of(json));
}

TEST(ScheduleCommand, TimesAreThoseOfTheStages) {
  const std::vector<std::string> gpipe{"schedule", "--name",         "gpipe", "--ranks",
                                       "2",        "--microbatches", "3"};
  auto words = gpipe;
  words.insert(words.end(), {"--forward-ms", "2,1", "--backward-ms", "4", "--message-ms", "0.5"});
  EXPECT_THAT(run_cadre(words).output, HasSubstr("step 24 ms; busiest rank 18 ms"));
  words = gpipe;
  words.insert(words.end(), {"--layer-ms", "1,1,1,3"});
  EXPECT_THAT(run_cadre(words).output,
              HasSubstr("stage 0: layers 0 to 2, forward 3 ms\nstage 1: layers 3 to 3"));
}

TEST(ScheduleCommand, RefusesWhatMakesNoSense) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
      {{}, "name a schedule or a CSV file of one: --name NAME or --from FILE"},
      {{"--name", "gpipe", "--from", "x"},
       "--name gpipe needs --ranks and --microbatches, for example: cadre schedule --name gpipe "
       "--ranks 4 --microbatches 8"},
      {{"--name", "1f2b", "--ranks", "2", "--microbatches", "2"},
       "--name 1f2b: did you mean 1f1b?"},
      {{"--name", "ring", "--ranks", "2", "--microbatches", "2"},
       "--name ring: there is no such schedule; cadre schedule --list shows all"},
      {{"--name", "1f1b", "--ranks", "0", "--microbatches", "2"},
       "--ranks 0: expected a number from 1 on"},
      {{"--from", "x.csv", "--virtual", "2"}, "--virtual 2: the file of --from has it already"},
      {{"1f1b"}, "\"1f1b\" is not an option; name a schedule with --name"},
      {{"--name", "dualpipe-v", "--ranks", "4", "--microbatches", "7"},
       "dualpipe-v: 7 microbatches for 8 stages (4 ranks with 2 each); it needs at least as many "
       "microbatches as stages"},
      {{"--name", "gpipe", "--ranks", "2", "--microbatches", "2", "--forward-ms", "1,x"},
       "--forward-ms 1,x: expected milliseconds, 0 or from 1e-6 to 1e12, separated by commas"},
      {{"--name", "gpipe", "--ranks", "2", "--microbatches", "2", "--forward-ms", "1e-310"},
       "--forward-ms 1e-310: expected milliseconds, 0 or from 1e-6 to 1e12, separated by commas"},
      {{"--name", "gpipe", "--ranks", "2", "--microbatches", "2", "--layer-ms", "1,4e307"},
       "--layer-ms 1,4e307: expected milliseconds, 0 or from 1e-6 to 1e12, separated by commas"},
      {{"--name", "gpipe", "--ranks", "2", "--microbatches", "2", "--forward-ms", "1,1,1"},
       "--forward-ms has 3 times but the schedule has 2 stages; give one time for all stages or 2 "
       "times"},
      {{"--name", "gpipe", "--ranks", "2", "--microbatches", "2", "--layer-ms", "1"},
       "--layer-ms: 1 layers for 2 stages; each stage needs at least one layer"},
      {{"--name", "gpipe", "--ranks", "2", "--microbatches", "2", "--layer-ms", "1,1",
        "--forward-ms", "1"},
       "give --layer-ms or --forward-ms: both say how long forwards take"},
      {{"--name", "gpipe", "--ranks", "2", "--microbatches", "2", "--csv", "-", "--json", "-"},
       "--csv - and --json -: only one of them can use standard output"},
      {{"--name", "gpipe", "--ranks", "2", "--microbatches", "2", "--lower", "late"},
       "--lower late: expected before-use or as-sent"},
      {{"--name", "gpipe", "--ranks", "2", "--microbatches", "2", "--message-ms", "-1"},
       "--message-ms -1: expected milliseconds, 0 or from 1e-6 to 1e12"},
      {{"--name", "gpipe", "--ranks", "2", "--microbatches", "2", "--message-ms", "1e-310"},
       "--message-ms 1e-310: expected milliseconds, 0 or from 1e-6 to 1e12"},
      {{"--name", "gpipe", "--ranks", "2", "--microbatches", "2", "--overlap", "-1"},
       "--overlap -1: expected a number from 0 on"},
      {{"--name", "gpipe", "--ranks", "2", "--microbatches", "9", "--max-live", "8"},
       "rank 0 keeps the activations of up to 9 microbatches; at most 8 are allowed"}};
  for (auto [words, sentence] : cases) {
    words.insert(words.begin(), "schedule");
    const auto result = run_cadre(words);
    EXPECT_EQ(result.exit_code, 2) << sentence;
    EXPECT_EQ(result.error, "cadre schedule: " + sentence + "\n");
  }
}

TEST(ScheduleCommand, AFileThatCannotRunIsRefusedWithThePlace) {
  const cadre::testing::TemporaryFolder folder;
  const std::string csv = folder.file("step.csv");
  std::ofstream(csv) << "0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n1F0\n";
  EXPECT_EQ(
      run_cadre({"schedule", "--from", csv}).error,
      "cadre schedule: " + csv +
          ": line 3: 1F0 is an action of stage 1, which line 2 has already; each stage belongs "
          "to one rank\n");
  std::ofstream(csv) << "0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0\n";
  const auto result = run_cadre({"schedule", "--from", csv});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.error,
            "cadre schedule: deadlock: each of these actions comes before an action that it needs: "
            "rank 0, step 2 (0B0) needs rank 1, step 3 (1B0); rank 1, step 1 (1B1) needs rank 1, "
            "step 2 (1F1)\n");
  EXPECT_EQ(run_cadre({"schedule", "--from", folder.file("none.csv")}).exit_code, 1);
  EXPECT_EQ(run_cadre({"schedule", "--name", "gpipe", "--ranks", "2", "--microbatches", "2",
                       "--json", folder.file("none/step.json")})
                .exit_code,
            1);
}

}  // namespace
}  // namespace cadre::cli
