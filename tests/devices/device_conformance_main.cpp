// Runs the conformance cases (tests/conformance/conformance.h) in memory of the late device: with
// the staged engine between processes and between threads, over shared memory and over TCP, in one
// piece and in many, with an engine that only enqueues, and with that of NCCL on the fake NCCL. The
// kernels of the device run up to 0, 0.3 and 3 ms late.
//
//   cadre_device_conformance [--one-in N] [--seed S] [--max-ranks R]
//
// With CADRE_CONFORMANCE_DEVICE=cuda the ranks are threads that share the CUDA devices in turn, and
// the engine is the staged one.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/tensor/backends/device_engine.h"
#include "cadre/tensor/backends/staged_engine.h"
#include "cadre/tensor/device/core_device.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/testing/core/fake_peers.h"
#include "cadre/testing/torch/fake_nccl/fake_nccl.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "cadre/testing/torch/late_engine.h"
#include "run_on_device.h"
#include "tests/conformance/conformance.h"

namespace cadre::conformance {
namespace {

namespace late = testing::late;
using std::chrono::microseconds;

constexpr size_t kSmallPieceBytes = 4096;

bool is_on_cuda() {
  const char* const device = std::getenv("CADRE_CONFORMANCE_DEVICE");
  return device != nullptr && std::string_view(device) == "cuda";
}

device::DeviceRuntime runtime() {
  const c10::DeviceType type = is_on_cuda() ? c10::DeviceType::CUDA : late::device().type();
  return device::find_devices(type).runtime.value();
}

c10::Device device_of(Rank rank) {
  if (!is_on_cuda()) return late::device(rank.value);
  return {c10::DeviceType::CUDA,
          static_cast<c10::DeviceIndex>(rank.value % runtime().num_devices())};
}

// The engine for memory of the device, and that for memory of the CPU below it.
struct DeviceEngine {
  std::string_view name;
  Setting below;
  size_t piece_bytes = 0;  // of the staged engine; 0: the engine that only enqueues, or NCCL
  bool is_nccl = false;
};

// Processes come first, because a process that is forked after a device has been registered has no
// streams.
constexpr DeviceEngine kEngines[] = {
    {"staged on host, processes", {Home::kProcesses, Engine::kHost}, kStagedPieceBytes},
    {"staged on tcp, processes", {Home::kProcesses, Engine::kTcp}, kSmallPieceBytes},
    {"staged on host, threads", {Home::kThreads, Engine::kHost}, kSmallPieceBytes},
    {"staged on tcp, threads", {Home::kThreads, Engine::kTcp}, kStagedPieceBytes},
    {"enqueued, threads", {Home::kThreads, Engine::kHost}},
    {"nccl, threads", {Home::kThreads, Engine::kHost}, 0, true},
};

// Bitwise operations, and int16, which NCCL moves as bytes.
bool nccl_refuses(DType dtype, ReduceOp op) {
  if (dtype == DType::kInt16) return true;
  if (op == ReduceOp::kBxor) return true;
  return dtype != DType::kBool && (op == ReduceOp::kBand || op == ReduceOp::kBor);
}

Place place_of(const DeviceEngine& engine, microseconds delay, int order) {
  const auto run = [=](int world_size, uint64_t seed, const GroupMain& group_main) {
    const auto peers = std::make_shared<testing::RanksInProcess>();
    const DeviceBackendOf device_backend_of = [&](Rank rank) -> DeviceBackend {
      if (!is_on_cuda()) {
        late::register_device();
        late::set_delays({.longest = delay, .seed = seed});
      }
      runtime().make_current(device_of(rank));
      const Device device = *device::to_core(device_of(rank));
      if (engine.is_nccl) {
        return {.device = device,
                .make = device_engine(DeviceEngineChoice::kNccl,
                                      {.library = testing::fake_nccl::load(),
                                       .device_type = DeviceType::kPrivateUse1})};
      }
      if (engine.piece_bytes == 0) return testing::late_engine(rank.value, peers);
      return {.device = device, .make = staged_engine(engine.piece_bytes)};
    };
    return conformance::run_group(engine.below, world_size, seed, group_main, device_backend_of);
  };
  return {.name = format("{}, {} us late", engine.name, delay.count()),
          .order_of_additions = order,
          .run_group = run,
          .run_call = testing::run_on_device,
          .refuses = engine.is_nccl ? &nccl_refuses : nullptr};
}

}  // namespace
}  // namespace cadre::conformance

int main(int argc, char** argv) {
  namespace conformance = cadre::conformance;
  conformance::Choice choice{.max_ranks = cadre::testing::late::kNumDevices};
  if (!conformance::parse(argc, argv, choice)) {
    std::fputs("usage: cadre_device_conformance [--one-in N] [--seed S] [--max-ranks R]\n", stderr);
    return 2;
  }
  choice.max_ranks = std::min(choice.max_ranks, cadre::testing::late::kNumDevices);
  std::vector<conformance::Place> places;
  int order = 0;
  for (const conformance::DeviceEngine& engine : conformance::kEngines) {
    // Pieces may be added in another order than the whole, but delays change nothing.
    ++order;
    // A process that is forked after the search for CUDA cannot use it.
    const bool is_of_threads = engine.below.home == conformance::Home::kThreads;
    if (conformance::is_on_cuda() && (!is_of_threads || engine.piece_bytes == 0)) continue;
    for (const int delay_us : {0, 300, 3000}) {
      if (conformance::is_on_cuda() && delay_us > 0) continue;
      places.push_back(conformance::place_of(engine, std::chrono::microseconds(delay_us), order));
    }
  }
  return conformance::run_conformance(places, choice);
}
