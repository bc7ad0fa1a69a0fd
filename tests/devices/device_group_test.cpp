// Tests groups on memory of a device with the late device, whose kernels run late. Each rank is a
// thread with a device of its own. A StreamHold makes a wrong order certain: nothing that is
// enqueued on the held stream has run when the call is made.
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "on_devices.h"

namespace cadre {
namespace {

namespace late = testing::late;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using torch::Tensor;

using testing::DeviceEngine;

class DeviceGroupTest : public testing::OnDevices {};

at::Tensor values(int rank, at::ScalarType type, int64_t rows = 4) {
  return ((torch::arange(rows * 6) * 3 + rank * 5).fmod(7) + 1).view({rows, 6}).to(type);
}

using Operation = std::function<std::vector<Tensor>(const ProcessGroup&, const Tensor&)>;
using NamedOperation = std::pair<std::string, Operation>;

std::vector<NamedOperation> operations_with_one_result() {
  const auto list_like = [](const ProcessGroup& group, const Tensor& input) {
    std::vector<Tensor> list;
    for (int r = 0; r < group.world_size(); ++r) list.push_back(torch::empty_like(input));
    return list;
  };
  return {{"all_reduce",
           [](const ProcessGroup& g, const Tensor& t) {
             Tensor sum = t.clone();
             g.all_reduce(sum);
             Tensor largest = t.clone();
             g.all_reduce_async(largest, {.op = ReduceOp::kMax}).wait();
             Tensor columns = t.clone().t();
             g.all_reduce(columns, {.op = ReduceOp::kMin});
             return std::vector<Tensor>{sum, largest, columns};
           }},
          {"broadcast",
           [](const ProcessGroup& g, const Tensor& t) {
             Tensor own = t.clone();
             g.broadcast(own, {.root = g.world_size() - 1});
             g.broadcast_async(own, {.root = 0}).wait();
             return std::vector<Tensor>{own};
           }},
          {"all_gather", [list_like](const ProcessGroup& g, const Tensor& t) {
             Tensor flat = torch::empty({g.world_size() * t.numel()}, t.options());
             g.all_gather(flat, t.flatten());
             std::vector<Tensor> list = list_like(g, t);
             g.all_gather(list, t);
             std::vector<Tensor> later = list_like(g, t);
             g.all_gather_async(later, t).wait();
             list.insert(list.end(), later.begin(), later.end());
             list.push_back(flat);
             return list;
           }}};
}

std::vector<NamedOperation> operations_with_parts() {
  const auto list_like = [](const ProcessGroup& group, const Tensor& input) {
    std::vector<Tensor> list;
    for (int r = 0; r < group.world_size(); ++r) list.push_back(torch::empty_like(input));
    return list;
  };
  return {
      {"reduce_scatter",
       [](const ProcessGroup& g, const Tensor& t) {
         const Tensor all = torch::cat(std::vector<Tensor>(static_cast<size_t>(g.world_size()), t));
         Tensor own = torch::empty_like(t);
         g.reduce_scatter(own, all);
         Tensor of_list = torch::empty_like(t);
         g.reduce_scatter_async(of_list,
                                std::vector<Tensor>(static_cast<size_t>(g.world_size()), t))
             .wait();
         return std::vector<Tensor>{own, of_list};
       }},
      {"reduce, gather and scatter",
       [list_like](const ProcessGroup& g, const Tensor& t) {
         Tensor sum = t.clone();
         g.reduce(sum, {.root = 0});
         std::vector<Tensor> list;
         if (g.rank() == 0) list = list_like(g, t);
         g.gather(list, t, {.root = 0});
         Tensor back = torch::empty_like(t);
         g.scatter(back, list, {.root = 0});
         if (g.rank() != 0) sum.zero_();
         list.push_back(sum);
         list.push_back(back);
         return list;
       }},
      {"all_to_all",
       [](const ProcessGroup& g, const Tensor& t) {
         const Tensor all = torch::cat(std::vector<Tensor>(static_cast<size_t>(g.world_size()), t));
         Tensor exchanged = torch::empty_like(all);
         g.all_to_all(exchanged, all);
         const Tensor odd = torch::empty_like(all);
         g.all_to_all_async(odd, all).wait();
         return std::vector<Tensor>{exchanged, odd};
       }},
      {"coalesced",
       [](const ProcessGroup& g, const Tensor& t) {
         std::vector<Tensor> both = {t.clone(), t.flatten().clone()};
         g.all_reduce_coalesced(both);
         g.all_reduce_coalesced_async(both, {.op = ReduceOp::kMax}).wait();
         return both;
       }},
  };
}

// Runs each operation on the device and on the CPU of one group. Both have the same values.
TEST_P(DeviceGroupTest, EveryOperationEqualsThatOfTheCpu) {
  std::vector<NamedOperation> operations = operations_with_one_result();
  std::ranges::move(operations_with_parts(), std::back_inserter(operations));
  for (const auto& [name, operation] : operations) {
    for (const int num_ranks : {1, 2, 3}) {
      expect_on_all(num_ranks, [&](const ProcessGroup& group, const c10::Device& device) {
        for (const at::ScalarType type : {torch::kFloat, torch::kBFloat16, torch::kLong}) {
          const Tensor input = values(group.rank(), type);
          const std::vector<Tensor> expected = operation(group, input);
          const std::vector<Tensor> found = operation(group, input.to(device));
          require(found.size() == expected.size(), "as many results");
          for (size_t i = 0; i < found.size(); ++i) {
            require(found[i].device() == device, "the result is on the device");
            require(torch::equal(found[i].cpu(), expected[i]), name);
          }
        }
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceGroupTest,
                         ::testing::Values(DeviceEngine::kEnqueues, DeviceEngine::kNccl,
                                           DeviceEngine::kStaged, DeviceEngine::kStagedInPieces),
                         [](const auto& test) { return testing::name_of(test.param); });

// The input is written on the stream of the issue, and the result is read on another stream. A
// staged engine waits on the host, so nothing may be held for it; delays make a wrong order likely.
TEST_P(DeviceGroupTest, StreamsOfTheIssueAndOfTheWaitAreOrdered) {
  const bool enqueues = testing::is_stream_ordered(GetParam());
  if (!enqueues) late::set_delays({.longest = std::chrono::microseconds(500), .seed = 7});
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const c10::Stream issuing = pooled(device);
    const c10::Stream waiting = pooled(device);
    Tensor tensor;
    Tensor seen;
    std::vector<Tensor> list;
    std::vector<Tensor> seen_of_list;
    {
      const c10::StreamGuard guard(issuing);
      tensor = torch::zeros({1000}, at::TensorOptions().device(device));
      list = {torch::empty_like(tensor), torch::empty_like(tensor)};
    }
    testing::late_runtime().current_stream(device).synchronize();
    issuing.synchronize();
    std::optional<late::StreamHold> hold;
    if (enqueues) hold.emplace(issuing);
    Work sum = [&] {
      const c10::StreamGuard guard(issuing);
      tensor.fill_(group.rank() + 1);
      return group.all_reduce_async(tensor);
    }();
    Work gathered = [&] {
      const c10::StreamGuard guard(issuing);
      return group.all_gather_async(list, tensor);
    }();
    {
      const c10::StreamGuard guard(waiting);
      sum.wait();
      seen = tensor.clone();
      gathered.wait();
    }
    {
      // A second wait, on a third stream, is ordered behind the copies of the first one.
      const c10::StreamGuard guard(pooled(device));
      gathered.wait();
      seen_of_list = {list[0].clone(), list[1].clone()};
    }
    if (hold) {
      require(!sum.is_completed(), "wait() does not block the host");
      hold->release();
    }
    late::synchronize_all();
    require(torch::all(seen.cpu() == 3).item<bool>(), "the sum");
    require(torch::all(seen_of_list[0].cpu() == 3).item<bool>(), "the gathered sum");
    require(torch::all(seen_of_list[1].cpu() == 3).item<bool>(), "the gathered sum");
  });
}

class EnqueuedCallTest : public DeviceGroupTest {};
INSTANTIATE_TEST_SUITE_P(Devices, EnqueuedCallTest,
                         ::testing::Values(DeviceEngine::kEnqueues, DeviceEngine::kNccl),
                         [](const auto& test) { return testing::name_of(test.param); });

// The program frees the tensor of a call that has returned; the same memory is given out again.
TEST_P(EnqueuedCallTest, KeepsItsMemoryUntilTheDeviceHasUsedIt) {
  for (const bool is_blocking : {true, false}) {
    expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
      const c10::Stream other = pooled(device);
      Tensor next;
      {
        late::StreamHold hold(other);
        Tensor freed = torch::ones({5000}, at::TensorOptions().device(device));
        const void* address = freed.const_data_ptr();
        {
          // The engine runs behind the held stream, so it writes late.
          const c10::StreamGuard guard(other);
          if (is_blocking) {
            group.all_reduce(freed);
          } else {
            static_cast<void>(group.all_reduce_async(freed));
          }
        }
        freed.reset();
        next = torch::full({5000}, 7.0, at::TensorOptions().device(device));
        require(next.const_data_ptr() != address, "the memory is still in use");
      }
      late::synchronize_all();
      require(torch::all(next.cpu() == 7).item<bool>(), "nobody else writes to the tensor");
    });
  }
}

// The packed result of a list is memory of the stream of the call, and is copied to the list on the
// stream of the wait. The program drops the Work while this stream is held.
TEST_P(DeviceGroupTest, APackedResultIsNotGivenOutAgainBeforeItIsCopied) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const c10::Stream issuing = pooled(device);
    const c10::Stream waiting = pooled(device);
    require(issuing != waiting, "two streams");
    const auto on_issuing = [&](const std::function<Tensor()>& make) {
      const c10::StreamGuard guard(issuing);
      return make();
    };
    const at::TensorOptions options = at::device(device);
    const Tensor tensor =
        on_issuing([&] { return torch::full({1000}, group.rank() + 1.0, options); });
    const std::vector<Tensor> list = {on_issuing([&] { return torch::empty_like(tensor); }),
                                      on_issuing([&] { return torch::empty_like(tensor); })};
    issuing.synchronize();
    late::StreamHold hold(waiting);
    {
      const Work gathered = [&] {
        const c10::StreamGuard guard(issuing);
        return group.all_gather_async(list, tensor);
      }();
      const c10::StreamGuard guard(waiting);
      gathered.wait();
    }
    const Tensor next = on_issuing([&] { return torch::full({2000}, 7.0, options); });
    hold.release();
    late::synchronize_all();
    require(torch::all(list[0].cpu() == 1).item<bool>(), "the part of rank 0");
    require(torch::all(list[1].cpu() == 2).item<bool>(), "the part of rank 1");
    require(torch::all(next.cpu() == 7).item<bool>(), "the tensor that was made next");
  });
}

// Ranks other than the root may pass any tensor as the output of gather or the input of scatter.
TEST_P(DeviceGroupTest, TensorsThatOnlyTheRootUsesAreIgnoredElsewhere) {
  expect_on_all(3, [](const ProcessGroup& group, const c10::Device& device) {
    const bool is_root = group.rank() == 1;
    const Tensor own = torch::full({2}, group.rank() + 1.0, at::device(device));
    const Tensor all = is_root ? torch::zeros({6}, at::device(device)) : torch::zeros({1});
    group.gather(all, own, {.root = 1});
    group.gather_async(all, own, {.root = 1}).wait();
    const Tensor back = torch::zeros({2}, at::device(device));
    group.scatter(back, all, {.root = 1});
    require(torch::equal(back.cpu(), own.cpu()), "scatter");
    back.zero_();
    group.scatter_async(back, all, {.root = 1}).wait();
    require(torch::equal(back.cpu(), own.cpu()), "scatter_async");
  });
}

TEST_P(DeviceGroupTest, ModesOfAutogradOfOneCallDoNotChangeTheNext) {
  expect_on_all(2, [](const ProcessGroup& group, const c10::Device& device) {
    const auto expect_sum = [&](int64_t numel) {
      const Tensor tensor = torch::full({numel}, group.rank() + 1.0, at::device(device));
      group.all_reduce(tensor);
      require(torch::all(tensor.cpu() == 3).item<bool>(), "the sum");
    };
    {
      const c10::InferenceMode inference;
      expect_sum(100);
    }
    expect_sum(50);
    {
      const c10::InferenceMode inference;
      expect_sum(200);
    }
    expect_sum(300);
  });
}

class SubgroupTest : public DeviceGroupTest {};
INSTANTIATE_TEST_SUITE_P(Devices, SubgroupTest,
                         ::testing::Values(DeviceEngine::kNccl, DeviceEngine::kStaged,
                                           DeviceEngine::kStagedInPieces),
                         [](const auto& test) { return testing::name_of(test.param); });

TEST_P(SubgroupTest, WorksOnTheDeviceToo) {
  expect_on_all(4, [](const ProcessGroup& group, const c10::Device& device) {
    const ProcessGroup half = *group.split({.color = group.rank() % 2, .key = group.rank()});
    const Tensor tensor = torch::full({100}, group.rank() + 1.0, at::device(device));
    half.all_reduce(tensor);
    require(torch::all(tensor.cpu() == (group.rank() % 2 == 0 ? 4 : 6)).item<bool>(), "the sum");
    require(half.device() == device, "the device of the subgroup");
    half.close();
  });
}

TEST_P(DeviceGroupTest, CallsOnTheCpuAndOnTheDeviceAlternate) {
  expect_on_all(3, [](const ProcessGroup& group, const c10::Device& device) {
    late::set_delays({});
    for (int round = 0; round < 30; ++round) {
      const Tensor on_cpu = torch::full({10}, group.rank() + 1.0);
      const Tensor on_device = torch::full({10}, group.rank() + 1.0, at::device(device));
      const Work first = group.all_reduce_async(on_device);
      const Work second = group.all_reduce_async(on_cpu);
      group.all_reduce(on_device);
      second.wait();
      require(torch::all(on_cpu == 6).item<bool>(), "the sum on the CPU");
      require(torch::all(on_device.cpu() == 18).item<bool>(), "the sum on the device");
    }
  });
}

// Nothing has been issued on any rank, so the group is usable afterwards.
TEST_P(DeviceGroupTest, AStreamThatRecordsAGraphIsRefusedByName) {
  expect_on_all(2, [](const ProcessGroup& group, const c10::Device& device) {
    const Tensor tensor = torch::full({4}, group.rank() + 1.0, at::device(device));
    const int other = 1 - group.rank();
    std::vector<std::string> failures;
    {
      const c10::Stream own = pooled(device);
      const late::StreamCapture capture(own);
      const c10::StreamGuard guard(own);
      if (!device::is_capture_current(device)) return;  // this version of torch does not say so
      failures.push_back(failure_of([&] { group.all_reduce(tensor); }));
      failures.push_back(failure_of([&] { group.all_gather({tensor, tensor.clone()}, tensor); }));
      failures.push_back(failure_of([&] { group.send(tensor, other); }));
      failures.push_back(failure_of([&] { group.batch_send_recv({P2POp::recv(tensor, other)}); }));
    }
    for (const std::string& failure : failures) {
      require(failure.starts_with("kInvalidArgument: ") &&
                  failure.find("whose current stream records a graph") != std::string::npos,
              failure);
    }
    group.all_reduce(tensor);
    require(torch::all(tensor.cpu() == 3).item<bool>(), "the sum");
  });
}

TEST_P(DeviceGroupTest, TensorsElsewhereAreRefusedByName) {
  expect_on_all(2, [](const ProcessGroup& group, const c10::Device& device) {
    const Tensor own = torch::ones({2}, at::device(device));
    const Tensor on_cpu = torch::ones({2});
    const c10::Device other = late::device(group.rank() + 4);
    const Tensor elsewhere = torch::ones({2}, at::device(other));
    const std::string name = group.rank() == 0 ? "late:0" : "late:1";
    const std::string prefix =
        "kInvalidArgument: all_reduce on group \"world\", rank " + std::to_string(group.rank());
    require(failure_of([&] { group.all_reduce(elsewhere); })
                .starts_with(prefix + ": the tensor (2) is on " + other.str() +
                             ", but this rank's device in the group is "),
            failure_of([&] { group.all_reduce(elsewhere); }));
    const auto refused = [](const std::string& failure, const std::string& text) {
      require(failure.find(text) != std::string::npos, failure);
    };
    const std::string two = "its tensors are on ";
    refused(failure_of([&] { group.all_gather(torch::empty({4}), own); }), two);
    refused(failure_of([&] { group.all_gather({on_cpu, on_cpu.clone()}, own); }), two);
    refused(failure_of([&] { group.all_gather({on_cpu, own.clone()}, own); }), two);
    refused(failure_of([&] { group.all_reduce_coalesced({own, on_cpu}); }), two);
    refused(failure_of([&] { group.send(elsewhere, 1 - group.rank()); }),
            "but this rank's device in the group is ");
    require(group.communicator().num_collectives() == 0, "no call got a number");
  });
}

}  // namespace
}  // namespace cadre
