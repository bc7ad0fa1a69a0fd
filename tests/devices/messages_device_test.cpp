// Tests messages between memory of devices with the late device, whose kernels run late. The
// expected values are computed from the rank of the sender. A StreamHold makes a wrong order
// certain: nothing that is enqueued on the held stream has run when the call is made.
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/tensor/group/messages/private_messages.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "on_devices.h"

namespace cadre {
namespace {

namespace late = testing::late;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using testing::DeviceEngine;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using torch::Tensor;

// A message of up to 16 KiB is sent at once, and a longer one waits for its receive.
constexpr int64_t kShort = 100;
constexpr int64_t kLong = 50'000;

Tensor numbers_of(int rank, int64_t numel, int64_t index = 0) {
  return (torch::arange(numel) * 7 + rank * 1009 + index * 31).fmod(251).to(torch::kFloat);
}

bool equals(const Tensor& received, const Tensor& expected) {
  return torch::equal(received.cpu(), expected);
}

class DeviceMessagesTest : public testing::OnDevices {
 protected:
  static Tensor empty_on(const c10::Device& device, int64_t numel) {
    return torch::full({numel}, -1.0F, at::device(device).dtype(torch::kFloat));
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, DeviceMessagesTest,
                         ::testing::Values(DeviceEngine::kEnqueues, DeviceEngine::kStaged),
                         [](const auto& test) { return testing::name_of(test.param); });

// Each rank computes what it sends, sends it around a ring in every form, and computes with what it
// has received.
TEST_P(DeviceMessagesTest, EveryFormSendsWhatTheDeviceHasComputed) {
  for (const uint64_t seed : share_on_engine(testing::test_seeds(10))) {
    late::set_delays({.longest = microseconds(seed == 1 ? 0 : 300), .seed = seed});
    for (const int64_t numel : {int64_t{0}, kShort, kLong}) {
      SCOPED_TRACE(format("seed {}, {} numbers", seed, numel));
      expect_on_all(3, [&](const ProcessGroup& group, const c10::Device& device) {
        const PrivateMessages messages(group, "cadre::Test");
        const int next = (group.rank() + 1) % 3;
        const int previous = (group.rank() + 2) % 3;
        const auto sent = [&](int64_t index) {
          return numbers_of(group.rank(), numel, index).to(device).mul(2).add(1);
        };
        const auto check = [&](const Tensor& received, int64_t index) {
          const Tensor expected = numbers_of(previous, numel, index) * 2 + 1;
          require(equals(received * 3, expected * 3), format("message {}", index));
        };
        std::vector<Tensor> received;
        for (int i = 0; i < 7; ++i) received.push_back(empty_on(device, numel));
        {
          const Work work = group.send_async(sent(0), next);
          group.recv(received[0], previous);
          work.wait();
        }
        const Work first = group.recv_async(received[1], previous, {.tag = 1});
        group.send(sent(1), next, {.tag = 1});
        first.wait();
        group.batch_send_recv({P2POp::send(sent(2), next), P2POp::recv(received[2], previous),
                               P2POp::send(sent(3), next, 5),
                               P2POp::recv(received[3], previous, 5)});
        const Work batch = messages.batch_send_recv_async(
            {P2POp::recv(received[4], previous), P2POp::send(sent(4), next)});
        const Work from_any = group.send_async(sent(5), next, {.tag = 9});
        require(group.recv_from_any(received[5], {.tag = 9}) == previous, "the sender");
        batch.wait();
        from_any.wait();
        // Neither the tensor that is sent nor the one that is received is contiguous.
        Tensor columns = torch::full({numel, 2}, -1.0F, at::device(device)).select(1, 1);
        const Tensor rows = torch::stack({sent(7), sent(6)}, 1).select(1, 1);
        const Work strided = group.send_async(rows, next);
        group.recv(columns, previous);
        strided.wait();
        for (int64_t i = 0; i < 6; ++i) check(received[static_cast<size_t>(i)], i);
        check(columns, 6);
      });
    }
  }
}

TEST_P(DeviceMessagesTest, ASendHasTheValuesOfTheCallersStreamAtTheCall) {
  for (const int64_t numel : {kShort, kLong}) {
    expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
      Tensor tensor = empty_on(device, numel);
      late::synchronize_all();
      if (group.rank() == 1) {
        group.recv(tensor, 0);
        require(equals(tensor, torch::full({numel}, 7.0F)), "the values at the call");
        return;
      }
      const c10::Stream stream = pooled(device);
      const c10::StreamGuard guard(stream);
      std::optional<late::StreamHold> hold(stream);
      tensor.fill_(7);
      const Work work = group.send_async(tensor, 1);
      tensor.fill_(9);
      std::this_thread::sleep_for(milliseconds(20));
      require(!work.is_completed(), "the device has not computed the message");
      hold.reset();
      work.wait();
    });
  }
}

// The memory was made on another stream, which may use it again at once when it is freed.
TEST_P(DeviceMessagesTest, TheGroupKeepsWhatIsSentUntilTheDeviceHasReadIt) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    if (group.rank() == 1) {
      Tensor received = empty_on(device, kLong);
      group.recv(received, 0);
      require(equals(received, torch::full({kLong}, 7.0F)), "the memory was used again");
      return;
    }
    const c10::Stream stream = pooled(device);
    Tensor tensor = torch::full({kLong}, 7.0F, at::device(device));
    late::synchronize_all();
    std::optional<late::StreamHold> hold(stream);
    std::optional<Work> work;
    {
      const c10::StreamGuard guard(stream);
      work = group.send_async(tensor, 1);
    }
    tensor.reset();
    const Tensor next = torch::full({kLong}, 99.0F, at::device(device));
    std::this_thread::sleep_for(milliseconds(20));
    hold.reset();
    work->wait();
  });
}

// The stream of the call still writes to the tensor when the message has arrived.
TEST_P(DeviceMessagesTest, AMessageArrivesAfterTheEarlierWorkOfTheCallersStream) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    if (group.rank() == 0) return group.send(numbers_of(0, kShort).to(device), 1);
    Tensor tensor = empty_on(device, kShort);
    late::synchronize_all();
    const c10::Stream calling = pooled(device);
    std::optional<late::StreamHold> hold(calling);
    std::optional<Work> work;
    {
      const c10::StreamGuard guard(calling);
      tensor.fill_(5);
      work = group.recv_async(tensor, 0);
    }
    work->wait();
    std::this_thread::sleep_for(milliseconds(20));
    hold.reset();
    late::synchronize_all();
    require(equals(tensor, numbers_of(0, kShort)), "the message was overwritten");
  });
}

TEST_P(DeviceMessagesTest, EveryStreamThatWaitsIsBehindTheMessage) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    if (group.rank() == 0) return group.send(numbers_of(0, kShort).to(device), 1);
    Tensor tensor = empty_on(device, kShort);
    late::synchronize_all();
    const Work work = group.recv_async(tensor, 0);
    const c10::Stream first = pooled(device);
    const c10::Stream second = pooled(device);
    std::optional<late::StreamHold> hold(first);
    {
      const c10::StreamGuard guard(first);
      work.wait();
    }
    const c10::StreamGuard guard(second);
    work.wait();
    const Tensor sum = tensor + 1;
    std::this_thread::sleep_for(milliseconds(20));
    hold.reset();
    require(equals(sum, numbers_of(0, kShort) + 1), "the second stream was ahead");
  });
}

TEST_P(DeviceMessagesTest, MessagesOfTheCpuKeepTheirPlaceBehindThoseOfADevice) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    if (group.rank() == 1) {
      Tensor on_device = empty_on(device, kShort);
      Tensor on_cpu = torch::zeros({kShort});
      group.recv(on_device, 0, {.tag = 4});
      group.recv(on_cpu, 0, {.tag = 4});
      require(equals(on_device, numbers_of(0, kShort, 1)), "the first message");
      require(equals(on_cpu, numbers_of(0, kShort, 2)), "the second message");
      return;
    }
    const Tensor values = numbers_of(0, kShort, 1).to(device);
    const c10::Stream stream = pooled(device);
    std::optional<late::StreamHold> hold(stream);
    const c10::StreamGuard guard(stream);
    const Work first = group.send_async(values, 1, {.tag = 4});
    const Work second = group.send_async(numbers_of(0, kShort, 2), 1, {.tag = 4});
    std::this_thread::sleep_for(milliseconds(20));
    hold.reset();
    first.wait();
    second.wait();
  });
}

// A rank whose tensor is on the CPU exchanges messages with one whose tensor is on a device.
TEST_P(DeviceMessagesTest, OneSideMayBeOnTheCpu) {
  for (const int64_t numel : {kShort, kLong}) {
    expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
      const int other = 1 - group.rank();
      const c10::Device own = group.rank() == 0 ? device : c10::Device(at::kCPU);
      Tensor received = empty_on(own, numel);
      group.batch_send_recv({P2POp::send(numbers_of(group.rank(), numel).to(own), other),
                             P2POp::recv(received, other)});
      require(equals(received, numbers_of(other, numel)), "the message");
    });
  }
}

// The tensors are inference tensors, which libtorch lets nobody change outside of the mode.
TEST_P(DeviceMessagesTest, AMessageOfInferenceModeMayBeAwaitedOutsideOfIt) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const int other = 1 - group.rank();
    std::optional<Tensor> received;
    std::optional<Work> work;
    {
      const c10::InferenceMode inference;
      received = empty_on(device, kShort);
      work = group.batch_send_recv_async(
          {P2POp::send(numbers_of(group.rank(), kShort).to(device), other),
           P2POp::recv(*received, other)});
    }
    work->wait();
    require(equals(*received, numbers_of(other, kShort)), "the message");
  });
}

TEST_P(DeviceMessagesTest, TheHostNeverWaitsForTheDevice) {
  late::set_delays({.longest = microseconds(100), .seed = 3});
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const int other = 1 - group.rank();
    Tensor received = empty_on(device, kLong);
    Tensor sum = numbers_of(group.rank(), kLong).to(device);
    const late::Counts before = late::counts(group.rank());
    for (int i = 0; i < 5; ++i) {
      group.batch_send_recv_async({P2POp::send(sum, other), P2POp::recv(received, other)}).wait();
      sum.add_(received);
    }
    const late::Counts after = late::counts(group.rank());
    require(after.waits == before.waits, format("{} waits", after.waits - before.waits));
    require(after.num_synchronous() == before.num_synchronous(), "a synchronous operation");
    const Tensor both = numbers_of(0, kLong) + numbers_of(1, kLong);
    require(equals(sum, both * 16), "the sums");
  });
}

TEST_P(DeviceMessagesTest, ATimeoutNamesTheDeviceThatDoesNotComputeTheMessage) {
  std::vector<std::string> failures(2);
  static_cast<void>(run_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const Tensor tensor = empty_on(device, kShort);
    late::synchronize_all();
    failures[static_cast<size_t>(group.rank())] = failure_of([&] {
      if (group.rank() == 1) return group.recv(tensor, 0);
      const c10::Stream stream = pooled(device);
      const late::StreamHold hold(stream);
      const c10::StreamGuard guard(stream);
      group.send(tensor, 1, {.timeout = milliseconds(300)});
    });
  }));
  EXPECT_THAT(failures[0], HasSubstr("kTimeout"));
  EXPECT_THAT(failures[0], HasSubstr("tag 0: the device of rank 0 "));
  EXPECT_THAT(failures[0], HasSubstr("has not copied the message to the host"));
  EXPECT_THAT(failures[1], HasSubstr("kAborted"));
}

TEST_P(DeviceMessagesTest, TensorsOfOtherSizesAreNamedOnBothRanks) {
  std::vector<std::string> failures(2);
  static_cast<void>(run_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    failures[static_cast<size_t>(group.rank())] = failure_of([&] {
      if (group.rank() == 0) group.send(empty_on(device, 3), 1);
      if (group.rank() == 1) group.recv(empty_on(device, 4), 0);
      group.barrier();
    });
  }));
  for (const std::string& failure : failures) {
    EXPECT_THAT(failure, HasSubstr("rank 0 "));
    EXPECT_THAT(failure, HasSubstr("sent 12 bytes of float32"));
  }
}

}  // namespace
}  // namespace cadre
