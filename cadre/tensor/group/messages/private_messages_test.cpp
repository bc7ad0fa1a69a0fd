// Tests that messages of a wrapper and of the program with the same tags on one group do not match
// each other.
#include "cadre/tensor/group/messages/private_messages.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <vector>

#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::require;
using testing::run_groups;

at::Tensor filled(int64_t numel, double value) {
  return at::full({numel}, value, at::kFloat);
}
bool holds(const at::Tensor& tensor, double value) {
  return tensor.eq(value).all().item<bool>();
}

TEST(PrivateMessages, DoNotMeetThoseOfTheProgram) {
  for (const int64_t numel : {4, 50'000}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      const PrivateMessages messages(group, "cadre::Test");
      const at::Tensor received = at::zeros({numel}, at::kFloat);
      if (group.rank() == 0) {
        const Work program = group.send_async(filled(numel, 1), 1, {.tag = 2});
        const Work wrapper = messages.send_async(filled(numel, 2), 1, {.tag = 2});
        const Work other = messages.send_async(filled(numel, 3), 1, {.tag = 3});
        for (const Work& work : {program, wrapper, other}) work.wait();
        messages.recv(received, 1, {.tag = 2});
        require(holds(received, 4), "the wrapper's answer");
      } else {
        messages.recv(received, 0, {.tag = 3});
        require(holds(received, 3), "the wrapper's message of tag 3");
        require(messages.recv_from_any(received, {.tag = 2}) == 0, "the sender");
        require(holds(received, 2), "the wrapper's message of tag 2");
        require(group.recv_from_any(received, {.tag = 2}) == 0, "the sender");
        require(holds(received, 1), "the program's message");
        messages.send(filled(numel, 4), 0, {.tag = 2});
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST(PrivateMessages, OfTwoWrappersGoAroundARing) {
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    const PrivateMessages first(group, "cadre::Test");
    const PrivateMessages second(group, "cadre::Test");
    const int next = (group.rank() + 1) % 3;
    const int previous = (group.rank() + 2) % 3;
    std::vector<at::Tensor> received = {at::zeros({8}), at::zeros({8}), at::zeros({8})};
    const std::vector<Work> works = {
        first.batch_send_recv_async(
            {P2POp::send(filled(8, 10 + group.rank()), next), P2POp::recv(received[0], previous)}),
        group.batch_send_recv_async(
            {P2POp::send(filled(8, 30 + group.rank()), next), P2POp::recv(received[2], previous)}),
        second.recv_async(received[1], previous)};
    second.send(filled(8, 20 + group.rank()), next);
    for (const Work& work : works) work.wait();
    for (int i = 0; i < 3; ++i) {
      require(holds(received[static_cast<size_t>(i)], 10 * (i + 1) + previous), "each its own");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
