// Tests the errors for layouts that are impossible with any number of processes.
#include <gtest/gtest.h>

#include "cadre/testing/torch/config_files.h"

namespace cadre::train {
namespace {

using testing::ConfigTest;

TEST_F(ConfigTest, ALayoutThatNoNumberOfProcessesHasIsRefused) {
  EXPECT_EQ(refusal("", {"parallel.tensor=2", "parallel.pipeline=2"}), "accepted");
  EXPECT_EQ(refusal("", {"model.experts=8", "parallel.expert=4"}), "accepted");
  EXPECT_EQ(refusal("[model]\nexperts_per_token = 3\nexperts = 2\n"),
            "config_test.toml:2: model.experts_per_token is 3, more than the 2 experts of "
            "model.experts");
  EXPECT_EQ(refusal("", {"model.kind=mlp", "model.experts=2"}),
            "command line: model.experts is 2, but only the gpt has experts, and model.kind is "
            "mlp: choose 0");
  EXPECT_EQ(refusal("", {"parallel.expert=2"}),
            "command line: parallel.expert is 2, but model.experts is 0, so there are no experts "
            "to divide: set model.experts, or leave the key out");
  EXPECT_EQ(refusal("", {"parallel.tensor=3"}),
            "command line: parallel.tensor is 3, which does not divide the 4 heads of "
            "model.heads");
  EXPECT_EQ(refusal("", {"parallel.pipeline=2", "parallel.schedule=1b1f"}),
            "command line: parallel.schedule must be one of gpipe, 1f1b, interleaved-1f1b, "
            "looped-bfs, zb-h1, interleaved-zero-bubble, zb-v, dualpipe-v, is \"1b1f\"");
}

}  // namespace
}  // namespace cadre::train
