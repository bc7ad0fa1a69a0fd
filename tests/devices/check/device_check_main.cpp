// The checks of tools/device_check that are programs on libtorch:
//
//   cadre_device_check CHECK --device cuda|late [--folder F]
//
// runtime, overlap, snapshot and trainer are one process. all_reduce, nccl, ddp, ddp_speed, fsdp,
// tensor_parallel, pipeline and memory_plan are started by `cadre run`, and all of their processes
// may share one device. Each compares with a result of the CPU or of one process. The last line is
// the verdict with its numbers; the exit code is 1 if the check failed.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/connect.h"
#include "cadre/core/os/system.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/tensor/device/local_device.h"
#include "cadre/tensor/device/stream_point.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/snapshot_saver.h"
#include "cadre/train/trainer/trainer.h"
#include "check.h"
#include "division_checks.h"

namespace cadre::device_check {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

double seconds_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double gigabytes_per_second(double bytes, double seconds) {
  return bytes / seconds / 1e9;
}

// Two streams are ordered by a point, and pinned memory is copied in both directions.
Finding check_runtime(const Check& check) {
  Finding finding{.numbers = cadre::format("built for torch {}", TORCH_VERSION)};
  const device::DeviceMemory memory = check.runtime.memory(check.device);
  finding.expect(check.runtime.num_devices() > 0 && memory.total_bytes > 0,
                 cadre::format("{} devices, {} of {} MB free", check.runtime.num_devices(),
                               memory.free_bytes >> 20, memory.total_bytes >> 20));
  const c10::Stream first =
      check.runtime.pooled_stream(check.device, device::StreamPriority::kNormal);
  const c10::Stream second =
      check.runtime.pooled_stream(check.device, device::StreamPriority::kHigh);
  int num_right = 0;
  for (int round = 1; round <= 50; ++round) {
    const Tensor value = torch::zeros({1 << 20}, at::device(check.device));
    check.synchronize();
    std::optional<device::StreamPoint> written;
    {
      const c10::StreamGuard guard(first);
      for (int i = 0; i < 20; ++i) value.add_(1);
      written.emplace(first);
    }
    const c10::StreamGuard guard(second);
    written->block(second);
    num_right += value.sum().item<double>() == 20.0 * (1 << 20);
  }
  finding.expect(num_right == 50, cadre::format("{} of 50 orders right", num_right));
  const int64_t num_bytes = check.is_late ? 4 << 20 : 256 << 20;
  const Tensor pinned =
      torch::empty({num_bytes}, at::TensorOptions(at::kByte).pinned_memory(true)).fill_(7);
  const Tensor on_device = torch::empty({num_bytes}, at::device(check.device).dtype(at::kByte));
  on_device.copy_(pinned, true);
  check.synchronize();
  const double to_device = seconds_of([&] {
    on_device.copy_(pinned, true);
    check.synchronize();
  });
  const double to_host = seconds_of([&] {
    pinned.copy_(on_device, true);
    check.synchronize();
  });
  finding.expect(pinned.eq(7).all().item<bool>(),
                 cadre::format("pinned to device {:.1f} GB/s, back {:.1f} GB/s",
                               gigabytes_per_second(double(num_bytes), to_device),
                               gigabytes_per_second(double(num_bytes), to_host)));
  return finding;
}

// A copy from pinned memory runs at the same time as products of matrices on another stream.
Finding check_overlap(const Check& check) {
  Finding finding;
  const Tensor pinned =
      torch::ones({int64_t{256} << 20}, at::TensorOptions(at::kByte).pinned_memory(true));
  const Tensor target = torch::empty_like(pinned, at::device(check.device));
  const Tensor matrix = torch::full({4096, 4096}, 1e-4, at::device(check.device));
  Tensor product = torch::empty_like(matrix);
  const c10::Stream side =
      check.runtime.pooled_stream(check.device, device::StreamPriority::kNormal);
  const auto seconds_for = [&](bool copies, bool computes) {
    check.synchronize();
    return seconds_of([&] {
      if (copies) {
        const c10::StreamGuard guard(side);
        target.copy_(pinned, /*non_blocking=*/true);
      }
      for (int i = 0; computes && i < 10; ++i) torch::mm_out(product, matrix, matrix);
      side.synchronize();
      check.synchronize();
    });
  };
  seconds_for(true, true);
  const double copy = seconds_for(true, false);
  const double compute = seconds_for(false, true);
  const double both = seconds_for(true, true);
  finding.expect(both < 0.9 * (copy + compute),
                 cadre::format("copy {:.1f} ms, products {:.1f} ms, both {:.1f} ms", copy * 1e3,
                               compute * 1e3, both * 1e3));
  return finding;
}

Finding check_all_reduce(const Check& check, const ProcessGroup& world) {
  Finding finding;
  const int size = world.world_size();
  for (const int64_t num_bytes : {int64_t{4} << 10, int64_t{1} << 20, int64_t{64} << 20}) {
    if (check.is_late && num_bytes > (1 << 20)) continue;
    const int64_t count = num_bytes / 4;
    const Tensor positions = torch::arange(count, torch::kFloat).remainder(97).to(check.device);
    bool is_right = true;
    double fastest = 1e9;
    for (int round = 0; round < 5; ++round) {
      const Tensor tensor = positions * double(world.rank() + 1) + round;
      check.synchronize();
      fastest = std::min(fastest, seconds_of([&] {
                           world.all_reduce(tensor);
                           check.synchronize();  // a call of NCCL returns before it has run
                         }));
      const Tensor expected = positions * (size * (size + 1) / 2.0) + double(size) * round;
      is_right = is_right && tensor.equal(expected);
    }
    finding.expect(is_right, cadre::format("{} KB in {:.3f} ms", num_bytes >> 10, fastest * 1e3));
  }
  return finding;
}

struct CheckedNet : nn::Module {
  CheckedNet() {
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(1, 8, 3)));
    hidden = register_module("hidden", nn::Linear(8 * 6 * 6, 64));
    head = register_module("head", nn::Linear(64, 10));
  }
  Tensor forward(const Tensor& images) {
    return head(torch::tanh(hidden(torch::relu(conv(images)).flatten(1))));
  }
  nn::Conv2d conv{nullptr};
  nn::Linear hidden{nullptr}, head{nullptr};
};

std::shared_ptr<CheckedNet> net_on(const c10::Device& device) {
  const auto net = std::make_shared<CheckedNet>();
  const torch::NoGradGuard no_grad;
  double start = 0;
  for (Tensor& parameter : net->parameters()) {
    const Tensor index = torch::arange(double(parameter.numel()), torch::kDouble) + ++start;
    parameter.copy_((torch::sin(index * 1.7) * 0.1).view_as(parameter));
  }
  net->to(device);
  return net;
}

// The global batch of a step.
std::pair<Tensor, Tensor> batch_of(int step) {
  const Tensor images = torch::cos(torch::arange(24.0 * 64) * (step + 1)).view({24, 1, 8, 8});
  return {images, torch::arange(24).remainder(10)};
}

template <typename Model>
double train_step(Model& model, torch::optim::Optimizer& optimizer, const Tensor& images,
                  const Tensor& labels) {
  optimizer.zero_grad();
  const Tensor loss = torch::nn::functional::cross_entropy(model(images), labels);
  loss.backward();
  optimizer.step();
  return loss.template item<double>();
}

// The parameters under DistributedDataParallel, with uneven shares, and those of one process.
Finding check_ddp(const Check& check, const ProcessGroup& world) {
  Finding finding;
  constexpr int kNumSteps = 20;
  const auto alone = net_on(check.device);
  torch::optim::SGD alone_steps(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto forward = [&](const Tensor& images) { return alone->forward(images); };
  for (int step = 0; step < kNumSteps; ++step) {
    const auto [images, labels] = batch_of(step);
    train_step(forward, alone_steps, images.to(check.device), labels.to(check.device));
  }
  DistributedDataParallel model(net_on(check.device), world,
                                {.bucket_caps = {.first_bytes = 4096, .bytes = 16384}});
  torch::optim::SGD steps(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const int64_t size = world.world_size();
  const int64_t begin = world.rank() == 0 ? 0 : 24 * world.rank() / size + 1;
  const int64_t end = world.rank() + 1 == size ? 24 : 24 * (world.rank() + 1) / size + 1;
  const double took = seconds_of([&] {
    for (int step = 0; step < kNumSteps; ++step) {
      const auto [images, labels] = batch_of(step);
      train_step(model, steps, images.slice(0, begin, end).to(check.device),
                 labels.slice(0, begin, end).to(check.device));
    }
  });
  double largest = 0;
  for (size_t i = 0; i < alone->parameters().size(); ++i) {
    const Tensor difference = (model->parameters()[i] - alone->parameters()[i]).abs().max();
    largest = std::max(largest, difference.item<double>());
  }
  const Tensor of_all = torch::tensor(largest, torch::kDouble);
  world.all_reduce(of_all, {.op = ReduceOp::kMax});
  finding.expect(of_all.item<double>() < 1e-5,
                 cadre::format("largest difference {:.1e}, {:.2f} ms a step", of_all.item<double>(),
                               took / kNumSteps * 1e3));
  return finding;
}

// The time of a step of the model that tools/device_check trains under torch's
// DistributedDataParallel, too.
Finding check_ddp_speed(const Check& check, const ProcessGroup& world) {
  nn::Sequential layers;
  for (int i = 0; i < 8; ++i) {
    layers->push_back(nn::Linear(2048, 2048));
    layers->push_back(nn::ReLU());
  }
  layers->to(check.device);
  DistributedDataParallel model(layers.ptr(), world);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01));
  const Tensor x = torch::randn({512, 2048}, at::device(check.device));
  const auto run_steps = [&](int count) {
    for (int step = 0; step < count; ++step) {
      optimizer.zero_grad();
      model(x).square().mean().backward();
      optimizer.step();
    }
    check.synchronize();
  };
  run_steps(10);
  constexpr int kNumTimed = 100;
  const double milliseconds = seconds_of([&] { run_steps(kNumTimed); }) / kNumTimed * 1e3;
  return {.numbers = cadre::format("{:.3f} ms a step", milliseconds)};
}

// A snapshot in the background of steps that change the tensors, loaded on the device and on the
// CPU.
Finding check_snapshot(const Check& check) {
  Finding finding;
  const int64_t count = check.is_late ? 1 << 16 : 64 << 20;
  std::vector<Tensor> tensors;
  SnapshotParts parts;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(torch::full({count}, 100.0 + i, at::device(check.device)));
    parts.parameters.push_back(whole_tensor(cadre::format("t{}", i), tensors.back()));
  }
  SnapshotFolder folder(check.folder);
  SnapshotSaver saver(folder);
  saver.save(1, parts);  // makes the pinned memory
  saver.finish();
  check.synchronize();
  double stall = 0;
  const double whole = seconds_of([&] {
    stall = seconds_of([&] { saver.save(2, parts); });
    for (const Tensor& tensor : tensors) tensor.fill_(-1);
    saver.finish();
  });
  saver.close();
  const double bytes = 4.0 * 4 * double(count);
  bool is_right = true;
  for (const c10::Device& target : {check.device, c10::Device(at::kCPU)}) {
    SnapshotParts loaded;
    for (int i = 0; i < 4; ++i) {
      loaded.parameters.push_back(
          whole_tensor(cadre::format("t{}", i), torch::empty({count}, at::device(target))));
    }
    load_sharded(folder.path_of(2), loaded);
    for (int i = 0; i < 4; ++i) {
      is_right = is_right && loaded.parameters[size_t(i)].values.eq(100.0 + i).all().item<bool>();
    }
  }
  finding.expect(is_right,
                 cadre::format("{:.0f} MB, the step waits {:.2f} ms, written at {:.2f} GB/s",
                               bytes / 1e6, stall * 1e3, gigabytes_per_second(bytes, whole)));
  return finding;
}

// The losses of a trainer of one process on a device.
std::vector<double> losses_on(const c10::Device& device, const Check& check, double& seconds) {
  train::Config config;
  config.model = {.layers = 2, .heads = 2, .width = 32, .context = 32};
  config.data.path = check.folder + "/text";
  config.schedule.warmup_steps = 2;
  config.run = {.name = device.is_cpu() ? "cpu" : "device",
                .folder = check.folder,
                .steps = 20,
                .global_batch_size = 8,
                .evaluate_tokens = 500};
  config.sample.tokens = 5;
  const ProcessGroup world = init_process_group({.rank = 0, .world_size = 1, .device = device});
  const auto system = os::make_native_system();
  std::vector<double> losses;
  train::Trainer trainer(config, {.world = world,
                                  .system = *system,
                                  .time_in_communication = [] { return Duration(0); },
                                  .stop_is_requested = [] { return false; },
                                  .print = [](std::string_view) {},
                                  .device = device});
  seconds = seconds_of([&] {
    const train::TrainResult result = trainer.run();
    losses = {result.loss, result.held_out.loss};
  });
  world.close();
  return losses;
}

Finding check_trainer(const Check& check) {
  Finding finding;
  std::ofstream text(check.folder + "/text");
  for (int i = 0; i < 700; ++i) text << "line " << i * i % 97 << " of a text to learn\n";
  text.close();
  double on_cpu = 0;
  double on_device = 0;
  const std::vector<double> expected = losses_on(at::kCPU, check, on_cpu);
  const std::vector<double> found = losses_on(check.device, check, on_device);
  for (size_t i = 0; i < found.size(); ++i) {
    finding.expect(std::abs(found[i] - expected[i]) < 1e-3,
                   cadre::format("{} loss {:.5f} (CPU {:.5f})", i == 0 ? "last" : "held-out",
                                 found[i], expected[i]));
  }
  finding.numbers += cadre::format(", {:.1f} s (CPU {:.1f} s)", on_device, on_cpu);
  return finding;
}

std::optional<Check> check_on(const std::string& kind, const std::string& folder) {
  const bool is_late = kind == "late";
  if (is_late) testing::late::register_device();
  const c10::Device device = is_late ? testing::late::device() : local_device();
  const device::FoundDevices found =
      device::find_devices(is_late ? device.type() : c10::DeviceType::CUDA);
  if (!found.runtime) {
    std::printf("FAIL no device: %s\n", found.reason.c_str());
    return std::nullopt;
  }
  found.runtime->make_current(device);
  return Check{.device = device, .runtime = *found.runtime, .folder = folder, .is_late = is_late};
}

int run(const std::string& name, const Check& check) {
  at::globalContext().setAllowTF32CuBLAS(false);
  at::globalContext().setAllowTF32CuDNN(false);
  const std::map<std::string, std::function<Finding(const Check&)>> of_one = {
      {"runtime", check_runtime},
      {"overlap", check_overlap},
      {"snapshot", check_snapshot},
      {"trainer", check_trainer}};
  const std::map<std::string, std::function<Finding(const Check&, const ProcessGroup&)>> of_many = {
      {"all_reduce", check_all_reduce},
      {"nccl", check_all_reduce},
      {"ddp", check_ddp},
      {"ddp_speed", check_ddp_speed},
      {"fsdp", check_fsdp},
      {"tensor_parallel", check_tensor_parallel},
      {"pipeline", check_pipeline},
      {"memory_plan", check_memory_plan}};
  Finding finding;
  bool prints = true;
  if (const auto found = of_one.find(name); found != of_one.end()) {
    finding = found->second(check);
  } else {
    const bool is_nccl = name == "nccl";
    const char* const rank = std::getenv("RANK");
    // NCCL refuses two ranks on one device of a host, and takes this for the name of the host.
    if (is_nccl && rank != nullptr) setenv("NCCL_HOSTID", rank, 1);
    const ProcessGroup world = init_process_group(
        {.device = check.device,
         .device_engine = is_nccl ? DeviceEngineChoice::kNccl : DeviceEngineChoice::kAuto});
    prints = world.rank() == 0;
    finding = of_many.at(name)(check, world);
    world.close();
  }
  if (prints || !finding.is_right) {
    std::printf("%s %s\n", finding.is_right ? "PASS" : "FAIL", finding.numbers.c_str());
  }
  return finding.is_right ? 0 : 1;
}

}  // namespace
}  // namespace cadre::device_check

int main(int argc, char** argv) {
  std::map<std::string, std::string> options = {{"--device", ""}, {"--folder", "."}};
  for (int i = 2; i + 1 < argc; i += 2) options[argv[i]] = argv[i + 1];
  if (argc < 4 || (options["--device"] != "cuda" && options["--device"] != "late")) {
    std::fputs("usage: cadre_device_check CHECK --device cuda|late [--folder F]\n", stderr);
    return 2;
  }
  try {
    at::set_num_threads(1);
    const auto check = cadre::device_check::check_on(options["--device"], options["--folder"]);
    return check ? cadre::device_check::run(argv[1], *check) : 1;
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
}
