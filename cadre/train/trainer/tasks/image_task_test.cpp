// Tests which images are used for training and which are held out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "cadre/core/wire/idx_file.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/train/data/synthetic_dataset.h"
#include "cadre/train/trainer/tasks/task.h"

namespace cadre::train {
namespace {

using ::testing::HasSubstr;

Config config_of(const std::string& kind) {
  Config config;
  config.model.kind = "cnn";
  config.data.kind = kind;
  config.data.samples = 50;
  config.data.held_out = 0.125;
  return config;
}

class MnistTaskTest : public ::testing::Test {
 protected:
  MnistTaskTest() { config_.data.path = folder_.path(); }

  // Writes `count` images of side x side pixels. `part` is "train" or "t10k".
  void write(const std::string& part, int64_t count, int64_t side) const {
    write_array(part + "-images-idx3-ubyte",
                {.shape = {count, side, side},
                 .elements = std::vector<uint8_t>(static_cast<size_t>(count * side * side), 7)});
    write_array(
        part + "-labels-idx1-ubyte",
        {.shape = {count}, .elements = std::vector<uint8_t>(static_cast<size_t>(count), 3)});
  }

  const cadre::testing::TemporaryFolder folder_;
  Config config_ = config_of("mnist");

 private:
  void write_array(const std::string& name, const IdxArray& array) const {
    const auto bytes = encode_idx(array);
    std::ofstream(folder_.file(name), std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }
};

TEST(ImageTask, TheLastSamplesAreHeldOut) {
  const auto task = make_image_task(config_of("synthetic"));
  EXPECT_EQ(task->training_data()->size(), 44);
  EXPECT_EQ(task->held_out_data()->size(), 6) << "an eighth of 50, rounded down";
  EXPECT_EQ(task->data_identity().size, 50);
  EXPECT_EQ(task->data_text(), "44 images (synthetic; 6 held out)");
  const SyntheticImages all({.num_samples = 50});
  EXPECT_TRUE(task->held_out_data()
                  ->get(std::array<int64_t, 1>{0})
                  .data.equal(all.get(std::array<int64_t, 1>{44}).data));
}

TEST(ImageTask, AtLeastOneSampleIsHeldOut) {
  Config config = config_of("synthetic");
  config.data.held_out = 0.001;
  EXPECT_EQ(make_image_task(config)->held_out_data()->size(), 1);
}

TEST_F(MnistTaskTest, TrainsOnOnePairOfFilesAndJudgesTheOther) {
  write("train", 8, 28);
  {
    const auto task = make_image_task(config_);
    EXPECT_EQ(task->training_data()->size(), 7);
    EXPECT_EQ(task->held_out_data()->size(), 1);
  }
  write("t10k", 2, 28);
  const auto task = make_image_task(config_);
  EXPECT_EQ(task->training_data()->size(), 8);
  EXPECT_EQ(task->held_out_data()->size(), 2);
  EXPECT_EQ(task->data_identity().size, 10);
}

TEST_F(MnistTaskTest, ImagesOfAnotherSizeAreRefused) {
  write("train", 8, 14);
  EXPECT_THAT(cadre::testing::failure_of([&] { (void)make_image_task(config_); }),
              HasSubstr("images of 14 x 14 pixels; the models take 28 x 28"));
}

}  // namespace
}  // namespace cadre::train
