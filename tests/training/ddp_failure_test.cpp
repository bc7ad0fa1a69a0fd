// Tests a rank that kills or stops itself in each phase of a step of DistributedDataParallel, or
// leaves the group early. Every survivor must throw an error that names the rank in time. The same
// processes then rebuild a group, in which the next step must have the right gradients. No process,
// thread or file may be leaked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/testing/torch/disturbed_job.h"
#include "cadre/testing/torch/group_fakes.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using testing::DisturbedRank;
using testing::FakeGroup;
using testing::GroupCall;
using testing::mask;
using testing::require;
using torch::Tensor;

// The phases of a step, in order.
enum class Moment {
  kInForward,  // while the buffers are broadcast
  kBeforeAnyBucket,
  kAfterTheFirstBucket,
  kAtTheLastBucket,  // the others may be inside the reduction of the last bucket
  kInTheOptimizer,   // after backward and before the next step
  kAtTheEndOfTheLoop,
};

const char* text_of(Moment moment) {
  switch (moment) {
    case Moment::kInForward:
      return "in_forward";
    case Moment::kBeforeAnyBucket:
      return "before_any_bucket";
    case Moment::kAfterTheFirstBucket:
      return "after_the_first_bucket";
    case Moment::kAtTheLastBucket:
      return "at_the_last_bucket";
    case Moment::kInTheOptimizer:
      return "in_the_optimizer";
    case Moment::kAtTheEndOfTheLoop:
      break;
  }
  return "at_the_end_of_its_loop";
}

struct FailureCase {
  int world_size;
  Moment moment;
  int signal;  // the signal that the victim gets; 0: it leaves the group in an orderly way
  TransportChoice transport = TransportChoice::kAuto;
};

std::string name_of(const ::testing::TestParamInfo<FailureCase>& info) {
  const FailureCase& test = info.param;
  return format("{}_{}_of_{}_{}",
                test.signal == SIGKILL   ? "kill"
                : test.signal == SIGSTOP ? "stop"
                                         : "leave",
                text_of(test.moment), test.world_size,
                test.transport == TransportChoice::kTcp ? "tcp" : "host");
}

struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(8, 16));
    second = register_module("second", torch::nn::Linear(16, 16));
    third = register_module("third", torch::nn::Linear(16, 4));
    num_steps = register_buffer("num_steps", torch::zeros({1}));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) {
    const Tensor hidden = torch::tanh(second(torch::tanh(first(x))));
    // When the gradient of `hidden` is computed, those of `third` are complete.
    if (behind_third) hidden.register_hook([this](const Tensor&) { behind_third(); });
    return third(hidden);
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  Tensor num_steps;
  std::function<void()> behind_third;
};

// Returns the loss of one rank in one step.
Tensor loss_of(const Tensor& output) {
  return output.pow(2).mean();
}

Tensor input_of(int rank) {
  return torch::linspace(-1, 1, 40, torch::kDouble).view({5, 8}) * (rank + 1);
}

// Where the victim is disturbed, and how many buckets the group has reduced so far.
struct Watch {
  explicit Watch(const FakeGroup& group) {
    group.on_call = [this](GroupCall& call) {
      if (call.kind == OpKind::kBroadcast && before_broadcast) before_broadcast();
      if (call.is_reduction_of_values()) {
        ++num_buckets;
        if (at_bucket) at_bucket();
      }
      call.pass_on();
    };
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  std::atomic<int> num_buckets{0};
  std::function<void()> before_broadcast;
  std::function<void()> at_bucket;  // called at a bucket, in whose reduction the other ranks may be
};

// A group and a wrapper over it. There is one for the original group, and one for the rebuilt
// group.
struct Replica {
  Replica(const DisturbedRank& self, const Membership& membership, const std::shared_ptr<Net>& net)
      : fake(testing::connect(self.context, membership, self.options())),
        group(fake.group()),
        watch(fake),
        model(net, group, {.bucket_caps = {.first_bytes = 256, .bytes = 1024}}) {}

  Tensor output() { return model(input_of(group.rank())); }

  FakeGroup fake;
  ProcessGroup group;
  Watch watch;
  DistributedDataParallel<Net> model;
  int buckets_per_step = 0;  // the number of buckets in the last checked step
};

// Runs a step and checks that the gradients are the mean over the ranks. The gradients that the
// other ranks contribute are also computed on this rank, without a group.
void check_step(Replica& replica) {
  Net& net = *replica.model.module();
  net.zero_grad();
  const int before = replica.watch.num_buckets;
  loss_of(replica.output()).backward();
  replica.buckets_per_step = replica.watch.num_buckets - before;
  Net copy;
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < net.parameters().size(); ++i) {
    copy.parameters()[i].copy_(net.parameters()[i]);
  }
  const int world_size = replica.group.world_size();
  for (int rank = 0; rank < world_size; ++rank) {
    const torch::AutoGradMode grad(true);
    (loss_of(copy.forward(input_of(rank))) / world_size).backward();
  }
  for (size_t i = 0; i < net.parameters().size(); ++i) {
    require(torch::allclose(net.parameters()[i].grad(), copy.parameters()[i].grad(), 1e-12, 1e-15),
            format("the mean gradient of {} ranks, parameter {}", world_size, i));
  }
}

void backward(const DisturbedRank& self, Replica& replica, Moment moment) {
  Net& net = *replica.model.module();
  Watch& watch = replica.watch;
  const int before = watch.num_buckets;
  const auto disturb = [&](int num_buckets) {
    // The count of buckets grows only when a reduction begins in the background, some time after it
    // was issued. This loop waits until all issued reductions have begun.
    for (int i = 0; i < 5000 && watch.num_buckets - before < num_buckets; ++i) {
      testing::nap(self.context.system, std::chrono::milliseconds(1));
    }
    require(watch.num_buckets - before == num_buckets,
            format("{} buckets are on their way", num_buckets));
    self.disturb_self();
  };
  const auto is_due = [&](Moment due) { return self.is_victim() && moment == due; };
  net.zero_grad();
  if (is_due(Moment::kInForward)) watch.before_broadcast = [&] { disturb(0); };
  if (is_due(Moment::kAfterTheFirstBucket)) net.behind_third = [&] { disturb(1); };
  if (is_due(Moment::kAtTheLastBucket)) {
    watch.at_bucket = [&] {
      if (watch.num_buckets - before == replica.buckets_per_step) {
        disturb(replica.buckets_per_step);
      }
    };
  }
  const Tensor output = replica.output();
  if (is_due(Moment::kBeforeAnyBucket)) {
    output.register_hook([&](const Tensor&) { disturb(0); });
  }
  loss_of(output).backward();
  if (is_due(Moment::kInTheOptimizer)) disturb(replica.buckets_per_step);
}

// Waits for all ranks through the store. When a rank leaves the group, the last operation must have
// ended on all ranks: the end of an operation after a rank has left is not covered by this test.
void meet(const DisturbedRank& self) {
  const Membership& membership = self.membership;
  const Deadline deadline = self.context.system.deadline_in(seconds(20));
  std::vector<std::string> keys;
  for (int rank = 0; rank < membership.world_size; ++rank) keys.push_back(format("here/{}", rank));
  membership.store->set(keys[static_cast<size_t>(self.context.rank.value)], "1", deadline)
      .value_or_throw();
  membership.store->wait(keys, deadline).value_or_throw();
}

// Runs steps until the group fails, and returns the failure. A second backward on the failed group
// must throw the same error at once.
testing::FailureReport failure_in_backward(const DisturbedRank& self, Replica& replica,
                                           Moment moment) {
  // A survivor may complete one more step if the victim had already sent all gradients that the
  // survivor needs.
  const int num_steps = moment == Moment::kInTheOptimizer ? 2 : 1;
  return self.report_of(
      [&] {
        for (int step = 0; step < num_steps; ++step) backward(self, replica, moment);
      },
      [&](const Error& error) {
        const std::string again = testing::failure_of([&] { backward(self, replica, moment); });
        require(again == format("{}: {}", to_string(error.code()), error.message()),
                "the next step throws the first failure, not: " + again);
      });
}

testing::FailureReport live_through(const DisturbedRank& self, Moment moment) {
  torch::manual_seed(static_cast<uint64_t>(self.context.rank.value));
  const auto net = std::make_shared<Net>();
  testing::FailureReport report;
  std::vector<Rank> lost;
  {
    Replica replica(self, self.membership, net);
    check_step(replica);
    check_step(replica);  // the wrapper learns the order of the buckets in the first step
    meet(self);
    if (moment == Moment::kAtTheEndOfTheLoop && self.is_victim()) {
      report.message =
          format("{}", replica.group.communicator().flight_record().entries.back().number);
      replica.group.close();
      return report;
    }
    report = failure_in_backward(self, replica, moment);
    lost = replica.group.communicator().lost_ranks();
    replica.group.close();
  }
  os::System& system = self.context.system;
  const Membership next =
      rejoin(system, self.membership, lost, system.deadline_in(seconds(3))).value_or_throw();
  require(
      next.world_size == self.job.world_size - 1,
      format("the survivors meet again; {} of them after: {}", next.world_size, report.message));
  Replica replica(self, next, net);
  check_step(replica);
  check_step(replica);
  replica.group.close();
  // Gradients are views of the group's memory, so they are released before the group.
  net->zero_grad();
  return report;
}

// Returns the operations in which, according to a survivor's message, the victim may have been
// last. A bucket that it has launched may not have begun, or may be complete; the same holds for
// the exchange of the numbers of samples before the first bucket.
std::vector<std::string> last_seen(const FailureCase& test) {
  const std::string forward = "last seen after broadcast #N, N s ago";
  const std::string reduced = "last seen after all_reduce #N, N s ago";
  switch (test.moment) {
    case Moment::kInForward:
      return {"last seen in broadcast #N, PHASE, N s ago"};
    case Moment::kBeforeAnyBucket:
    case Moment::kAfterTheFirstBucket:
    case Moment::kAtTheLastBucket:
      return {forward, "last seen in all_reduce #N, PHASE, N s ago", reduced};
    default:
      return {reduced};
  }
}

// Returns every message that a survivor may throw, with numbers masked. A survivor may also notice
// a loss between two operations.
std::vector<std::string> golden_texts(const FailureCase& test, int rank) {
  const std::string self = format("rank {} (HOST, pid N)", rank);
  const std::string remedy = ". Remedy: restart the job or call rejoin().";
  const std::vector<std::string> operations = {"broadcast", "all_reduce"};
  std::vector<std::string> texts;
  const auto add_loss = [&](const std::string& cause) {
    for (const std::string& operation : operations) {
      texts.push_back(format(
          "kPeerLost: {} #N on group \"world\" failed after N s on {}\n  rank 1 (HOST, pid N) {}{}",
          operation, self, cause, remedy));
      texts.push_back(
          format("kPeerLost: group \"world\" failed on {} after {} #N\n  rank 1 (HOST, "
                 "pid N) {}{}",
                 self, operation, cause, remedy));
    }
  };
  if (test.signal == 0) add_loss("left the group after #N (it ended its loop early?)");
  for (const std::string& seen : last_seen(test)) {
    if (test.signal == SIGKILL) add_loss("is gone: its connection ended, " + seen);
    if (test.signal != SIGSTOP) continue;
    for (const std::string& operation : operations) {
      const auto timed_out = [&](int who) {
        return format(
            "{} #N on group \"world\" timed out after N s on rank {} (HOST, pid N)\n  waiting for "
            "rank 1 (HOST, pid N), which does not answer: {}{}",
            operation, who, seen,
            ". Remedy: check that every rank calls this operation; then restart the job or call "
            "rejoin().");
      };
      texts.push_back("kTimeout: " + timed_out(rank));
      for (int other = 0; other < test.world_size; ++other) {
        for (const std::string& own : operations) {
          texts.push_back(format(
              "kAborted: {} #N on group \"world\" was aborted after N s on {}\n  first failure: {} "
              "Remedy: look at the first failure, then restart the job or call rejoin().",
              own, self, timed_out(other)));
        }
      }
    }
  }
  return texts;
}

class DdpFailureTest : public ::testing::TestWithParam<FailureCase> {};

TEST_P(DdpFailureTest, EverySurvivorNamesTheCulpritAndTrainsOnInANewGroup) {
  const FailureCase& test = GetParam();
  const auto outcome = testing::run_disturbed(
      {.world_size = test.world_size, .signal = test.signal, .transport = test.transport},
      [&](DisturbedRank& self) { return live_through(self, test.moment); });
  for (const auto& [rank, message] : outcome.messages) {
    SCOPED_TRACE(message);
    EXPECT_THAT(mask(message), ::testing::AnyOfArray(golden_texts(test, rank)));
    EXPECT_THAT(message, ::testing::HasSubstr(outcome.victim));
    if (test.signal != 0) continue;
    EXPECT_THAT(message,
                ::testing::HasSubstr(format("left the group after #{} (", outcome.farewell)));
  }
}

std::vector<FailureCase> all_cases() {
  std::vector<FailureCase> cases;
  for (const int world_size : {2, 3}) {
    for (const int signal : {SIGKILL, SIGSTOP}) {
      cases.push_back({world_size, Moment::kBeforeAnyBucket, signal});
      cases.push_back({world_size, Moment::kAfterTheFirstBucket, signal});
    }
    cases.push_back({world_size, Moment::kAtTheEndOfTheLoop, 0});
  }
  for (const int signal : {SIGKILL, SIGSTOP}) {
    for (const Moment moment :
         {Moment::kInForward, Moment::kAtTheLastBucket, Moment::kInTheOptimizer}) {
      cases.push_back({3, moment, signal});
    }
    cases.push_back({3, Moment::kAfterTheFirstBucket, signal, TransportChoice::kTcp});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, DdpFailureTest, ::testing::ValuesIn(all_cases()), name_of);

}  // namespace
}  // namespace cadre
