// Tests of the search on a torch without CUDA, and of the sentences for each thing that is missing.
#include "cadre/tensor/device/device_search.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/version.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "cadre/core/os/system.h"
#include "cadre/tensor/device/device_runtime.h"

namespace cadre::device {
namespace {

using c10::DeviceType;

bool is_loaded(const std::string& library) {
  return dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD) != nullptr;
}

// What a search for CUDA finds on a machine with two GPUs.
DeviceFacts facts_of_two_gpus() {
  static const c10::impl::NoOpDeviceGuardImpl<DeviceType::Meta> guard;
  return {
      .type = DeviceType::CUDA, .torch_folder = "/torch/lib", .guard = &guard, .num_devices = 2};
}

TEST(DeviceSearch, CpuIsNoAccelerator) {
  EXPECT_EQ(why_none(search_devices(DeviceType::CPU)), "cpu is not an accelerator");
  EXPECT_EQ(why_none(search_devices(DeviceType::Meta)), "meta is not an accelerator");
}

TEST(DeviceSearch, NoReasonIfThereAreDevices) {
  EXPECT_EQ(why_none(facts_of_two_gpus()), "");
}

TEST(DeviceSearch, SaysThatTheLibraryWasNotLoaded) {
  DeviceFacts facts = facts_of_two_gpus();
  facts.guard = nullptr;
  facts.load_failure = "/torch/lib/libtorch.so: cannot open shared object file";
  EXPECT_EQ(why_none(facts),
            "libtorch.so of torch " TORCH_VERSION
            ", which has the cuda devices, was not loaded: /torch/lib/libtorch.so: cannot open "
            "shared object file");
}

TEST(DeviceSearch, SaysThatTheBuildHasNoSuchDevices) {
  DeviceFacts facts = facts_of_two_gpus();
  facts.guard = nullptr;
  EXPECT_EQ(why_none(facts), "torch " TORCH_VERSION
                             " in /torch/lib is a build without cuda devices: install a build "
                             "that has them, of the same version");
}

TEST(DeviceSearch, SaysThatLibtorchLookedTooEarly) {
  DeviceFacts facts = facts_of_two_gpus();
  facts.is_known_to_aten = false;
  EXPECT_EQ(why_none(facts),
            "libtorch looked for cuda devices before Cadre had loaded their library, and does not "
            "look again: search for the cuda devices before torch::manual_seed(), "
            "torch::cuda::is_available(), the first pinned tensor and the first backward");
}

TEST(DeviceSearch, SaysThatThereIsNoDevice) {
  DeviceFacts facts = facts_of_two_gpus();
  facts.num_devices = 0;
  EXPECT_EQ(why_none(facts), "torch " TORCH_VERSION
                             " finds no cuda device: check its driver, and which devices this "
                             "process may see (nvidia-smi, CUDA_VISIBLE_DEVICES)");
  facts.type = DeviceType::XPU;
  EXPECT_EQ(why_none(facts), "torch " TORCH_VERSION
                             " finds no xpu device: check its driver, and which devices this "
                             "process may see");
}

// The tests below are of a torch for the CPU.
class SearchWithoutCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    facts_ = search_devices(DeviceType::CUDA);
    if (facts_.guard != nullptr) GTEST_SKIP() << "this torch is a build with CUDA";
    if (!facts_.load_failure.empty()) GTEST_SKIP() << facts_.load_failure;
  }
  DeviceFacts facts_;
};

TEST_F(SearchWithoutCuda, GivesTheReason) {
  const FoundDevices found = find_devices(DeviceType::CUDA);
  EXPECT_FALSE(found.runtime.has_value());
  EXPECT_EQ(found.reason, "torch " TORCH_VERSION " in " + facts_.torch_folder +
                              " is a build without cuda devices: install a build that has them, of "
                              "the same version");
}

TEST_F(SearchWithoutCuda, LoadsTheLibraryOfTheSameTorch) {
  EXPECT_TRUE(std::filesystem::exists(facts_.torch_folder + "/libc10.so"));
  EXPECT_TRUE(is_loaded(facts_.torch_folder + "/libtorch.so"));
}

// Runs in a process of its own, in which no search precedes it.
[[noreturn]] void search_first_from_many_threads() {
  if (is_loaded("libtorch.so")) {
    std::fputs("libtorch.so is loaded before the first search", stderr);
    std::_Exit(1);
  }
  constexpr size_t kNumThreads = 16;
  const auto system = os::make_native_system();
  std::atomic<size_t> num_ready = 0;
  std::array<DeviceFacts, kNumThreads> facts;
  std::array<std::unique_ptr<os::Thread>, kNumThreads> threads;
  for (size_t i = 0; i < kNumThreads; ++i) {
    threads.at(i) = system->spawn("search", [&, i] {
      ++num_ready;
      while (num_ready < kNumThreads) system->yield();
      facts.at(i) = search_devices(DeviceType::CUDA);
    });
  }
  for (const auto& thread : threads) thread->join();
  bool is_right = true;
  for (const DeviceFacts& one : facts) {
    is_right = is_right && !one.torch_folder.empty() && why_none(one) == why_none(facts.at(0)) &&
               (is_loaded(one.torch_folder + "/libtorch.so") || !one.load_failure.empty());
  }
  std::fputs(is_right ? "all alike" : "the searches differ", stderr);
  std::_Exit(is_right ? 0 : 1);
}

TEST(DeviceSearchDeathTest, FirstSearchMayBeMadeByManyThreads) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(search_first_from_many_threads(), ::testing::ExitedWithCode(0), "all alike");
}

// The guard of a CUDA build on a machine with so many devices.
class CudaGuardOfTests : public c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
 public:
  explicit CudaGuardOfTests(c10::DeviceIndex num_devices) : num_devices_(num_devices) {}
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices_; }

 private:
  const c10::DeviceIndex num_devices_;
};

// Runs in a process of its own, because c10 keeps the guards.
[[noreturn]] void search_behind_a_placeholder() {
  static const CudaGuardOfTests guard(0);
  c10::impl::registerDeviceGuard(DeviceType::CUDA, &guard);
  std::string said = find_devices(DeviceType::CUDA).reason;
  c10::impl::ensureCUDADeviceGuardSet();  // fake tensors do this
  const bool is_replaced = c10::impl::getDeviceGuardImpl(DeviceType::CUDA)->deviceCount() > 0;
  if (find_devices(DeviceType::CUDA).reason != said) said = "the reasons differ";
  std::fputs(is_replaced ? said.c_str() : "there is no placeholder", stderr);
  std::_Exit(0);
}

TEST(DeviceSearchDeathTest, PlaceholderOfFakeTensorsIsNoDevice) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  if (search_devices(DeviceType::CUDA).guard != nullptr) GTEST_SKIP() << "a build with CUDA";
  EXPECT_EXIT(search_behind_a_placeholder(), ::testing::ExitedWithCode(0),
              "^torch .* finds no cuda device: check its driver");
}

// Runs in a process of its own, because c10 keeps the guard. This torch has the guard and, as
// after a search that came too late, not the hooks.
[[noreturn]] void search_too_late() {
  static const CudaGuardOfTests guard(2);
  c10::impl::registerDeviceGuard(DeviceType::CUDA, &guard);
  const FoundDevices found = find_devices(DeviceType::CUDA);
  std::fputs(found.runtime ? "there are devices" : found.reason.c_str(), stderr);
  std::_Exit(0);
}

TEST(DeviceSearchDeathTest, SearchThatCameTooLateFindsNone) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  if (search_devices(DeviceType::CUDA).guard != nullptr) GTEST_SKIP() << "a build with CUDA";
  EXPECT_EXIT(search_too_late(), ::testing::ExitedWithCode(0),
              "^libtorch looked for cuda devices before Cadre had loaded their library");
}

}  // namespace
}  // namespace cadre::device
