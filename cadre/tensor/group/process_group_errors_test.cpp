// Tests the errors of a group: whether they name the call that failed, whether the group is usable
// afterwards, and which arguments a call refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/group/symmetric_tensor.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using testing::require;
using testing::run_groups;
using torch::Tensor;
using Call = std::function<void(const ProcessGroup&)>;

void expect_on_ranks(int world_size, const Call& body) {
  const testing::RanksResult result = run_groups(world_size, body);
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Returns the error that the call throws. Fails the rank if the call throws none.
Error error_of_call(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  throw std::runtime_error("the call has thrown no error");
}

void require_refused(const ProcessGroup& group, const std::string& name, const Call& call,
                     const std::string& problem) {
  const Error error = error_of_call([&] { call(group); });
  require(error.code() == ErrorCode::kInvalidArgument, error.message());
  require(error.message().starts_with(name), "expected the name " + name + ": " + error.message());
  require(error.message().find(problem) != std::string::npos,
          "expected \"" + problem + "\": " + error.message());
  require(error.details().group == "world", "the group: " + error.message());
  require(!error.details().operation.empty() &&
              error.message().starts_with(error.details().operation + " on group"),
          "the call: " + error.details().operation);
  require(!group.error(), name + " has failed the group");
}

struct NamedCall {
  std::string name;
  Call call;
};

Tensor row() {
  return torch::ones({2});
}

// Returns calls of ProcessGroup whose underlying operation has another name, such as all_gather of
// lists. The error must have the name of the call.
std::vector<NamedCall> calls_by_name() {
  using Tensors = std::vector<Tensor>;
  return {
      {"all_gather",
       [](const ProcessGroup& g) {
         g.all_gather({row(), torch::ones({1})}, torch::ones({2 - g.rank()}));
       }},
      {"all_gather_async",
       [](const ProcessGroup& g) {
         g.all_gather_async({row(), torch::ones({1})}, torch::ones({2 - g.rank()})).wait();
       }},
      {"all_gather", [](const ProcessGroup& g) { g.all_gather(torch::ones({4}), row()); }},
      {"reduce_scatter", [](const ProcessGroup& g) { g.reduce_scatter(row(), torch::ones({4})); }},
      {"all_to_all", [](const ProcessGroup& g) { g.all_to_all(row(), torch::ones({2})); }},
      {"all_to_all",
       [](const ProcessGroup& g) {
         g.all_to_all({row(), row()}, Tensors{row(), row()});
       }},
      {"all_reduce_coalesced",
       [](const ProcessGroup& g) {
         g.all_reduce_coalesced({row(), row()});
       }},
      {"all_gather_coalesced_async",
       [](const ProcessGroup& g) {
         g.all_gather_coalesced_async({torch::ones({4})}, {row()}).wait();
       }},
      {"split", [](const ProcessGroup& g) { (void)g.split({.color = 0}); }},
      {"new_group", [](const ProcessGroup& g) { (void)g.new_group({0}); }},
      {"SymmetricTensor::allocate",
       [](const ProcessGroup& g) { (void)SymmetricTensor::allocate(g, 1 << 16, at::kFloat); }},
      {"barrier", [](const ProcessGroup& g) { g.barrier(); }},
      {"reduce", [](const ProcessGroup& g) { g.reduce_async(row()).wait(); }},
  };
}

TEST(ProcessGroupErrors, NameTheCallThatTheProgramMade) {
  for (const NamedCall& named : calls_by_name()) {
    SCOPED_TRACE(named.name);
    expect_on_ranks(2, [&](const ProcessGroup& group) {
      if (group.rank() == 1) {
        (void)error_of_call([&] { group.broadcast(torch::ones({7})); });
        return;
      }
      const Error error = error_of_call([&] { named.call(group); });
      require(error.code() == ErrorCode::kInvalidArgument, error.message());
      require(error.details().operation == named.name, "field: " + error.details().operation);
      require(error.details().operation_number == 1, "number");
      require(error.details().group == "world", "group: " + error.details().group);
      require(error.message().starts_with(named.name + " "), error.message());
    });
  }
}

TEST(ProcessGroupErrors, NameTheCallOfAMessage) {
  const std::vector<NamedCall> calls = {
      {"batch_send_recv",
       [](const ProcessGroup& g) { g.batch_send_recv({P2POp::recv(torch::ones({7}), 1)}); }},
      {"recv_from_any", [](const ProcessGroup& g) { (void)g.recv_from_any(torch::ones({7})); }},
      {"recv", [](const ProcessGroup& g) { g.recv_async(torch::ones({7}), 1).wait(); }}};
  for (const NamedCall& named : calls) {
    SCOPED_TRACE(named.name);
    expect_on_ranks(2, [&](const ProcessGroup& group) {
      if (group.rank() == 1) {
        (void)error_of_call([&] {
          group.send(row(), 0);
          group.barrier();
        });
        return;
      }
      const Error error = error_of_call([&] { named.call(group); });
      require(error.code() == ErrorCode::kInvalidArgument, error.message());
      require(error.details().operation == named.name, error.details().operation);
      require(error.message().starts_with(named.name + " "), error.message());
    });
  }
}

TEST(ProcessGroupErrors, ATimeoutOfAWaitLeavesTheOperationAndTheGroupUsable) {
  std::promise<void> has_timed_out;
  expect_on_ranks(2, [&](const ProcessGroup& group) {
    const Tensor tensor = torch::ones({2});
    if (group.rank() == 1) {
      require(
          has_timed_out.get_future().wait_for(testing::kRankTimeout) == std::future_status::ready,
          "too late");
      group.all_reduce(tensor);
      return;
    }
    const Work work = group.all_reduce_async(tensor);
    const Error error = error_of_call([&] { work.wait(milliseconds(1)); });
    has_timed_out.set_value();
    require(error.code() == ErrorCode::kTimeout, error.message());
    require(error.details().operation == "all_reduce", error.details().operation);
    require(error.details().operation_number == 1, "number");
    require(error.details().group == "world", error.details().group);
    require(!group.error(), "the group has failed");
    work.wait();
    require(tensor[0].item<int>() == 2, "sum");
  });
}

// Only rank 0 passes an invalid argument and gets an error. It then makes the valid call in which
// rank 1 waits.
TEST(ProcessGroupErrors, ARefusedArgumentLeavesTheGroupUsableOnAllRanks) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    if (group.rank() == 0) {
      const Tensor sparse = torch::zeros({2}).to_sparse();
      const Tensor leaf = torch::zeros({2}, torch::requires_grad());
      using Op = AllReduceOptions;
      require_refused(
          group, "all_reduce", [&](const auto& g) { g.all_reduce(sparse); }, "sparse");
      require_refused(
          group, "all_reduce", [&](const auto& g) { g.all_reduce(leaf); }, "leaf");
      require_refused(
          group, "all_reduce",
          [](const auto& g) { g.all_reduce(row(), Op{.op = ReduceOp::kBxor}); }, "float32");
      require_refused(
          group, "broadcast", [](const auto& g) { g.broadcast(row(), {.root = 2}); }, "root");
      require_refused(
          group, "all_gather", [](const auto& g) { g.all_gather(row(), row()); }, "elements");
      require_refused(
          group, "send", [](const auto& g) { g.send(row(), 0); }, "itself");
      require_refused(
          group, "new_group on", [](const auto& g) { (void)g.new_group({}); }, "empty");
      require_refused(
          group, "new_group on group \"world\", rank 0: ",
          [](const auto& g) {
            (void)g.new_group({0, 5});
          },
          "rank 5 of the list [0, 5] is not in the group of 2 ranks");
      require_refused(
          group, "SymmetricTensor::allocate",
          [](const auto& g) {
            (void)SymmetricTensor::allocate(g, 3, at::kFloat, {.with_whole = true});
          },
          "pages");
    }
    const Tensor tensor = row();
    group.all_reduce(tensor);
    require(tensor[0].item<int>() == 2, "sum");
    require(!group.error(), "no failure");
  });
}

void require_all_gather_refused(const ProcessGroup& group) {
  require_refused(
      group, "all_gather", [&](const auto& g) { g.all_gather(std::vector<Tensor>{row()}, row()); },
      "tensors");
}

std::string fields_of_all_gather(const ProcessGroup& group, Duration timeout) {
  const std::vector<Tensor> parts = {row(), row(), row()};
  return testing::failed_fields_of([&] { group.all_gather(parts, row(), {.timeout = timeout}); });
}

// Rank 1 gets an error for an invalid argument and does not repeat the call. The timeout errors of
// the ranks that wait for it must name rank 1.
TEST(ProcessGroupErrors, ARankThatRefusesAndCallsNothingIsTheCulpritOfTheOthersTimeouts) {
  expect_on_ranks(3, [](const ProcessGroup& group) {
    if (group.rank() == 1) {
      require_all_gather_refused(group);
      const auto limit = std::chrono::steady_clock::now() + testing::kRankTimeout;
      while (!group.error() && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
      require(group.error() && group.error()->message().find("all_gather #1") != std::string::npos,
              "the failure of the others");
      return;
    }
    const std::string fields = fields_of_all_gather(group, std::chrono::milliseconds(100));
    require(fields.starts_with("kTimeout culprit=1 ") || fields.starts_with("kAborted culprit=1 "),
            fields);
    require(fields.find("operation=all_gather#1") != std::string::npos, fields);
  });
}

TEST(ProcessGroupErrors, ARankThatRefusesAndCallsAnotherOperationIsTheCulpritOfAMismatch) {
  expect_on_ranks(3, [](const ProcessGroup& group) {
    if (group.rank() == 1) {
      require_all_gather_refused(group);
      const std::string fields = testing::failed_fields_of([&] { group.barrier(); });
      require(fields.starts_with("kInvalidArgument culprit="), fields);
      return;
    }
    const std::string fields = fields_of_all_gather(group, testing::kRankTimeout);
    require(fields == "kInvalidArgument culprit=1 operation=all_gather#1", fields);
  });
}

TEST(ProcessGroupErrors, AFailureIsKeptAndThrownByEveryLaterCall) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    require(!group.error(), "no failure yet");
    const Error first = error_of_call([&] { group.all_reduce(torch::ones({2 + group.rank()})); });
    const std::optional<Error> kept = group.error();
    require(kept == first, "kept: " + (kept ? kept->message() : "nothing"));
    require(kept->details().culprit == first.details().culprit, "culprit");
    for (const NamedCall& named : calls_by_name()) {
      require(error_of_call([&] { named.call(group); }) == first, named.name);
    }
  });
}

// Returns all calls of a ProcessGroup.
std::vector<NamedCall> all_calls() {
  std::vector<NamedCall> calls = calls_by_name();
  const auto add = [&](std::string name, Call call) {
    calls.push_back({std::move(name), std::move(call)});
  };
  add("rank", [](const auto& g) { (void)g.rank(); });
  add("world_size", [](const auto& g) { (void)g.world_size(); });
  add("name", [](const auto& g) { (void)g.name(); });
  add("communicator", [](const auto& g) { (void)g.communicator(); });
  add("error", [](const auto& g) { (void)g.error(); });
  add("all_reduce", [](const auto& g) { g.all_reduce(row()); });
  add("all_reduce_async", [](const auto& g) { g.all_reduce_async(row()).wait(); });
  add("send", [](const auto& g) { g.send(row(), 1); });
  add("recv_from_any", [](const auto& g) { (void)g.recv_from_any(row()); });
  add("batch_send_recv", [](const auto& g) { g.batch_send_recv({P2POp::send(row(), 1)}); });
  add("new_group_over_store", [](const auto& g) { (void)g.new_group_over_store({0}, {}); });
  add("rejoin", [](const auto& g) { (void)g.rejoin(); });
  add("global_ranks", [](const auto& g) { (void)g.global_ranks(); });
  add("global_rank", [](const auto& g) { (void)g.global_rank(0); });
  add("group_rank", [](const auto& g) { (void)g.group_rank(0); });
  add("abort", [](const auto& g) { g.abort("reason"); });
  add("close", [](const auto& g) { g.close(); });
  return calls;
}

TEST(ProcessGroupErrors, AHandleThatWasMovedFromRefusesEveryCall) {
  expect_on_ranks(1, [](const ProcessGroup& group) {
    ProcessGroup handle = group;
    const ProcessGroup owner = std::move(handle);
    for (const NamedCall& named : all_calls()) {
      // NOLINTNEXTLINE(bugprone-use-after-move): the test uses a handle that was moved from
      const Error error = error_of_call([&] { named.call(handle); });
      require(error.code() == ErrorCode::kInvalidArgument, error.message());
      require(error.message().find("was moved from") != std::string::npos,
              named.name + ": " + error.message());
    }
    owner.barrier();
    handle = owner;
    handle.barrier();
  });
}

TEST(ProcessGroupErrors, ATimeoutThatIsNotPositiveIsRefused) {
  expect_on_ranks(1, [](const ProcessGroup& group) {
    for (const Duration timeout : {Duration(0), Duration(milliseconds(-5))}) {
      const std::string problem = timeout == Duration(0)
                                      ? "the timeout is 0 ms; pass a positive one"
                                      : "the timeout is -5 ms; pass a positive";
      const std::optional<Duration> limit = timeout;
      const auto refused = [&](const std::string& name, const Call& call) {
        require_refused(group, name + " on group \"world\", rank 0: ", call, problem);
      };
      refused("all_reduce", [&](const auto& g) { g.all_reduce(row(), {.timeout = limit}); });
      refused("all_gather", [&](const auto& g) { g.all_gather({row()}, row(), {limit}); });
      refused("barrier_async", [&](const auto& g) { g.barrier_async({limit}).wait(); });
      refused("recv", [&](const auto& g) { g.recv(row(), 1, {.timeout = limit}); });
      refused("all_reduce_coalesced",
              [&](const auto& g) { g.all_reduce_coalesced({row()}, {.timeout = limit}); });
      refused("batch_send_recv", [&](const auto& g) { g.batch_send_recv({}, {limit}); });
      refused("split", [&](const auto& g) { (void)g.split({.color = 0, .timeout = timeout}); });
      refused("new_group", [&](const auto& g) { (void)g.new_group({0}, {.timeout = timeout}); });
      refused("new_group_over_store", [&](const auto& g) {
        (void)g.new_group_over_store({0}, {.id = "one", .timeout = timeout});
      });
      refused("rejoin", [&](const auto& g) { (void)g.rejoin({.timeout = timeout}); });
      refused("rejoin", [&](const auto& g) { (void)g.rejoin({.connect_timeout = timeout}); });
      refused("close", [&](const auto& g) { g.close(timeout); });
    }
    for (const bool is_of_connecting : {false, true}) {
      InitOptions options;
      (is_of_connecting ? options.connect_timeout : options.timeout) = milliseconds(-5);
      const Error error = error_of_call([&] { (void)init_process_group(options); });
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(error.message(),
                std::string("init_process_group: InitOptions::") +
                    (is_of_connecting ? "connect_timeout" : "timeout") +
                    " is -5 ms; pass a positive one, or leave it out for the default");
    }
  });
}

TEST(ProcessGroupErrors, CoalescedListsOfDifferentLengthsAreAMismatch) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    std::vector<Tensor> tensors(static_cast<size_t>(2 + group.rank()), row());
    for (Tensor& tensor : tensors) tensor = row();
    const Error error = error_of_call([&] { group.all_reduce_coalesced(tensors); });
    require(error.code() == ErrorCode::kInvalidArgument, error.message());
    require(error.details().operation == "all_reduce_coalesced", error.details().operation);
    for (const char* text : {"called all_reduce(sum, float32 x 2, one of 2 in a call) as #1",
                             "called all_reduce(sum, float32 x 2, one of 3 in a call) as #1"}) {
      require(error.message().find(text) != std::string::npos, error.message());
    }
    for (const Tensor& tensor : tensors) require(torch::equal(tensor, row()), "no data moved");
  });
}

TEST(ProcessGroupErrors, CoalescedListsRefuseTensorsThatOverlapAndNoTensors) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const Tensor whole = torch::zeros({12});
    const auto part = [&](int64_t from, int64_t to) { return whole.slice(0, from, to); };
    const std::string problem = "the tensors 0 and 2 of the list share memory";
    require_refused(
        group, "all_reduce_coalesced",
        [&](const auto& g) {
          g.all_reduce_coalesced({part(4, 9), row(), part(0, 5)});
        },
        problem);
    // Input 0 may be this rank's slice of output 0. Input 2 overlaps the rest of output 0, so the
    // call is refused.
    const int64_t at = 2 * group.rank();
    require_refused(
        group, "all_gather_coalesced",
        [&](const auto& g) {
          g.all_gather_coalesced({part(0, 4), torch::zeros({4}), torch::zeros({4})},
                                 {part(at, at + 2), row(), part(2 - at, 4 - at)});
        },
        problem);
    require_refused(
        group, "all_reduce_coalesced", [](const auto& g) { g.all_reduce_coalesced({}); },
        "the list of tensors is empty");
    // These calls are valid: tensors may be adjacent parts of one tensor, and an input may be this
    // rank's slice of its own output.
    group.all_reduce_coalesced({part(0, 4), part(4, 8), part(8, 12)});
    group.all_gather_coalesced({part(0, 4), part(4, 8)}, {part(at, at + 2), part(4 + at, 6 + at)});
  });
}

TEST(ProcessGroupErrors, ANegativeColorIsInNoGroup) {
  expect_on_ranks(3, [](const ProcessGroup& group) {
    const int color = group.rank() == 1 ? -1 : 0;
    const std::optional<ProcessGroup> part = group.split({.color = color});
    require(part.has_value() == (group.rank() != 1), "nullopt on rank 1 only");
    if (part) {
      require(part->world_size() == 2, "without rank 1");
      part->close();
    }
  });
}

// Waits for an all_reduce, for an operation on a list and for a batch of messages. Rank 1 takes
// part only after rank 0 has set the callback.
TEST(ProcessGroupErrors, AWaitThrowsTheExceptionOfACallback) {
  struct UsersOwn {};
  const std::vector<std::function<Work(const ProcessGroup&)>> forms = {
      [](const ProcessGroup& g) { return g.all_reduce_async(row()); },
      [](const ProcessGroup& g) {
        return g.all_gather_async({row(), row()}, row());
      },
      [](const ProcessGroup& g) {
        const int other = 1 - g.rank();
        return g.rank() == 0
                   ? g.batch_send_recv_async({P2POp::recv(row(), other), P2POp::recv(row(), other)})
                   : g.batch_send_recv_async(
                         {P2POp::send(row(), other), P2POp::send(row(), other)});
      }};
  expect_on_ranks(2, [&](const ProcessGroup& group) {
    for (const auto& issue : forms) {
      if (group.rank() == 1) {
        group.recv(row(), 0, {.tag = 1});
        issue(group).wait();
        continue;
      }
      const Work work = issue(group);
      work.on_completed([](const std::optional<Error>&) { throw UsersOwn(); });
      group.send(row(), 1, {.tag = 1});
      EXPECT_THROW(work.wait(), UsersOwn);
      require(!work.error() && !group.error(), "the group is usable");
    }
    group.barrier();
  });
}

}  // namespace
}  // namespace cadre
