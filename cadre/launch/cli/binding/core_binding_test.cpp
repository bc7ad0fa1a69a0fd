#include "cadre/launch/cli/binding/core_binding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cadre/launch/cli/binding/topology.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Two sockets, each with two NUMA nodes, each of them with two caches for two physical cores of two
// hardware threads: node 0 has the cores 0 to 7, and so on.
Topology two_sockets() {
  auto topology = Topology::synthetic("package:2 numa:2 l3:2 core:2 pu:2");
  if (!topology.ok()) throw topology.error();
  return *std::move(topology);
}

std::vector<Cores> bound(BindingMode mode, int num_workers, std::vector<int> nodes_of_gpus = {}) {
  const auto cores = bind_workers(two_sockets(), mode, num_workers, nodes_of_gpus);
  if (!cores.ok()) throw cores.error();
  return *cores;
}

Cores range(int begin, int end) {
  Cores cores;
  for (int core = begin; core < end; ++core) cores.push_back(core);
  return cores;
}

TEST(Topology, HasNodesWithTheirSocketCoresAndCaches) {
  const std::vector<NumaNode> nodes = two_sockets().nodes();
  ASSERT_EQ(nodes.size(), 4U);
  EXPECT_EQ(nodes[2].number, 2);
  EXPECT_EQ(nodes[2].cores, range(16, 24));
  EXPECT_EQ(nodes[2].socket, range(16, 32));
  EXPECT_EQ(nodes[2].physical_cores, (std::vector<Cores>{{16, 17}, {18, 19}, {20, 21}, {22, 23}}));
  EXPECT_EQ(nodes[2].core_complexes, (std::vector<Cores>{range(16, 20), range(20, 24)}));
}

TEST(Topology, OfThisMachineHasTheCoresOfThisProcess) {
  const auto topology = Topology::of_this_machine();
  ASSERT_TRUE(topology.ok()) << topology.error().message();
  cpu_set_t own;
  CPU_ZERO(&own);
  ASSERT_EQ(::sched_getaffinity(0, sizeof(own), &own), 0);
  Cores cores;
  for (const NumaNode& node : topology->nodes()) {
    cores.insert(cores.end(), node.cores.begin(), node.cores.end());
  }
  EXPECT_EQ(static_cast<int>(cores.size()), CPU_COUNT(&own));
  for (const int core : cores) EXPECT_TRUE(CPU_ISSET(core, &own)) << core;
}

TEST(CoreBinding, WithoutGpusSpreadsTheWorkersOverTheNodes) {
  EXPECT_EQ(bound(BindingMode::kNode, 2), (std::vector<Cores>{range(0, 8), range(16, 24)}));
  EXPECT_EQ(bound(BindingMode::kNode, 8)[3], range(8, 16));
  EXPECT_EQ(bound(BindingMode::kSocket, 4),
            (std::vector<Cores>{range(0, 16), range(0, 16), range(16, 32), range(16, 32)}));
}

TEST(CoreBinding, PlacesAWorkerAtItsGpu) {
  EXPECT_EQ(bound(BindingMode::kNode, 2, {3, 1}),
            (std::vector<Cores>{range(24, 32), range(8, 16)}));
  const std::vector<int> unknown{0, 9};
  const auto cores = bind_workers(two_sockets(), BindingMode::kNode, 2, unknown);
  EXPECT_THAT(cores.error().message(), HasSubstr("GPU of local rank 1 is at NUMA node 9"));
}

// Four physical cores for three workers: the first one gets two of them, whole.
TEST(CoreBinding, ExclusiveSharesThePhysicalCoresOfANodeOut) {
  EXPECT_EQ(bound(BindingMode::kExclusive, 4, {1, 0, 1, 1}),
            (std::vector<Cores>{range(8, 12), range(0, 8), {12, 13}, {14, 15}}));
  const std::vector<int> one_node(5, 2);
  const auto cores = bind_workers(two_sockets(), BindingMode::kExclusive, 5, one_node);
  EXPECT_THAT(cores.error().message(), HasSubstr("NUMA node 2 has 4 physical cores for 5 workers"));
}

TEST(CoreBinding, CoreComplexesAreTakenInTurn) {
  EXPECT_EQ(bound(BindingMode::kCoreComplex, 3, {1, 1, 1}),
            (std::vector<Cores>{range(8, 12), range(12, 16), range(8, 12)}));
}

TEST(CoreBinding, IsEmptyIfEachWorkerWouldGetAllCores) {
  const auto one_node = Topology::synthetic("package:1 numa:1 core:4 pu:1");
  ASSERT_TRUE(one_node.ok());
  EXPECT_THAT(*bind_workers(*one_node, BindingMode::kNode, 2, {}), IsEmpty());
  EXPECT_THAT(*bind_workers(*one_node, BindingMode::kSocket, 2, {}), IsEmpty());
  EXPECT_EQ(*bind_workers(*one_node, BindingMode::kExclusive, 2, {}),
            (std::vector<Cores>{{0, 1}, {2, 3}}));
}

TEST(CoreBinding, ParsesTorchrunsModes) {
  EXPECT_EQ(parse_binding_mode("core-complex"), BindingMode::kCoreComplex);
  EXPECT_EQ(parse_binding_mode("core_complex"), std::nullopt);
}

class GpuNodesTest : public ::testing::Test {
 protected:
  // Makes the files of the driver and of the kernel for one GPU.
  void add_gpu(const std::string& address, const std::string& uuid, const std::string& node) {
    std::filesystem::create_directories(folders_.driver + "/" + address);
    std::filesystem::create_directories(folders_.devices + "/" + address);
    std::ofstream(folders_.driver + "/" + address + "/information")
        << "Model: \t\t NVIDIA H100\nGPU UUID: \t " << uuid << "\n";
    std::ofstream(folders_.devices + "/" + address + "/numa_node") << node << "\n";
  }
  std::vector<int> nodes(int num_workers, const char* visible = nullptr) {
    os::Environment environment;
    if (visible != nullptr) environment.set("CUDA_VISIBLE_DEVICES", visible);
    const auto found = gpu_nodes(environment, num_workers, folders_);
    if (!found.ok()) throw found.error();
    return *found;
  }

  const cadre::testing::TemporaryFolder folder_;
  const GpuFolders folders_{.driver = folder_.file("driver"), .devices = folder_.file("devices")};
};

TEST_F(GpuNodesTest, NumbersTheGpusByTheirAddressesAndFollowsTheVisibleOnes) {
  add_gpu("0000:dc:00.0", "GPU-aa-2", "3");
  add_gpu("0000:1b:00.0", "GPU-aa-0", "0");
  add_gpu("0000:5e:00.0", "GPU-aa-1", "-1");
  EXPECT_EQ(nodes(3), (std::vector<int>{0, 0, 3}));
  EXPECT_EQ(nodes(2, "2,0"), (std::vector<int>{3, 0}));
  EXPECT_EQ(nodes(2, "GPU-aa-0, GPU-aa-2"), (std::vector<int>{0, 3}));
  os::Environment environment;
  environment.set("CUDA_VISIBLE_DEVICES", "MIG-7");
  EXPECT_THAT(gpu_nodes(environment, 1, folders_).error().message(), HasSubstr("\"MIG-7\""));
}

TEST_F(GpuNodesTest, IsEmptyIfThereAreFewerGpusThanWorkers) {
  EXPECT_THAT(nodes(1), IsEmpty());
  add_gpu("0000:1b:00.0", "GPU-aa-0", "0");
  EXPECT_EQ(nodes(1), std::vector<int>{0});
  EXPECT_THAT(nodes(2), IsEmpty());
  EXPECT_THAT(nodes(1, ""), IsEmpty());
  EXPECT_THAT(nodes(2, "0"), IsEmpty());
}

}  // namespace
}  // namespace cadre::cli
