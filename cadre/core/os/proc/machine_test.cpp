#include "cadre/core/os/proc/machine.h"

#include <gtest/gtest.h>

#include <fstream>
#include <optional>
#include <string>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

TEST(Machine, GpusAreThoseOfCudasRules) {
  const cadre::testing::TemporaryFolder devices;
  for (const char* name : {"nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"}) {
    std::ofstream(devices.file(name)) << "";
  }
  EXPECT_EQ(count_gpus(devices.path(), std::nullopt), 3);
  EXPECT_EQ(count_gpus("/no/such/folder", std::nullopt), 0);
  struct Case {
    std::string visible;
    int count;
  };
  for (const auto& [visible, count] :
       {Case{"", 0}, Case{"1", 1}, Case{"2,0", 2}, Case{" 0 , 1 ", 2}, Case{"-1", 0},
        Case{"0,-1,1", 1}, Case{"0,7,1", 1}, Case{"NoDevFiles", 0}, Case{"1,1", 0},
        Case{"GPU-8932f937,MIG-3eb87630", 2}, Case{"0,1,2,3", 3}}) {
    EXPECT_EQ(count_gpus(devices.path(), visible), count) << visible;
  }
}

TEST(Machine, IsDescribedFromProc) {
  Environment environment;
  environment.set("CUDA_VISIBLE_DEVICES", "");
  const MachineInfo info = read_machine_info(environment);
  EXPECT_TRUE(info.kernel.starts_with("Linux ")) << info.kernel;
  EXPECT_GE(info.num_cores, 1);
  EXPECT_EQ(info.num_gpus, 0);
  EXPECT_GT(info.available_memory_bytes, 0U);
  EXPECT_LE(info.available_memory_bytes, info.total_memory_bytes);
  EXPECT_EQ(info.total_memory_bytes % 1024, 0U);
}

}  // namespace
}  // namespace cadre::os
