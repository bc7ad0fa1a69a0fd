// Trains under FullyShardedDataParallel on the late device, and compares the parameters with those
// of one process on the CPU. Delays of the kernels, held streams and memory that is 0xFF when it is
// free make a missing order of two streams a wrong number.
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/deferred/deferred_init.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/grad_scaler.h"
#include "cadre/parallel/shard/nonfinite_gradients.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/tensor/device/stream_point.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "on_devices.h"
#include "training_on_devices.h"

namespace cadre::fsdp_on_devices {
namespace {

namespace late = testing::late;
using testing::adamw;
using testing::DeviceEngine;
using testing::failure_of;
using testing::inputs_of;
using testing::kNumSteps;
using testing::loss_of;
using testing::require;
using testing::rows_of;
using testing::Streams;
using testing::UnitNet;
using testing::Values;
using testing::whole_values_of;
using torch::Tensor;
using Options = FullyShardedDataParallelOptions;
using Model = FullyShardedDataParallel<UnitNet>;

struct Case {
  testing::TrainingProgram program;
  Options options = {};
};

// Chooses the linear layers, which are no ShardUnits.
bool has_own_parameters(const WrapCandidate& candidate) {
  return !candidate.module.parameters(/*recurse=*/false).empty();
}

std::vector<Case> cases() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  return {
      {{"plain"}},
      {{"without prefetch"}, {.num_prefetched = 0}},
      {{"kept until backward"}, {.reshard = Reshard::kAfterBackward}},
      {{"kept until reduction"},
       {.reshard = Reshard::kAfterReduction, .reshard_root = Reshard::kAfterReduction}},
      {{"root freed, too"}, {.reshard_root = Reshard::kAfterForward}},
      {{"mapped is gathered"}, {.form = ShardForm::kMapped}},
      {{"plain modules"}, {.wrap_policy = has_own_parameters}},
      {{.name = "plain modules, accumulating", .accumulates = true},
       {.reshard = Reshard::kAfterBackward, .wrap_policy = has_own_parameters}},
      {{.name = "frozen", .has_frozen = true}},
      {{.name = "accumulating", .accumulates = true}},
      {{.name = "accumulating, set to zero", .accumulates = true, .zeroes = true}},
      {{.name = "adding", .adds_reduced = true, .zeroes = true}},
      {{.name = "clipped", .max_norm = 0.05}},
      {{.name = "clipped by the maximum", .max_norm = 0.01, .norm_type = kInfinity}},
      {{.name = "scaled", .overflows = true}},
      {{.name = "scaled and clipped", .max_norm = 0.05, .overflows = true}},
  };
}

Options with_units(Options options) {
  if (!options.wrap_policy) options.wrap_policy = wrap_shard_units();
  return options;
}

struct Trained {
  Values values;
  std::string waits;  // see train_on_rows()
};

Trained train(const Case& of, const Ranks& ranks, const c10::Device& device,
              Streams streams = Streams::kOne) {
  std::optional<testing::OtherStream> other;
  if (streams == Streams::kNotTheDefault) other.emplace(device);
  Model model(testing::net_on(device, of.program.has_frozen), ranks, with_units(of.options));
  ShardedOptimizer<AdamW> optimizer(model, adamw());
  if (streams == Streams::kTwo) other.emplace(device);
  const std::string waits =
      testing::train_on_rows(of.program, model, optimizer, ranks.group(), device);
  return {.values = whole_values_of(model), .waits = waits};
}

Values trained(const Case& of, const ProcessGroup& group, const c10::Device& device) {
  return train(of, group, device).values;
}

class FsdpOnDevicesTest : public testing::TrainingOnDevices {};

INSTANTIATE_TEST_SUITE_P(Devices, FsdpOnDevicesTest,
                         ::testing::Values(DeviceEngine::kEnqueues, DeviceEngine::kStaged,
                                           DeviceEngine::kStagedInPieces),
                         [](const auto& test) { return testing::name_of(test.param); });

TEST_P(FsdpOnDevicesTest, TrainsAsOneProcessOnTheCpu) {
  expect_in_worlds<Case>(cases(), trained);
}

TEST_P(FsdpOnDevicesTest, DelaysOfKernelsChangeNothing) {
  expect_with_delays<Case>({{{"plain"}}, {{.name = "accumulating", .accumulates = true}}}, 10,
                           trained);
}

TEST_P(FsdpOnDevicesTest, ReplicasOfShardsTrainAsOneProcess) {
  late::set_delays({.longest = std::chrono::microseconds(100), .seed = 3});
  for (const Case& of :
       share_on_engine<Case>({{{"plain"}},
                              {{.name = "frozen", .has_frozen = true}},
                              {{.name = "accumulating", .accumulates = true}},
                              {{.name = "scaled", .max_norm = 0.05, .overflows = true}}})) {
    const auto on_mesh = [](const Case& own, const ProcessGroup& group, const c10::Device& device) {
      const DeviceMesh mesh(group, {{"replicate", 2}, {"shard", 2}});
      const Trained found = train(own, mesh, device);
      if (GetParam() == DeviceEngine::kEnqueues) require(found.waits.empty(), found.waits);
      return found.values;
    };
    expect_one_process<Case>(of, 4, on_mesh, "replicas");
  }
}

TEST_P(FsdpOnDevicesTest, APartKeptInAGroupTrainsAsOneProcess) {
  const Case of{{"onto group"}, {.reshard = Reshard::kOntoGroup, .reshard_group_size = 2}};
  for (const uint64_t seed : share_on_engine(testing::test_seeds(3))) {
    late::set_delays({.longest = std::chrono::microseconds(200), .seed = seed});
    expect_one_process<Case>(of, 4, trained, format("seed {}", seed));
  }
}

// The truth is the same program on the CPU, because low precision rounds.
TEST_P(FsdpOnDevicesTest, MixedPrecisionIsThatOfTheCpu) {
  for (const auto reduce : {torch::kFloat32, torch::kBFloat16}) {
    const Case of{
        {"mixed"},
        {.precision = {
             .parameters = torch::kBFloat16, .reduce = reduce, .outputs = torch::kFloat32}}};
    Values expected;
    const auto on_cpu = testing::run_ranks_as_threads(2, [&](testing::RankContext& context) {
      at::set_num_threads(1);
      const ProcessGroup group(connect_ranks(context));
      const Values values = trained(of, group, c10::Device(at::kCPU));
      if (group.rank() == 0) expected = values;
      group.close();
    });
    ASSERT_TRUE(on_cpu.ok()) << on_cpu.failures();
    late::set_delays({.longest = std::chrono::microseconds(100), .seed = 7});
    expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
      testing::require_close(trained(of, group, device), expected, 1e-7, "mixed");
    });
  }
}

TEST_P(FsdpOnDevicesTest, WholeParametersAreReadWrittenAndEvaluated) {
  UnitNet alone;
  const Tensor expected = alone.forward(inputs_of(2)).detach();
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    late::set_delays({.longest = std::chrono::microseconds(100), .seed = 2});
    const auto net = testing::net_on(device);
    Model model(net, group, with_units({}));
    ShardedOptimizer<SGD> optimizer(model, torch::optim::SGDOptions(0.1));
    const auto evaluated = [&] {
      const torch::NoGradGuard no_grad;
      return model(inputs_of(2).to(device)).cpu();
    };
    require(torch::allclose(evaluated(), expected, 1e-12, 1e-14), "before training");
    loss_of(model(inputs_of(0).to(device))).backward();
    const Tensor between = evaluated();
    require(torch::allclose(between, expected, 1e-12, 1e-14), "before the step");
    optimizer.step();
    require(!torch::allclose(evaluated(), expected, 1e-6, 1e-6), "after the step");
    {
      auto full = model.summon_full_params();
      const torch::NoGradGuard no_grad;
      UnitNet fresh;
      const auto source = fresh.parameters();
      const auto target = net->parameters();
      for (size_t i = 0; i < target.size(); ++i) target[i].copy_(source[i]);
      full.write_back();
    }
    require(torch::allclose(evaluated(), expected, 1e-12, 1e-14), "after write_back()");
  });
}

TEST_P(FsdpOnDevicesTest, AForwardThatThrowsLeavesTheModelUsable) {
  const Values expected = testing::trained_alone({"plain"});
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    late::set_delays({.longest = std::chrono::microseconds(100), .seed = 4});
    const auto net = testing::net_on(device);
    Model model(net, group, with_units({}));
    ShardedOptimizer<AdamW> optimizer(model, adamw());
    const testing::Rows rows = rows_of(group.rank(), 2);
    for (int step = 0; step < kNumSteps; ++step) {
      const Tensor x = inputs_of(step).slice(0, rows.begin, rows.end).to(device);
      if (step > 0) {
        net->blocks[1]->throws_next = true;
        require(failure_of([&] { model(x); }).find("a block that fails") != std::string::npos,
                "the exception");
      }
      optimizer.zero_grad();
      loss_of(model(x)).backward();
      optimizer.step();
    }
    testing::require_close(whole_values_of(model), expected, 1e-9, "after exceptions");
  });
}

// The values of a deferred model are those of the CPU's generator.
TEST_P(FsdpOnDevicesTest, DeferredAndUnmovedModelsAreMovedUnitByUnit) {
  torch::manual_seed(11);
  const auto make = [] {
    const auto net = std::make_shared<UnitNet>();
    const torch::NoGradGuard no_grad;
    for (const Tensor& parameter : net->parameters()) parameter.uniform_(-1, 1);
    net->register_buffer("table", torch::rand({3}));
    return net;
  };
  const auto alone = make();
  const Values expected = testing::values_of(*alone);
  const auto on_all = [&](const ProcessGroup& group, const std::shared_ptr<UnitNet>& net) {
    const c10::Device device = late::device(group.rank());
    Options options = with_units({});
    options.device = device;
    Model model(net, group, options);
    testing::require_close(whole_values_of(model), expected, 0, "the values");
    require(net->named_buffers()["table"].device() == device, "the buffer's device");
    const Tensor output = model(inputs_of(0).to(device));
    require(torch::allclose(output.cpu(), alone->forward(inputs_of(0)), 1e-12, 1e-14), "forward");
    loss_of(output).backward();
  };
  std::vector<std::shared_ptr<UnitNet>> deferred;
  for (int rank = 0; rank < 2; ++rank) {
    torch::manual_seed(11);
    deferred.push_back(defer_init(make));
  }
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device&) {
    on_all(group, deferred[static_cast<size_t>(group.rank())]);
  });
  std::vector<std::shared_ptr<UnitNet>> unmoved;
  for (int rank = 0; rank < 2; ++rank) {
    torch::manual_seed(11);
    unmoved.push_back(make());
  }
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device&) {
    on_all(group, unmoved[static_cast<size_t>(group.rank())]);
  });
}

TEST_P(FsdpOnDevicesTest, WhatDevicesCannotDoIsRefusedOnAllRanks) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const auto expect_refusal = [&](const Options& options, const c10::Device& place,
                                    const std::string& text) {
      const auto net = std::make_shared<UnitNet>();
      net->to(place);
      const std::string failure = failure_of([&] { Model(net, group, with_units(options)); });
      testing::require_refusal(failure, text);
    };
    const c10::Device elsewhere = late::device(6);
    expect_refusal({.offload = FileOffload{.folder = "/tmp"}}, device, "leave offload out");
    expect_refusal({}, group.rank() == 1 ? elsewhere : device, "is on " + elsewhere.str());
    expect_refusal({.device = elsewhere}, device, "options.device is " + elsewhere.str());
    const auto net = std::make_shared<UnitNet>();
    net->blocks[1]->to(device);
    const std::string failure = failure_of([&] { Model(net, group, with_units({})); });
    require(failure.find("move the module to one device") != std::string::npos, failure);
    // An access to the memory of a parameter that is not gathered throws where the program makes
    // it.
    const auto sharded = std::make_shared<UnitNet>();
    sharded->to(device);
    const Model model(sharded, group, with_units({}));
    require(failure_of([&] {
              sharded->blocks[0]->up->weight.const_data_ptr();
            }).find("are sharded") != std::string::npos,
            "an access to a sharded parameter");
  });
}

class EnqueuedFsdpTest : public FsdpOnDevicesTest {};
INSTANTIATE_TEST_SUITE_P(Devices, EnqueuedFsdpTest, ::testing::Values(DeviceEngine::kEnqueues));

// A norm and a search for values that are not finite wait once each, and nothing else waits.
TEST_P(EnqueuedFsdpTest, AStepWaitsForTheDeviceForItsNormsOnly) {
  for (const Case& of : cases()) {
    expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
      const std::string waits = train(of, group, device).waits;
      require(waits.empty(), waits);
    });
  }
}

TEST_P(EnqueuedFsdpTest, NormsAndScalesWaitOnce) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const auto net = testing::net_on(device);
    Model model(net, group, with_units({}));
    GradScaler scaler;
    scaler.scale(loss_of(model(inputs_of(0).to(device)))).backward();
    const auto expect_one_wait = [&](const std::string& call, const std::function<void()>& body) {
      const uint64_t before = late::counts(group.rank()).num_synchronous();
      body();
      const uint64_t waits = late::counts(group.rank()).num_synchronous() - before;
      require(waits == 1, format("{}: {} waits", call, waits));
    };
    expect_one_wait("unscale_", [&] { scaler.unscale_(model); });
    expect_one_wait("clip_grad_norm_", [&] { clip_grad_norm_(model, 0.01); });
    expect_one_wait("check_gradients_finite", [&] { check_gradients_finite(model); });
  });
}

const c10::StorageImpl* storage_of(const Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

// Gradients of shards keep their storage in each step, although the device may use it until long
// after the pass: another storage would mean that the memory was copied.
TEST_P(EnqueuedFsdpTest, GradientsKeepTheirMemory) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const auto net = testing::net_on(device);
    Model model(net, group, with_units({}));
    ShardedOptimizer<SGD> optimizer(model, torch::optim::SGDOptions(0.1));
    std::vector<const c10::StorageImpl*> first;
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      std::vector<const c10::StorageImpl*> memory;
      {
        const late::StreamHold hold(testing::late_runtime().current_stream(device));
        loss_of(model(inputs_of(0).to(device, /*non_blocking=*/true))).backward();
        for (const Tensor& values : model.parameters()) {
          if (values.numel() > 0) memory.push_back(storage_of(values.grad()));
        }
        optimizer.zero_grad();
        loss_of(model(inputs_of(0).to(device, /*non_blocking=*/true))).backward();
        for (size_t i = 0, k = 0; i < model.parameters().size(); ++i) {
          const Tensor values = model.parameters()[i];
          if (values.numel() == 0) continue;
          require(storage_of(values.grad()) == memory[k++], "another storage");
        }
      }
      optimizer.step();
      if (step == 2) first = memory;
      require(step < 2 || memory == first, "the storage of another step");
    }
  });
}

// On another stream than that of the construction, autograd accumulates the gradients on the
// latter.
TEST_P(EnqueuedFsdpTest, ATrainingOnAnotherStreamIsThatOfOneProcess) {
  for (const Streams streams : {Streams::kTwo, Streams::kNotTheDefault}) {
    expect_with_delays<Case>(
        {{{"plain"}},
         {{.name = "accumulating", .accumulates = true}},
         {{"kept until backward"}, {.reshard = Reshard::kAfterBackward}}},
        6, [&](const Case& of, const ProcessGroup& group, const c10::Device& device) {
          return train(of, group, device, streams).values;
        });
  }
}

// The second backward of a step adds its reduced gradients, which lie in memory of the stream of
// the construction, to those of the first one.
TEST_P(EnqueuedFsdpTest, AReducedGradientIsFreedBehindItsAddition) {
  const auto sgd = torch::optim::SGDOptions(0.1);
  UnitNet alone;
  std::vector<Tensor> distinct;
  for (const NamedTensor& named : distinct_parameters(alone)) distinct.push_back(named.tensor);
  SGD step_of_alone(distinct, sgd);
  for (const int part : {0, 1}) loss_of(alone.forward(inputs_of(part))).backward();
  step_of_alone.step();
  const Values expected = testing::values_of(alone);
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    Model model(testing::net_on(device), group, with_units({}));
    ShardedOptimizer<SGD> optimizer(model, sgd);
    const testing::OtherStream other(device);
    const testing::Rows rows = rows_of(group.rank(), 2);
    for (const int part : {0, 1}) {
      const Tensor x = inputs_of(part).slice(0, rows.begin, rows.end).to(device);
      loss_of(model(testing::with_late_end_of_backward(x))).backward();
    }
    optimizer.step();
    testing::require_close(whole_values_of(model), expected, 1e-12, "the added gradients");
  });
}

std::vector<NamedTensor> one_parameter(double value, const c10::Device& device) {
  return {{.name = "weight",
           .tensor = torch::full({64}, value, torch::kDouble).to(device).requires_grad_()}};
}

// The gather is late, because the stream that has issued it is held; the values are read on another
// stream.
TEST_P(EnqueuedFsdpTest, AnotherStreamReadsGatheredParametersBehindTheGather) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const auto parameters = one_parameter(3, device);
    shard::FlatParameters flat(parameters, group);
    const c10::Stream side = pooled(device);
    Tensor read;
    {
      const late::StreamHold hold(testing::late_runtime().current_stream(device));
      flat.unshard_async();
      flat.wait_unsharded();
      const c10::StreamGuard guard(side);
      flat.wait_unsharded();
      read = parameters[0].tensor.detach().clone();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    const c10::StreamGuard guard(side);
    require(torch::all(read.cpu() == 3).item<bool>(), "the values");
  });
}

// The pool drops a buffer, because one of another size is taken, while a kernel of another stream
// still reads it. The next tensor of the stream that has made the buffer gets its memory. The
// buffer is dropped on that stream or on a third one.
TEST_P(EnqueuedFsdpTest, ABufferThatThePoolDropsIsFreedBehindItsLastUse) {
  for (const bool is_dropped_elsewhere : {false, true}) {
    expect_on_all(1, [&](const ProcessGroup&, const c10::Device& device) {
      shard::FlatBufferPool pool;
      Tensor buffer = pool.take(64, torch::kDouble, device);
      buffer.fill_(3);
      const c10::Stream side = pooled(device);
      device::StreamPoint::on_current_stream(device).block(side);
      late::StreamHold hold(side);
      Tensor read;
      {
        const c10::StreamGuard guard(side);
        read = buffer.clone();
        pool.give_back(std::exchange(buffer, Tensor()));
      }
      {
        std::optional<c10::StreamGuard> guard;
        if (is_dropped_elsewhere) guard.emplace(pooled(device));
        pool.take(200, torch::kDouble, device);
      }
      const Tensor next = torch::full({64}, -1, at::device(device).dtype(torch::kDouble));
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      hold.release();
      const c10::StreamGuard guard(side);
      require(torch::all(read.cpu() == 3).item<bool>(), "the values that were in the buffer");
    });
  }
}

// A buffer is given back while a kernel of another stream still reads it, and is used again.
TEST_P(EnqueuedFsdpTest, ABufferIsUsedAgainBehindItsLastUse) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const auto pool = std::make_shared<shard::FlatBufferPool>();
    const auto first = one_parameter(3, device);
    const auto second = one_parameter(5, device);
    shard::FlatParameters of_first(first, group, {.pool = pool});
    shard::FlatParameters of_second(second, group, {.pool = pool});
    const c10::Stream side = pooled(device);
    Tensor read;
    {
      std::optional<late::StreamHold> hold;
      {
        const c10::StreamGuard guard(side);
        of_first.unshard_async();
        of_first.wait_unsharded();
        hold.emplace(side);
        read = first[0].tensor.detach().clone();
        of_first.reshard();
      }
      of_second.unshard_async();
      of_second.wait_unsharded();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    require(torch::all(second[0].tensor.detach().cpu() == 5).item<bool>(), "the second buffer");
    const c10::StreamGuard guard(side);
    require(torch::all(read.cpu() == 3).item<bool>(), "the values that were read");
  });
}

}  // namespace
}  // namespace cadre::fsdp_on_devices
