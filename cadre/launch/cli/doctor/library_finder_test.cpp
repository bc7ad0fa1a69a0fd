#include "cadre/launch/cli/doctor/library_finder.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "cadre/launch/cli/doctor/checks.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

class LibraryFinder : public ::testing::Test {
 protected:
  LibraryFinder() { view_.root = folder_.path(); }

  void write(const std::string& path, const std::string& content) const {
    const std::filesystem::path file = view_.root + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << content;
  }
  std::string seen(const std::string& name) const {
    for (const Finding& finding : check_libraries(view_)) {
      if (finding.name == name) return finding.seen;
    }
    return "";
  }

  testing::TemporaryFolder folder_;
  HostView view_;
};

TEST_F(LibraryFinder, SearchesAsTheLoaderDoes) {
  view_.environment.set("LD_LIBRARY_PATH", "/first:relative:/second");
  write("/etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n/third\ninclude /etc/*/other\n");
  write("/etc/ld.so.conf.d/b.conf", "# comment\n/beta\n/first\n");
  write("/etc/ld.so.conf.d/a.conf", "/alpha\ninclude /etc/ld.so.conf.d/*.conf\n");
  write("/etc/ld.so.conf.d/c.txt", "/not\n");
  const auto folders = library_folders(view_);
  const std::vector<std::string> expected{"/first", "/second", "/alpha",  "/beta",
                                          "/third", "/lib",    "/usr/lib"};
  ASSERT_GT(folders.size(), expected.size());
  EXPECT_EQ(std::vector<std::string>(folders.begin(),
                                     folders.begin() + static_cast<long>(expected.size())),
            expected);
}

TEST_F(LibraryFinder, TheNameWithTheMostNumbersHasTheVersion) {
  EXPECT_FALSE(find_library(view_, "libnccl"));
  write("/usr/lib/libnccl.so", "");
  write("/usr/lib/libnccl.so.2", "");
  write("/usr/lib/libnccl.so.2.21.5", "");
  write("/usr/lib/libnccl.so.2.21.5.old", "");
  write("/usr/lib/libnccl-net.so.9.9.9", "");
  const auto library = find_library(view_, "libnccl");
  ASSERT_TRUE(library);
  EXPECT_EQ(library->path, "/usr/lib/libnccl.so.2.21.5");
  EXPECT_EQ(library->version, "2.21.5");
}

TEST_F(LibraryFinder, AnUpdateMayLeaveOlderAndNewerFiles) {
  for (const char* version : {"550.54.14", "550.54.15", "550.163.01"}) {
    write(std::string("/usr/lib/libcuda.so.") + version, "");
  }
  std::filesystem::create_symlink("libcuda.so.550.54.15", view_.root + "/usr/lib/libcuda.so.1");
  std::filesystem::create_symlink("libcuda.so.1", view_.root + "/usr/lib/libcuda.so");
  EXPECT_EQ(find_library(view_, "libcuda")->version, "550.54.15");
}

TEST_F(LibraryFinder, PipsPackagesAreBesideTorch) {
  const std::string packages = "/venv/lib/python3.11/site-packages";
  view_.python.torch = TorchInstallation{.folder = packages + "/torch", .version = "2.13.0+cu126"};
  write(packages + "/nvidia/nccl/lib/libnccl.so.2", "");
  write(packages + "/nvidia_nccl_cu12-2.27.5.dist-info/METADATA", "");
  EXPECT_EQ(seen("NCCL"), "2.27.5 (" + packages + "/nvidia/nccl/lib/libnccl.so.2)");
  EXPECT_EQ(seen("CUDA runtime"), "not found");
  view_.environment.set("LD_LIBRARY_PATH", "/opt/nccl");
  write("/opt/nccl/libnccl.so.2.10.3", "");
  EXPECT_EQ(seen("NCCL"), "2.10.3 (/opt/nccl/libnccl.so.2.10.3)");
}

TEST_F(LibraryFinder, MpisVersionIsReadFromTheLibrary) {
  EXPECT_EQ(seen("MPI"), "not found");
  write("/usr/lib/libmpich.so.12", std::string("\x7f"
                                               "ELF\0MPICH Version:\t4.0.2\0rest",
                                               30));
  EXPECT_EQ(seen("MPI"), "MPICH 4.0.2 (/usr/lib/libmpich.so.12)");
  write("/usr/lib/libmpi.so.40.30.4",
        std::string("\0\0Open MPI v%d.%d.%d\0Open MPI v4.1.4, package: Debian OpenMPI\0", 60));
  EXPECT_EQ(seen("MPI"), "Open MPI 4.1.4 (/usr/lib/libmpi.so.40.30.4)");
  write("/usr/lib/libmpi.so.40.30.4", std::string("Open MPI v%d.%d.%d\0vader\0v5.0.1\0", 32));
  EXPECT_EQ(seen("MPI"), "Open MPI 5.0.1 (/usr/lib/libmpi.so.40.30.4)");
  write("/usr/lib/libmpi.so.40.30.4", "no text");
  EXPECT_EQ(seen("MPI"), "of unknown version (/usr/lib/libmpi.so.40.30.4)");
}

// A library of the wrong kind or size must not stop the checks.
TEST_F(LibraryFinder, ReadsNoFolderAndNoEmptyFile) {
  std::filesystem::create_directories(view_.root + "/usr/lib/libmpi.so.1");
  EXPECT_EQ(seen("MPI"), "of unknown version (/usr/lib/libmpi.so.1)");
  write("/usr/lib/empty", "");
  EXPECT_EQ(find_version(view_, "/usr/lib/empty", "label", ""), "");
  EXPECT_EQ(find_version(view_, "/usr/lib/none", "label", ""), "");
}

}  // namespace
}  // namespace cadre::cli
