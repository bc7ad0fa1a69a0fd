// Tests a run whose text file changes while the run reads it.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>

#include "cadre/testing/torch/trainer_runs.h"

namespace cadre::train {
namespace {

namespace fs = std::filesystem;

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class TrainerTextTest : public TrainerTest {
 protected:
  // Returns a configuration whose text is larger than the limit for texts in memory. The file is a
  // line of text followed by a hole, which takes no disk space.
  Config config_of_large_text() const {
    Config config = this->config("a");
    config.data.path = folder_ + "/large";
    write_content(config.data.path, std::string(10000, 'a'));
    fs::resize_file(config.data.path, 65 << 20);
    config.model.context = 512;
    config.run.global_batch_size = 2;
    config.run.evaluate_tokens = 2000;
    config.run.snapshot_every = 2;
    return config;
  }

  void change_after_step_3(const std::function<void()>& change) {
    on_print_ = [change](std::string_view text) {
      if (text.starts_with("step  3/")) change();
    };
  }
};

TEST_F(TrainerTextTest, AChangeOfALargeTextEndsTheRunOnAllRanksBeforeItIsUsed) {
  const Config config = config_of_large_text();
  const auto run_with = [&](const std::function<void()>& change) {
    change_after_step_3(change);
    return run(config, 2);
  };
  const auto all_have = [&](const std::string& what) {
    const std::string text =
        "kInvalidArgument: the text has changed while it was used: " + config.data.path + " " +
        what;
    return AllOf(HasSubstr("rank 0: " + text), HasSubstr("rank 1: " + text));
  };
  const Run written = run_with([&] {
    std::fstream(config.data.path, std::ios::in | std::ios::out) << "bbb";
    fs::last_write_time(config.data.path,
                        fs::last_write_time(config.data.path) + std::chrono::seconds(1));
  });
  EXPECT_THAT(written.failures, all_have("was written since it was opened; restore it"));
  EXPECT_THAT(written.screen, AllOf(HasSubstr("step  3/12"), Not(HasSubstr("step  4/12"))));
  EXPECT_THAT(SnapshotFolder(folder_ + "/a").steps(), ::testing::ElementsAre(2));
  // If the file were mapped into memory, truncating it would end the run with SIGBUS.
  const Run cut = run_with([&] { fs::resize_file(config.data.path, 0); });
  EXPECT_THAT(cut.failures, all_have("has 0 bytes instead of 68157440 since it was opened"));
}

TEST_F(TrainerTextTest, ASmallTextIsTrainedAsItWasRead) {
  Config config = this->config("plain");
  ASSERT_EQ(run(config, 2).failures, "");
  const std::string text = content_of(config.data.path);
  config.run.name = "disturbed";
  change_after_step_3([&] { write_content(config.data.path, std::string(text.size(), 'z')); });
  ASSERT_EQ(run(config, 2).failures, "");
  EXPECT_EQ(losses("disturbed"), losses("plain"));
  // The snapshot has the digest of the text as it was at the start, so the resumed run notices the
  // change.
  config.run.resume = "auto";
  config.run.steps = 14;
  EXPECT_THAT(run(config, 2).failures, HasSubstr("was trained on other data"));
  write_content(config.data.path, text);
  EXPECT_EQ(run(config, 2).failures, "");
}

}  // namespace
}  // namespace cadre::train
