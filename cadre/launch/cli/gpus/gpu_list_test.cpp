// Lists the GPUs of planted hosts.
#include "cadre/launch/cli/gpus/gpu_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;

class PlantedGpus : public ::testing::Test {
 protected:
  void write(const std::string& path, const std::string& content) const {
    const std::string file = root_ + path;
    fs::create_directories(fs::path(file).parent_path());
    std::ofstream(file) << content << '\n';
  }
  // `path` leads from /sys/devices to the GPU.
  void add(int index, const std::string& path, int numa_node = 0) const {
    const std::string pci_id = fs::path(path).filename();
    write("/dev/nvidia" + std::to_string(index), "");
    write("/proc/driver/nvidia/gpus/" + pci_id + "/information",
          "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nGPU UUID: \t GPU-5a" +
              std::to_string(index) + "\nBus Location: \t " + pci_id + "\nDevice Minor: \t " +
              std::to_string(index) + "\nGPU Firmware: \t 550.54.15");
    const std::string folder = "/sys/devices/" + path;
    write(folder + "/current_link_speed", "32.0 GT/s PCIe");
    write(folder + "/current_link_width", "16");
    write(folder + "/numa_node", std::to_string(numa_node));
    fs::create_directories(root_ + "/sys/bus/pci/devices");
    fs::create_directory_symlink(root_ + folder, root_ + "/sys/bus/pci/devices/" + pci_id);
  }

  testing::TemporaryFolder folder_;
  const std::string root_ = folder_.path();
};

TEST_F(PlantedGpus, AHostWithoutGpusHasNone) {
  EXPECT_TRUE(list_gpus(root_).empty());
  EXPECT_FALSE(has_nvswitch(root_));
}

TEST_F(PlantedGpus, EachHasItsModelAndLink) {
  add(1, "pci0000:15/0000:15:01.0/0000:17:00.0", 1);
  add(0, "pci0000:15/0000:15:01.0/0000:16:00.0", -1);
  const std::vector<Gpu> gpus = list_gpus(root_);
  ASSERT_EQ(gpus.size(), 2U);
  EXPECT_EQ(gpus[0].index, 0);
  EXPECT_EQ(gpus[0].model, "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(gpus[0].pci_id, "0000:16:00.0");
  EXPECT_EQ(gpus[0].uuid, "GPU-5a0");
  EXPECT_EQ(gpus[0].link_speed, "32.0 GT/s PCIe");
  EXPECT_EQ(gpus[0].link_width, "16");
  EXPECT_FALSE(gpus[0].numa_node);
  EXPECT_EQ(gpus[1].numa_node, 1);
  EXPECT_THAT(gpus[1].path, ElementsAre("pci0000:15", "0000:15:01.0", "0000:17:00.0"));
}

TEST_F(PlantedGpus, DistancesAreThoseOfTheTreeOfBridges) {
  const std::string board = "pci0000:15/0000:15:01.0/";
  add(0, board + "0000:16:00.0/0000:17:00.0/0000:18:00.0");
  add(1, board + "0000:16:00.0/0000:17:01.0/0000:19:00.0");
  add(2, board + "0000:16:00.0/0000:17:02.0/0000:1a:00.0/0000:1b:00.0/0000:1c:00.0");
  add(3, "pci0000:15/0000:15:02.0/0000:40:00.0");
  add(4, "pci0000:60/0000:60:01.0/0000:61:00.0");
  add(5, "pci0000:a0/0000:a0:01.0/0000:a1:00.0", 1);
  const std::vector<Gpu> gpus = list_gpus(root_);
  ASSERT_EQ(gpus.size(), 6U);
  EXPECT_EQ(link_between(gpus[0], gpus[1]), GpuLink::kOneBridge);
  EXPECT_EQ(link_between(gpus[0], gpus[2]), GpuLink::kBridges);
  EXPECT_EQ(link_between(gpus[0], gpus[3]), GpuLink::kHostBridge);
  EXPECT_EQ(link_between(gpus[0], gpus[4]), GpuLink::kHostBridge);
  EXPECT_EQ(link_between(gpus[0], gpus[5]), GpuLink::kNumaNodes);
  EXPECT_EQ(link_between(gpus[5], gpus[0]), GpuLink::kNumaNodes);
}

// A container sees the list of the host, but only its own device files.
TEST_F(PlantedGpus, ThoseOfOtherContainersAreLeftOut) {
  add(0, "pci0000:15/0000:15:01.0/0000:16:00.0");
  add(1, "pci0000:15/0000:15:01.0/0000:17:00.0");
  fs::remove(root_ + "/dev/nvidia0");
  write("/dev/nvidia-nvswitch0", "");
  write("/proc/driver/nvidia/gpus/0000:99:00.0/information", "no field");
  const std::vector<Gpu> gpus = list_gpus(root_);
  ASSERT_EQ(gpus.size(), 1U);
  EXPECT_EQ(gpus[0].index, 1);
  EXPECT_TRUE(has_nvswitch(root_));
}

TEST_F(PlantedGpus, WithoutThePciTreeTheDistanceIsUnknown) {
  add(0, "pci0000:15/0000:15:01.0/0000:16:00.0");
  add(1, "pci0000:15/0000:15:01.0/0000:17:00.0");
  fs::remove_all(root_ + "/sys");
  const std::vector<Gpu> gpus = list_gpus(root_);
  ASSERT_EQ(gpus.size(), 2U);
  EXPECT_EQ(gpus[0].link_speed, "");
  EXPECT_EQ(link_between(gpus[0], gpus[1]), GpuLink::kUnknown);
}

}  // namespace
}  // namespace cadre::cli
