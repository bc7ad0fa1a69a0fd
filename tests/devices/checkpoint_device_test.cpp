// Saves snapshots of tensors on the late device and loads them on any device. The truth is a
// program on the CPU. A stream that is held makes a missing order of copies a wrong number.
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "cadre/testing/torch/snapshot_samples.h"
#include "cadre/train/checkpoint/full_state.h"
#include "cadre/train/checkpoint/module_file.h"
#include "cadre/train/checkpoint/optimizer_state.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/sharded_save.h"
#include "cadre/train/checkpoint/snapshot_saver.h"
#include "on_devices.h"

namespace cadre {
namespace {

namespace late = testing::late;
namespace nn = torch::nn;
using snapshot_test::Division;
using snapshot_test::make_parts;
using snapshot_test::World;
using std::chrono::milliseconds;
using ::testing::AllOf;
using testing::DeviceEngine;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using testing::TemporaryFolder;
using torch::Tensor;

// Long enough for a thread that does not wait for a stream to write its files.
constexpr milliseconds kTimeOfASave(100);

// A module with a tied weight, a parameter that is not contiguous, a buffer and a float16 tensor.
struct SavedNet : nn::Module {
  SavedNet() {
    first = register_module("first", nn::Linear(5, 4));
    tied = register_parameter("tied", first->weight);
    columns = register_parameter("columns", torch::zeros({6, 3}).t());
    half = register_parameter("half", torch::zeros({7}, torch::kHalf));
    mean = register_buffer("mean", torch::zeros({5}, torch::kDouble));
  }
  nn::Linear first{nullptr};
  Tensor tied, columns, half, mean;
};

std::shared_ptr<SavedNet> saved_net_on(const c10::Device& device, double start = 1) {
  const auto net = std::make_shared<SavedNet>();
  const torch::NoGradGuard no_grad;
  for (const NamedTensor& named : named_state(*net)) {
    const Tensor& tensor = named.tensor;
    tensor.copy_(torch::arange(tensor.numel(), torch::kDouble).view(tensor.sizes()) + ++start);
  }
  net->to(device);
  return net;
}

std::string content_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void expect_equal_state(const nn::Module& found, const nn::Module& expected,
                        const std::string& where) {
  const auto a = named_state(found), b = named_state(expected);
  require(a.size() == b.size(), "the number of tensors");
  for (size_t i = 0; i < a.size(); ++i) {
    require(a[i].tensor.cpu().equal(b[i].tensor.cpu()), where + ": " + a[i].name);
  }
}

class CheckpointOnDevicesTest : public testing::OnDevices {
 protected:
  CheckpointOnDevicesTest() { testing::late_runtime().make_current(device_); }

  const TemporaryFolder run_;
  const c10::Device device_ = late::device();
};
INSTANTIATE_TEST_SUITE_P(Devices, CheckpointOnDevicesTest,
                         ::testing::Values(DeviceEngine::kStaged));

TEST_P(CheckpointOnDevicesTest, AFileOfAModuleKnowsNoDevice) {
  late::set_delays({.longest = std::chrono::microseconds(500), .seed = 3});
  const auto on_cpu = saved_net_on(at::kCPU);
  const auto on_device = saved_net_on(device_);
  save(*on_cpu, run_.file("cpu"));
  save(*on_device, run_.file("device"));
  EXPECT_EQ(content_of_file(run_.file("cpu")), content_of_file(run_.file("device")));
  for (const c10::Device& target : {c10::Device(at::kCPU), device_, late::device(3)}) {
    const auto loaded = saved_net_on(target, 100);
    load(*loaded, run_.file("device"));
    for (const auto& named : named_state(*loaded)) EXPECT_EQ(named.tensor.device(), target);
    expect_equal_state(*loaded, *on_cpu, target.str());
  }
}

// The device passes a collective that has failed, and its engine reports the failure later. The
// copies have ended by then, with values that nothing has reduced.
TEST_P(CheckpointOnDevicesTest, ASaveWaitsForTheReportOfAFailedCollective) {
  const auto peers = std::make_shared<testing::RanksInProcess>();
  const auto calls = std::make_shared<testing::FakeCalls>(
      [](testing::FakeCall&) { return Error(ErrorCode::kInternal, "the test fails it"); });
  std::vector<std::string> failures(2);
  static_cast<void>(testing::run_ranks_as_threads(2, [&](testing::RankContext& context) {
    CommunicatorOptions options{.timeout = testing::kRankTimeout};
    options.device_backend = testing::late_engine(context.rank, peers, calls, milliseconds(300));
    const ProcessGroup group(connect_ranks(context, options));
    const c10::Device device = late::device(context.rank);
    testing::late_runtime().make_current(device);
    failures[static_cast<size_t>(context.rank)] = failure_of([&] {
      nn::Linear net(4, 3);
      net->to(device);
      SnapshotSaver saver(SnapshotFolder(run_.path()), group);
      group.all_reduce(net->weight.detach());
      saver.save(1, parts_of(*net));
      saver.finish();
    });
  }));
  EXPECT_THAT(failures, ::testing::Each(HasSubstr("the test fails it")));
  EXPECT_TRUE(SnapshotFolder(run_.path()).steps().empty());
}

// Targets on a device that share memory are found by their addresses.
TEST_P(CheckpointOnDevicesTest, ALoadThatWouldLoseAValueIsRefused) {
  struct Overlapping : nn::Module {
    explicit Overlapping(const Tensor& memory) {
      a = register_parameter("a", memory.slice(0, 0, 4));
      b = register_parameter("b", memory.slice(0, 2, 6));
    }
    Tensor a, b;
  };
  Overlapping apart(torch::arange(6.0));
  apart.b.set_data(torch::arange(4.0) + 10);
  save(apart, run_.file("apart"));
  Overlapping overlapping(torch::zeros({6}, at::device(device_)));
  EXPECT_THAT(failure_of([&] { load(overlapping, run_.file("apart")); }),
              HasSubstr("'a' and 'b' share memory"));
  EXPECT_TRUE(overlapping.a.cpu().eq(0).all().item<bool>());
}

TEST_P(CheckpointOnDevicesTest, TensorsWithoutMemoryAreRefused) {
  struct Meta : nn::Module {
    Meta() { register_parameter("weight", torch::empty({2, 2}, at::device(at::kMeta))); }
  };
  const auto meta = std::make_shared<Meta>();
  EXPECT_THAT(failure_of([&] { save(meta, run_.file("meta")); }), HasSubstr("materialize()"));
  SnapshotFolder folder(run_.file("run"));
  EXPECT_THAT(failure_of([&] { save_sharded(folder, 1, parts_of(*meta)); }),
              HasSubstr("'weight' is no dense tensor with memory"));
}

SnapshotParts moved_parts(SnapshotParts parts, const c10::Device& device) {
  for (auto* tensors : {&parts.parameters, &parts.buffers}) {
    for (SnapshotTensor& tensor : *tensors) tensor.values = tensor.values.to(device);
  }
  for (ParameterState& state : parts.optimizer) {
    for (NamedTensor& named : state.tensors) named.tensor = named.tensor.to(device);
  }
  return parts;
}

// Every division of the tensors among ranks, saved in the foreground and in the background; loaded
// on another number of ranks, on devices and on the CPU.
TEST_P(CheckpointOnDevicesTest, ShardedSnapshotsAreThoseOfTheCpu) {
  late::set_delays({.longest = std::chrono::microseconds(200), .seed = 8});
  for (const World& world : {World{Division::kReplicated, 2}, World{Division::kFlat, 3},
                             World{Division::kHybrid, 2}, World{Division::kShard0, 2}}) {
    SCOPED_TRACE(to_string(world));
    const std::string folder = run_.file(to_string(world));
    expect_on_all(world.size, [&](const ProcessGroup& group, const c10::Device& device) {
      const SnapshotParts on_cpu = make_parts(world, group.rank(), true);
      const SnapshotParts parts = moved_parts(on_cpu, device);
      check_savable(parts, group);
      SnapshotFolder files(folder);
      save_sharded(files, 1, parts, group);
      SnapshotSaver saver(SnapshotFolder(folder), group);
      saver.save(2, parts);
      saver.close();
    });
    for (const int num_ranks : {1, 2}) {
      const World loading{Division::kFlat, num_ranks};
      expect_on_all(num_ranks, [&](const ProcessGroup& group, const c10::Device& device) {
        const SnapshotParts expected = make_parts(loading, group.rank(), true);
        for (const int64_t step : {1, 2}) {
          for (const c10::Device& target : {device, c10::Device(at::kCPU)}) {
            const SnapshotParts parts =
                moved_parts(make_parts(loading, group.rank(), false), target);
            const LoadedSnapshot loaded =
                load_sharded(SnapshotFolder(folder).path_of(step), parts, group);
            SnapshotParts found = moved_parts(parts, at::kCPU);
            found.optimizer = loaded.optimizer;
            require(snapshot_test::difference(found, expected).empty(),
                    snapshot_test::difference(found, expected));
          }
        }
      });
    }
    for (const int64_t step : {1, 2}) {
      write_full_state(SnapshotFolder(folder).path_of(step),
                       run_.file("full" + std::to_string(step)));
    }
    EXPECT_EQ(content_of_file(run_.file("full1")), content_of_file(run_.file("full2")));
  }
}

struct SavedTraining {
  explicit SavedTraining(const c10::Device& device)
      : net(std::make_shared<nn::LinearImpl>(6, 3)), device(device) {
    {
      const torch::NoGradGuard no_grad;
      for (Tensor& parameter : net->parameters()) {
        parameter.copy_(torch::sin(torch::arange(double(parameter.numel()))).view_as(parameter));
      }
    }
    net->to(torch::kDouble);
    net->to(device);
    optimizer = std::make_unique<torch::optim::AdamW>(net->parameters(), 0.05);
  }
  void step(int number) {
    const Tensor x = torch::cos(torch::arange(24.0, torch::kDouble) * number).view({4, 6});
    optimizer->zero_grad();
    net->forward(x.to(device)).square().mean().backward();
    optimizer->step();
  }
  SnapshotParts parts() const {
    SnapshotParts parts = parts_of(*net);
    parts.optimizer = state_dict(*optimizer, parts.parameters);
    return parts;
  }
  std::shared_ptr<nn::LinearImpl> net;
  std::unique_ptr<torch::optim::AdamW> optimizer;
  c10::Device device;
};

// A run moves from the CPU to a device, to another one, and back.
TEST_P(CheckpointOnDevicesTest, ARunGoesOnOnAnyDevice) {
  SavedTraining alone(at::kCPU);
  for (int step = 1; step <= 8; ++step) alone.step(step);

  int step = 0;
  for (const c10::Device& device :
       {c10::Device(at::kCPU), device_, late::device(2), c10::Device(at::kCPU)}) {
    if (!device.is_cpu()) testing::late_runtime().make_current(device);
    SavedTraining training(device);
    SnapshotFolder folder(run_.file("run"));
    if (step > 0) {
      const SnapshotParts parts = parts_of(*training.net);
      const LoadedSnapshot loaded = load_sharded(folder.path_of(step), parts);
      load_state_dict(*training.optimizer, parts.parameters, loaded.optimizer);
    }
    for (const int last = step + 2; step < last;) training.step(++step);
    SnapshotSaver saver(folder);
    saver.save(step, training.parts());
    training.step(1000);  // does not reach the snapshot
    saver.close();
    if (step < 8) continue;
    SavedTraining loaded(device_);
    load_sharded(folder.path_of(step), parts_of(*loaded.net), {.with_optimizer = false});
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(torch::allclose(loaded.net->parameters()[i].cpu(), alone.net->parameters()[i],
                                  1e-11, 1e-13));
    }
  }
}

// The device is far behind the host when the program saves, and the step after the save is enqueued
// before the copies have run. The host waits for neither.
TEST_P(CheckpointOnDevicesTest, ASaveInTheBackgroundTakesWhatTheTensorsWere) {
  const c10::Stream stream = pooled(device_);
  const c10::StreamGuard guard(stream);
  const Tensor weight = torch::zeros({1000}, at::device(device_));
  const Tensor columns = torch::zeros({30, 20}, at::device(device_)).t();
  SnapshotParts parts;
  parts.parameters = {whole_tensor("weight", weight), whole_tensor("columns", columns)};
  parts.optimizer = {{.parameter = "weight", .tensors = {{"exp_avg", torch::zeros_like(weight)}}}};
  SnapshotSaver saver((SnapshotFolder(run_.file("run"))));
  for (int step = 1; step <= 3; ++step) {
    late::StreamHold hold(stream);
    const late::Counts before = late::counts(device_.index());
    const auto fill = [&](double value) {
      weight.fill_(value);
      columns.fill_(value + 100);
      parts.optimizer[0].tensors[0].tensor.fill_(value + 200);
    };
    fill(step);
    saver.save(step, parts);
    fill(-1);
    const late::Counts after = late::counts(device_.index());
    EXPECT_EQ(after.num_synchronous(), before.num_synchronous());
    EXPECT_EQ(after.waits, before.waits);
    std::this_thread::sleep_for(kTimeOfASave);
    hold.release();
    saver.finish();
    SnapshotParts read;
    read.parameters = {whole_tensor("weight", torch::empty({1000})),
                       whole_tensor("columns", torch::empty({20, 30}))};
    const LoadedSnapshot loaded =
        load_sharded(SnapshotFolder(run_.file("run")).path_of(step), read);
    EXPECT_TRUE(read.parameters[0].values.eq(step).all().item<bool>()) << read.parameters[0].values;
    EXPECT_TRUE(read.parameters[1].values.eq(step + 100).all().item<bool>());
    EXPECT_TRUE(loaded.optimizer.at(0).tensors.at(0).tensor.eq(step + 200).all().item<bool>());
  }
  saver.close();
}

// A tensor of each of two devices, and one of the CPU.
TEST_P(CheckpointOnDevicesTest, ASnapshotMayHaveTensorsOfSeveralDevices) {
  const Tensor a = torch::full({50}, 1.0, at::device(device_));
  const Tensor b = torch::full({50}, 2.0, at::device(late::device(1)));
  const Tensor c = torch::full({50}, 3.0);
  SnapshotParts parts;
  parts.parameters = {whole_tensor("a", a), whole_tensor("b", b), whole_tensor("c", c)};
  SnapshotSaver saver((SnapshotFolder(run_.file("run"))));
  const auto hold =
      std::make_unique<late::StreamHold>(testing::late_runtime().current_stream(late::device(1)));
  saver.save(1, parts);
  for (const Tensor& tensor : {a, b, c}) tensor.fill_(9);
  std::this_thread::sleep_for(kTimeOfASave);
  hold->release();
  saver.close();
  load_sharded(SnapshotFolder(run_.file("run")).path_of(1), parts);
  EXPECT_TRUE(a.cpu().eq(1).all().item<bool>());
  EXPECT_TRUE(b.cpu().eq(2).all().item<bool>());
  EXPECT_TRUE(c.eq(3).all().item<bool>());
}

// Nothing of a copy that comes too late may reach the next snapshot, whose copies are on another
// stream. That one also waits for a second device, so that it is written after the late copy.
TEST_P(CheckpointOnDevicesTest, ACopyThatDoesNotEndFailsItsSaveOnly) {
  const c10::Device other = late::device(1);
  const Tensor weight = torch::full({1000}, 1.0, at::device(device_));
  const Tensor slow = torch::full({10}, 5.0, at::device(other));
  late::synchronize_all();
  SnapshotParts parts;
  parts.parameters = {whole_tensor("weight", weight)};
  SnapshotSaver saver(SnapshotFolder(run_.file("run")), {.timeout = milliseconds(400)});
  const c10::Stream held = pooled(device_);
  late::StreamHold hold(held);
  {
    const c10::StreamGuard guard(held);
    saver.save(1, parts);
  }
  EXPECT_THAT(failure_of([&] { saver.finish(); }),
              AllOf(HasSubstr("kTimeout"), HasSubstr("saved in the background"),
                    HasSubstr("has not copied the tensors to the host after 4")));
  weight.fill_(2);
  parts.parameters.push_back(whole_tensor("slow", slow));
  late::StreamHold hold_of_other(testing::late_runtime().current_stream(other));
  saver.save(2, parts);
  weight.fill_(3);  // what the late copy reads
  std::this_thread::sleep_for(kTimeOfASave);
  hold.release();
  std::this_thread::sleep_for(kTimeOfASave);
  hold_of_other.release();
  saver.close();
  load_sharded(SnapshotFolder(run_.file("run")).path_of(2), parts);
  EXPECT_TRUE(weight.cpu().eq(2).all().item<bool>());
  EXPECT_TRUE(slow.cpu().eq(5).all().item<bool>());
  EXPECT_EQ(SnapshotFolder(run_.file("run")).latest(), SnapshotFolder(run_.file("run")).path_of(2));
}

// A kernel that has failed is an error of the save, on all ranks, and of that save only.
TEST_P(CheckpointOnDevicesTest, AFailureOfADeviceIsThatOfTheSaveOnAllRanks) {
  std::vector<std::string> failures(2);
  const std::string folder = run_.file("run");
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    SnapshotParts parts;
    parts.parameters = {whole_tensor("weight", torch::full({10}, 4.0, at::device(device)))};
    SnapshotSaver saver(SnapshotFolder(folder), group);
    if (group.rank() == 1) {
      late::enqueue(testing::late_runtime().current_stream(device),
                    [] { throw std::runtime_error("an illegal address"); });
    }
    saver.save(1, parts);
    failures[static_cast<size_t>(group.rank())] = failure_of([&] { saver.finish(); });
    saver.save(2, parts);
    saver.close();
    load_sharded(SnapshotFolder(folder).path_of(2), parts, group);
  });
  for (const std::string& failure : failures) {
    EXPECT_THAT(failure, AllOf(HasSubstr("rank 1"), HasSubstr("an illegal address")));
  }
}

// An exception that leaves the saver does not wait for a device that does not answer.
TEST_P(CheckpointOnDevicesTest, AnExceptionDoesNotWaitForTheDevice) {
  const auto begin = std::chrono::steady_clock::now();
  const Tensor weight = torch::ones({10}, at::device(device_));
  const c10::Stream held = pooled(device_);
  const late::StreamHold hold(held);
  const c10::StreamGuard guard(held);
  EXPECT_THAT(failure_of([&] {
                SnapshotParts parts;
                parts.parameters = {whole_tensor("weight", weight)};
                SnapshotSaver saver((SnapshotFolder(run_.file("run"))));
                saver.save(1, parts);
                throw std::runtime_error("the program ends");
              }),
              HasSubstr("the program ends"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
}

}  // namespace
}  // namespace cadre
