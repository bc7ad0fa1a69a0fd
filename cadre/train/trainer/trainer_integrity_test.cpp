// Tests that a run never resumes from a damaged snapshot. If any of its files was changed, the run
// ends with an error that names the file and an intact snapshot.
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "cadre/core/os/proc/program_output.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/torch/trainer_runs.h"

namespace cadre::train {
namespace {

namespace fs = std::filesystem;

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::array<std::string_view, 4> kFiles = {"model.safetensors", "optimizer.safetensors",
                                                    "state.json", "B2SUMS"};

// A run that has saved snapshots of steps 2 and 4. The tests damage the one of step 4.
class TrainerIntegrityTest : public TrainerTest {
 protected:
  TrainerIntegrityTest() : config_(config("a")) {
    config_.run.steps = 4;
    config_.run.snapshot_every = 2;
    EXPECT_EQ(run(config_).failures, "");
    config_.run.resume = "auto";
    config_.run.steps = 6;
  }

  // Writes `content` to the file, tries to resume, restores the file, and returns the error.
  std::string failure_with(std::string_view file, const std::string& content) {
    const fs::path path = latest_ / file;
    const std::string kept = content_of(path);
    write_content(path, content);
    const std::string failure = run(config_).failures;
    write_content(path, kept);
    return failure;
  }

  Config config_;
  const fs::path older_ = folder_ + "/a/step-000002";
  const fs::path latest_ = folder_ + "/a/step-000004";
  const std::string remedy_ = "another snapshot is intact: run.resume=" + older_.string();
};

TEST_F(TrainerIntegrityTest, AFlippedBitInAnyFileIsFound) {
  for (const std::string_view file : kFiles) {
    const std::string whole = content_of(latest_ / file);
    ASSERT_FALSE(whole.empty()) << file;
    // If a line of B2SUMS was changed, the error may name the file of that line.
    const std::string named = file == "B2SUMS" ? "B2SUMS" : (latest_ / file).string();
    for (const size_t place : {size_t{0}, whole.size() / 2, whole.size() - 2, whole.size() - 1}) {
      std::string damaged = whole;
      damaged[place] ^= 1;
      EXPECT_THAT(failure_with(file, damaged), AllOf(HasSubstr(named), HasSubstr(remedy_)))
          << file << ", byte " << place;
    }
  }
}

TEST_F(TrainerIntegrityTest, AFileThatIsCutOrEmptyOrMissingIsFound) {
  for (const std::string_view file : kFiles) {
    const std::string whole = content_of(latest_ / file);
    for (const size_t size : {size_t{0}, whole.size() / 2, whole.size() - 1}) {
      EXPECT_THAT(failure_with(file, whole.substr(0, size)), HasSubstr(remedy_))
          << file << ", " << size << " bytes";
    }
    fs::remove(latest_ / file);
    EXPECT_THAT(
        run(config_).failures,
        AllOf(HasSubstr(": " + (latest_ / file).string() + " is missing"), HasSubstr(remedy_)));
    write_content(latest_ / file, whole);
  }
  EXPECT_EQ(run(config_).failures, "") << "the restored snapshot must be accepted";
}

TEST_F(TrainerIntegrityTest, AFileOfAnotherStepIsFound) {
  for (const std::string_view file : kFiles) {
    EXPECT_THAT(failure_with(file, content_of(older_ / file)), HasSubstr(remedy_)) << file;
  }
  // The files of step 2 are copied into the folder of step 4: they match their digests, but not the
  // folder's name.
  for (const std::string_view file : kFiles)
    write_content(latest_ / file, content_of(older_ / file));
  EXPECT_THAT(run(config_).failures,
              AllOf(HasSubstr("state.json: its step is 2, but its folder is named step-000004"),
                    HasSubstr(remedy_)));
}

TEST_F(TrainerIntegrityTest, AnEditedStepIsFound) {
  std::string state = content_of(latest_ / "state.json");
  const size_t place = state.find("\"step\": 4");
  ASSERT_NE(place, std::string::npos);
  state.replace(place, 9, "\"step\": 3");
  EXPECT_THAT(failure_with("state.json", state),
              AllOf(HasSubstr("state.json: its bytes do not match its digest in B2SUMS"),
                    HasSubstr(remedy_)));
}

TEST_F(TrainerIntegrityTest, AllRanksRefuseAndAnUnusableSnapshotIsNoRemedy) {
  std::string model = content_of(latest_ / "model.safetensors");
  model.back() ^= 4;
  write_content(latest_ / "model.safetensors", model);
  EXPECT_THAT(run(config_, 2).failures,
              AllOf(HasSubstr("rank 0: "), HasSubstr("rank 1: "), HasSubstr(remedy_)));
  fs::remove(older_ / "optimizer.safetensors");
  EXPECT_THAT(
      run(config_).failures,
      AllOf(HasSubstr("no other snapshot is intact: start at step 0"), Not(HasSubstr(older_))));
}

TEST_F(TrainerIntegrityTest, B2sumChecksASnapshotByHand) {
  const auto system = os::make_native_system();
  const auto printed =
      os::program_output({"sh", "-c", "cd \"$1\" && b2sum --check --strict B2SUMS", "sh", latest_},
                         system->deadline_in(std::chrono::seconds(20)));
  ASSERT_TRUE(printed.ok()) << printed.error().message();
  EXPECT_EQ(*printed, "model.safetensors: OK\noptimizer.safetensors: OK\nstate.json: OK\n");
}

// Snapshots of formats 1 and 2 have no digests, so only a warning is possible.
TEST_F(TrainerIntegrityTest, ASnapshotWithoutDigestsIsReadWithAWarning) {
  set_format(latest_, 2);
  nlohmann::json state = nlohmann::json::parse(content_of(latest_ / "state.json"));
  state["step"] = 3;
  write_content(latest_ / "state.json", state.dump());
  EXPECT_THAT(run(config_).failures, HasSubstr("its step is 3, but its folder is named"));
  state["step"] = 4;
  write_content(latest_ / "state.json", state.dump());
  const Run resumed = run(config_);
  EXPECT_EQ(resumed.failures, "");
  EXPECT_THAT(resumed.screen,
              HasSubstr("warning: " + latest_.string() +
                        " has format 2, which has no digests, so damage to its files "
                        "cannot be detected\n"));
  EXPECT_TRUE(fs::exists(folder_ + "/a/step-000006/B2SUMS"));
}

}  // namespace
}  // namespace cadre::train
