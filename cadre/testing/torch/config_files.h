// A fixture for tests that write a configuration of the trainer to a file and parse it.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/train/trainer/config/config_file.h"

namespace cadre::testing {

class ConfigTest : public ::testing::Test {
 protected:
  train::Config load(const std::string& text, const std::vector<std::string>& overrides = {}) {
    std::ofstream(path_) << text;
    return train::load_config(path_, overrides);
  }

  // Parses a configuration that must be invalid, and returns the error message with the file's name
  // instead of its path.
  std::string refusal(const std::string& text, const std::vector<std::string>& overrides = {}) {
    try {
      load(text, overrides);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      std::string message = error.message();
      const std::string folder = folder_.file("");
      const size_t at = message.find(folder);
      if (at != std::string::npos) message.erase(at, folder.size());
      return message;
    }
    return "accepted";
  }

  TemporaryFolder folder_;
  const std::string path_ = folder_.file("config_test.toml");
};

}  // namespace cadre::testing
