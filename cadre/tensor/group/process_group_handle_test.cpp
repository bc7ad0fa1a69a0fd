// Tests properties of a group other than the results of its operations: rank and backend, the
// lifetime of memory in flight, and that a program which follows the advice of an error message
// gets the result.
#include <ATen/native/Resize.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <future>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;
using torch::Tensor;

TEST(ProcessGroup, SaysWhatMovesItsBytes) {
  for (const auto& [choice, name] :
       {std::pair(TransportChoice::kAuto, "host"), std::pair(TransportChoice::kTcp, "net")}) {
    const auto result = run_groups(2,
                                   [&, name = name](const ProcessGroup& group) {
                                     const std::string_view actual =
                                         group.communicator().backend_name();
                                     require(actual == name, actual);
                                   },
                                   {.transport = choice});
    EXPECT_TRUE(result.ok()) << result.failures();
  }
  EXPECT_TRUE(run_groups(1, [](const ProcessGroup& group) {
                require(group.communicator().backend_name() == "solo", "alone");
              }).ok());
}

// A Rank can be used as a number: as a value, in comparisons, and as an argument of printf.
TEST(ProcessGroup, ItsRankIsANumber) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    require(torch::full({2}, group.rank())[0].item<int>() == group.rank(), "full");
    require(std::max(group.rank(), 1) == 1, "max");
    std::array<char, 16> text{};
    std::snprintf(text.data(), text.size(), "%d of %d", group.rank(), group.world_size());
    require(text[0] == '0' + group.rank(), text.data());
    const Rank rank = group.rank();
    require(rank == group.rank(), "as a Rank");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// An allocator that records when its memory is freed.
class WatchedAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = std::malloc(num_bytes);
    return {data, data, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }

  static inline std::atomic<int> num_freed = 0;

 private:
  static void release(void* data) {
    if (data != nullptr) ++num_freed;
    std::free(data);
  }
};

// Returns 100 float32 ones, in memory of a WatchedAllocator.
Tensor watched_ones() {
  static WatchedAllocator allocator;
  c10::Storage storage(c10::Storage::use_byte_size_t{}, 400, &allocator, /*resizable=*/true);
  return torch::empty({0}).set_(storage, 0, {100}, {1}).fill_(1);
}

// Rank 0 starts an all_reduce and then takes the memory away from its tensor in several ways. Rank
// 1 joins the all_reduce only afterwards.
TEST(ProcessGroup, MemoryOfAnOperationInFlightIsNotFreed) {
  const std::vector<std::pair<const char*, std::function<void(Tensor&)>>> ways = {
      {"emptied", [](Tensor& t) { t.storage().unsafeGetStorageImpl()->set_data_ptr({}); }},
      {"shrunk",
       [](Tensor& t) { at::native::resize_bytes_cpu(t.storage().unsafeGetStorageImpl(), 0); }},
      {"grown", [](Tensor& t) { t.resize_({5000}); }},
      {"given other memory", [](Tensor& t) { t.set_data(torch::zeros({100})); }},
      {"dropped", [](Tensor& t) { t = Tensor(); }}};
  for (const auto& [name, take_away] : ways) {
    std::promise<void> taken;
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      if (group.rank() == 1) {
        require(taken.get_future().wait_for(testing::kRankTimeout) == std::future_status::ready,
                "too late");
        group.all_reduce(torch::ones({100}));
        return;
      }
      Tensor tensor = watched_ones();
      const int before = WatchedAllocator::num_freed;
      const Work work = group.all_reduce_async(tensor);
      take_away(tensor);
      const int in_flight = WatchedAllocator::num_freed;
      taken.set_value();
      work.wait();
      require(in_flight == before, std::string("freed in flight when ") + name);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// The error for an unsupported input recommends a temporary copy. The error for an output must not,
// because the result would be lost in the copy.
TEST(ProcessGroup, ItsRemediesKeepTheResult) {
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    const auto expect = [](const std::function<void()>& call, const std::string& remedy) {
      const std::string failure = failure_of(call);
      require(failure.find(remedy) != std::string::npos, "expected " + remedy + ": " + failure);
    };
    const Tensor rows = torch::zeros({4, 4}).t();
    const Tensor plain = torch::zeros({4, 4});
    const std::string in_place =
        "is not contiguous; keep copy = tensor.contiguous(), pass the copy and, when the operation "
        "is done, call tensor.copy_(copy), or call the operation without _async";
    expect([&] { (void)group.all_reduce_async(rows); }, in_place);
    expect([&] { (void)group.broadcast_async(rows); }, in_place);
    expect([&] { (void)group.reduce_async(rows); }, in_place);
    expect([&] { (void)group.recv_async(rows, 0); }, in_place);
    expect([&] { group.all_gather(plain, rows); }, "is not contiguous; pass input.contiguous()");
    expect([&] { group.all_gather(rows, plain); },
           "keep copy = output.contiguous(), pass the copy and, when the operation is done, call "
           "output.copy_(copy)");
    const Tensor negated = torch::imag(torch::zeros({2}, torch::kComplexFloat).conj());
    expect([&] { group.all_reduce(negated); }, "keep copy = tensor.resolve_neg(), pass the copy");
    expect([&] { group.send(negated, 0); }, "pass input.resolve_neg()");
    expect([&] { group.all_reduce(torch::zeros({1}).expand({4})); },
           "keep copy = tensor.clone(), pass the copy and use that");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
