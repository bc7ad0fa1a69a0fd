// Tests that CADRE_TORCH has the same meaning for the command and for the build, and the error of
// `cadre train` if no torch is found.
#include "cadre/launch/cli/torch_finder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "cadre/core/os/proc/program_output.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/paths.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A virtual environment with a torch of version 2.12.1, and libtorch's ZIP of the same version.
class TorchFinder : public ::testing::Test {
 protected:
  TorchFinder() {
    std::filesystem::create_directories(torch_);
    std::filesystem::create_directories(folder_ + "/bin");
    std::ofstream(torch_ + "/version.py")
        << "from typing import Optional\n__all__ = ['__version__', 'debug']\n"
           "__version__ = '2.12.1+cpu'\n";
    std::filesystem::create_directories(unpacked_ + "/lib");
    std::ofstream(unpacked_ + "/lib/libtorch_cpu.so") << "";
    std::ofstream(unpacked_ + "/build-version") << "2.12.1+cpu\n";
    // Creates a program in place of Python that prints the path of torch.
    make_program("/bin/python", "echo " + torch_);
    make_program("/bin/python3", "echo " + torch_);
  }

  void make_program(const std::string& path, const std::string& script) const {
    std::ofstream(folder_ + path) << "#!/bin/sh\n" << script << '\n';
    std::filesystem::permissions(folder_ + path, std::filesystem::perms::owner_all);
  }

  std::string found_by(const std::string& named, const std::string& search_path = "/bin") const {
    os::Environment environment;
    environment.set("CADRE_TORCH", named);
    environment.set("PATH", search_path);
    const auto torch = find_torch(environment);
    return torch ? torch->folder + " " + torch->version : "none";
  }

  // Returns the output of CMake for a project that only searches for torch.
  std::string found_by_cmake(const std::string& named) const {
    const std::string project = folder_ + "/project";
    std::filesystem::create_directories(project);
    std::ofstream(project + "/CMakeLists.txt")
        << "cmake_minimum_required(VERSION 3.25)\nproject(finds LANGUAGES NONE)\n"
           "list(APPEND CMAKE_MODULE_PATH \""
        << testing::source_path("cmake")
        << "\")\nfind_package(LibTorch REQUIRED)\n"
           "message(STATUS \"found ${LibTorch_DIR} ${LibTorch_VERSION}\")\n";
    const auto system = os::make_native_system();
    return os::program_output({"sh", "-c",
                               "cmake -S " + project + " -B " + project +
                                   "/b -DCADRE_TORCH=" + named + " 2>&1 || true"},
                              system->deadline_in(kPatience))
        .value_or_throw();
  }

  cadre::testing::TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path();
  const std::string torch_ = folder_ + "/lib/python3.11/site-packages/torch";
  const std::string unpacked_ = folder_ + "/libtorch";  // libtorch's ZIP
};

TEST_F(TorchFinder, TakesATorchFolderAVirtualEnvironmentOrAPython) {
  const std::string found = torch_ + " 2.12.1+cpu";
  EXPECT_EQ(found_by(torch_), found);
  EXPECT_EQ(found_by(folder_), found);
  EXPECT_EQ(found_by(folder_ + "/bin/python"), found);
  EXPECT_EQ(found_by("python", folder_ + "/bin"), found);
  EXPECT_EQ(found_by(unpacked_), unpacked_ + " 2.12.1+cpu");
  EXPECT_EQ(found_by(folder_ + "/lib"), "none");
  EXPECT_EQ(found_by(folder_ + "/no/python"), "none");
}

TEST_F(TorchFinder, TheBuildTakesTheSame) {
  const std::string found = "found " + torch_ + " 2.12.1\n";
  for (const std::string& named : {torch_, folder_, folder_ + "/bin/python"}) {
    EXPECT_THAT(found_by_cmake(named), HasSubstr(found)) << named;
  }
  EXPECT_THAT(found_by_cmake(unpacked_), HasSubstr("found " + unpacked_ + " 2.12.1\n"));
  EXPECT_THAT(found_by_cmake(folder_ + "/lib"),
              AllOf(HasSubstr("CADRE_TORCH"), HasSubstr("virtual environment")));
}

TEST_F(TorchFinder, AZipWithoutItsVersionIsRefused) {
  std::filesystem::remove(unpacked_ + "/build-version");
  EXPECT_EQ(found_by(unpacked_), "none");
  EXPECT_THAT(found_by_cmake(unpacked_),
              HasSubstr(unpacked_ + " has no version such as 2.13.0 in version.py, as in a wheel, "
                                    "or in the first line of build-version, as in libtorch's ZIP: "
                                    "set CADRE_TORCH to a torch folder"));
}

// An installed tree whose trainer needs a libtorch that the loader does not find. The trainer is a
// copy of this command in which the name of a library is replaced.
TEST_F(TorchFinder, TrainNamesTheVariableWhenTheTrainerHasNoLibtorch) {
  std::ifstream original(testing::build_path("bin/cadre"), std::ios::binary);
  std::string program((std::istreambuf_iterator<char>(original)), {});
  const size_t name = program.find(std::string("\0libspdlog.so", 13)) + 1;
  ASSERT_NE(name, 0U);
  program.replace(name, 15, std::string("libtorch_cpu.so").c_str(), 15);
  program[name + 15] = '\0';
  std::filesystem::create_directories(folder_ + "/libexec/cadre");
  const std::string trainer = folder_ + "/libexec/cadre/cadre-train";
  std::ofstream(trainer, std::ios::binary) << program;
  std::filesystem::permissions(trainer, std::filesystem::perms::owner_all);
  std::filesystem::copy_file(testing::build_path("bin/cadre"), folder_ + "/bin/cadre");
  std::ofstream(folder_ + "/x.toml") << "";
  const auto train_with = [&](const std::string& named) {
    return run_cadre({"run", folder_ + "/bin/cadre", "train", folder_ + "/x.toml"},
                     {{"CADRE_TORCH", named}});
  };
  const auto nothing = train_with(folder_ + "/lib");
  EXPECT_EQ(nothing.exit_code, 127);
  EXPECT_THAT(nothing.error,
              AllOf(HasSubstr("[0] cadre train: the trainer needs the libraries of "
                              "torch"),
                    HasSubstr("and CADRE_TORCH=" + folder_ +
                              "/lib has no torch; set CADRE_TORCH to a torch folder, "
                              "a virtual environment or a Python that has torch")));
  const auto help = run_cadre({"run", folder_ + "/bin/cadre", "train", "--help"},
                              {{"CADRE_TORCH", folder_ + "/lib"}});
  EXPECT_EQ(help.exit_code, 0) << help.error;
  EXPECT_THAT(help.output,
              HasSubstr("The trainer, which lists the keys, is not available: the trainer needs"));
  EXPECT_THAT(help.output, Not(HasSubstr("may set:")));
  std::ofstream(torch_ + "/version.py") << "\n__version__ = '1.9.0'\n";
  EXPECT_THAT(train_with(folder_).error, HasSubstr("and " + torch_ + " has torch 1.9.0; set"));
}

}  // namespace
}  // namespace cadre::cli
