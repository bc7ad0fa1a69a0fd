#include "cadre/train/trainer/snapshots/train_state.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::train {
namespace {

// The texts of state.json in format 1 and, below, in format 2, with a shortened state of the
// generator. They must not be changed: they prove that old snapshots can still be read.
constexpr const char* kStateOfFormat1 = R"({
  "format": 1,
  "step": 120,
  "loader": {
    "epoch": 3,
    "samples": 40
  },
  "text": {
    "num_tokens": 15201,
    "fingerprint": "00c0ffee00000001"
  },
  "bucket_layout": "float32:3,2,1;float32:0",
  "generators": [
    "00ff7f"
  ],
  "config": "[run]\nsteps = 200\n"
}
)";
constexpr const char* kStateOfFormat2 = R"({
  "format": 2,
  "step": 120,
  "loader": {
    "epoch": 3,
    "samples": 40
  },
  "data": {
    "size": 15201,
    "fingerprint": "00c0ffee00000001"
  },
  "bucket_layout": "float32:3,2,1;float32:0",
  "generators": [
    "00ff7f"
  ],
  "config": "[run]\nsteps = 200\n",
  "best_held_out_loss": 2.25
}
)";

TEST(TrainState, ReadsTheGoldenFilesOfEarlierFormats) {
  for (const int format : {1, 2}) {
    const testing::TemporaryFolder folder;
    std::ofstream(folder.file("state.json")) << (format == 1 ? kStateOfFormat1 : kStateOfFormat2);
    const TrainState state = read_train_state(folder.path());
    EXPECT_EQ(state.format, format);
    EXPECT_EQ(state.step, 120);
    EXPECT_EQ(state.loader.epoch, 3);
    EXPECT_EQ(state.loader.samples, 40);
    EXPECT_EQ(state.data, (DataIdentity{.size = 15201, .fingerprint = 0xc0ffee00000001}));
    EXPECT_EQ(state.bucket_layout, "float32:3,2,1;float32:0");
    ASSERT_EQ(state.generators.size(), 1u);
    ASSERT_EQ(state.generators[0].numel(), 3);
    const auto* bytes = state.generators[0].const_data_ptr<uint8_t>();
    EXPECT_EQ(std::string(bytes, bytes + 3), std::string("\x00\xff\x7f", 3));
    EXPECT_EQ(state.config, "[run]\nsteps = 200\n");
    EXPECT_EQ(state.best_held_out_loss.has_value(), format == 2);
  }
}

}  // namespace
}  // namespace cadre::train
