// The fixture of the tests of `cadre` commands that start the trainer program.
//
// Blocking: until the command has ended. For tests only.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/paths.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {

// An installation folder with the `cadre` command. make_trainer() adds a shell script as its
// trainer; without it the folder has no trainer.
class TrainerTree : public ::testing::Test {
 protected:
  TrainerTree() {
    std::filesystem::create_directories(folder_ + "/bin");
    std::filesystem::create_directories(folder_ + "/libexec/cadre");
    std::filesystem::copy_file(testing::build_path("bin/cadre"), folder_ + "/bin/cadre");
    std::ofstream(config_) << "";
  }

  // Runs the copied command as a worker of the `cadre` command that was built, so the output has
  // the worker's prefix "[0] ".
  CommandResult run(const std::vector<std::string>& words) const {
    std::vector<std::string> all{"run", folder_ + "/bin/cadre"};
    all.insert(all.end(), words.begin(), words.end());
    return run_cadre(all);
  }

  void make_trainer(const std::string& script) const {
    const std::string trainer = folder_ + "/libexec/cadre/cadre-train";
    std::ofstream(trainer) << "#!/bin/sh\n" << script << '\n';
    std::filesystem::permissions(trainer, std::filesystem::perms::owner_all);
  }

  cadre::testing::TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path();
  const std::string config_ = folder_ + "/x.toml";
};

}  // namespace cadre::cli
