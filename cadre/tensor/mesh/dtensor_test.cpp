// Tests how many and which collectives a DTensor runs, its autograd graph, and its errors. The
// ranks are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/collective/op.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/mesh/dtensor.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;
using torch::Tensor;
using Placements = std::vector<Placement>;

void require_ok(const testing::RanksResult& result) {
  EXPECT_TRUE(result.ok()) << result.failures();
}

Tensor counted(const std::vector<int64_t>& sizes) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return torch::arange(numel, torch::kDouble).view(sizes);
}

TEST(DTensor, DistributesWithoutCommunication) {
  require_ok(run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"dp", 2}, {"tp", 2}});
    const uint64_t before = world.communicator().num_collectives();
    const Tensor full = counted({5, 4}).requires_grad_(true);
    const DTensor tensor = DTensor::distribute(full, mesh, {Shard(0), Shard(-1)});
    require(world.communicator().num_collectives() == before, "no collective of the world");
    require(tensor.placements() == Placements({Shard(0), Shard(1)}), "dims from 0");
    require(tensor.sizes() == std::vector<int64_t>({5, 4}), "sizes");
    const int row = mesh.coordinate("dp");
    const int column = mesh.coordinate("tp");
    const Box box{{3 * row, 2 * column}, {row == 0 ? 3 : 2, 2}};
    require(tensor.box() == box, "box");
    const Tensor expected =
        full.detach().narrow(0, box.offsets[0], box.sizes[0]).narrow(1, box.offsets[1], 2);
    require(torch::equal(tensor.local(), expected), "its part");
    require(tensor.local().is_leaf() && tensor.local().requires_grad(), "a leaf like the full one");
    require(tensor.local().storage().nbytes() == tensor.local().nbytes(), "only its part is kept");
    full.detach().zero_();
    require(torch::equal(tensor.full_tensor(), counted({5, 4})), "in memory of its own");
    const DTensor summed = DTensor::distribute(counted({2}), mesh, {Partial(), Replicate()});
    require(torch::equal(summed.full_tensor(), counted({2})), "as operands of a sum");
  }));
}

// The test counts collectives by the operation numbers of the groups.
TEST(DTensor, CommunicatesOnlyWhatItMust) {
  require_ok(run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"dp", 2}, {"tp", 2}});
    const auto counts = [&] {
      return std::vector<uint64_t>{mesh.group("dp").communicator().num_collectives(),
                                   mesh.group("tp").communicator().num_collectives(),
                                   mesh.joint_group({"dp", "tp"}).communicator().num_collectives()};
    };
    const auto cost = [&](const Placements& from, const Placements& to,
                          const std::vector<uint64_t>& expected, bool requires_grad = false) {
      const DTensor tensor = DTensor::distribute(counted({8, 8}), mesh, from);
      const std::vector<uint64_t> before = counts();
      const DTensor result = tensor.redistribute(to, {.requires_grad = requires_grad});
      std::vector<uint64_t> after = counts();
      for (size_t i = 0; i < after.size(); ++i) after[i] -= before[i];
      require(after == expected, to_string(std::span(from)) + to_string(std::span(to)));
      require(result.local().requires_grad() == (requires_grad && from != to), "requires grad");
    };
    for (const bool requires_grad : {false, true}) {
      cost({Shard(0), Partial()}, {Shard(0), Partial()}, {0, 0, 0}, requires_grad);
      cost({Replicate(), Replicate()}, {Shard(0), Shard(0)}, {0, 0, 0}, requires_grad);
      cost({Shard(0), Replicate()}, {Shard(0), Shard(1)}, {0, 0, 0}, requires_grad);
      cost({Replicate(), Shard(0)}, {Partial(), Shard(0)}, {0, 0, 0}, requires_grad);
      cost({Replicate(), Shard(0)}, {Replicate(), Replicate()}, {0, 1, 0}, requires_grad);
      cost({Shard(0), Shard(0)}, {Shard(0), Replicate()}, {0, 1, 0}, requires_grad);
      cost({Shard(0), Shard(1)}, {Shard(1), Shard(1)}, {0, 0, 1}, requires_grad);
      cost({Shard(0), Replicate()}, {Replicate(), Shard(1)}, {1, 0, 0}, requires_grad);
      cost({Partial(), Shard(1)}, {Replicate(), Shard(1)}, {1, 0, 0}, requires_grad);
      cost({Partial(), Shard(1)}, {Shard(0), Shard(1)}, {1, 0, 0}, requires_grad);
      cost({Partial(), Partial()}, {Shard(0), Shard(0)}, {1, 1, 0}, requires_grad);
      cost({Shard(0), Shard(0)}, {Replicate(), Replicate()}, {0, 0, 1}, requires_grad);
    }
    // The all_reduce that asks whether any rank requires grad runs only if a gradient is possible.
    const auto question = [&](const Tensor& full, uint64_t expected, const char* what) {
      const DTensor tensor = DTensor::distribute(full, mesh, {Replicate(), Replicate()});
      const std::vector<uint64_t> before = counts();
      (void)tensor.redistribute({Shard(0), Replicate()});
      require(counts()[0] - before[0] == expected && counts()[1] == before[1], what);
    };
    question(counted({4}), 1, "a floating-point tensor");
    question(counted({4}).to(torch::kLong), 0, "integers");
    const torch::NoGradGuard no_grad;
    question(counted({4}), 0, "no grad");
  }));
}

// The chunks on 4 ranks are unequal, and padding them may cost more than another collective. The
// collective that moves the fewest elements must be used. A tensor without elements needs no
// collective.
TEST(DTensor, ChoosesTheCollectiveByThePadding) {
  require_ok(run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 4}});
    const Communicator& group = mesh.group("x").communicator();
    const torch::NoGradGuard no_grad;
    const auto expect = [&](const std::vector<int64_t>& sizes, Placement from, Placement to,
                            const std::vector<OpKind>& expected) {
      const DTensor tensor = DTensor::distribute(counted(sizes), mesh, {from});
      const size_t before = group.flight_record().entries.size();
      (void)tensor.redistribute({to});
      std::vector<OpKind> kinds;
      const auto entries = group.flight_record().entries;
      for (size_t i = before; i < entries.size(); ++i) {
        kinds.push_back(OpDescriptor::from_fingerprint(entries[i].fingerprint).kind);
      }
      require(kinds == expected, to_string(from) + " to " + to_string(to));
    };
    expect({48, 2}, Shard(0), Replicate(), {OpKind::kAllGather});
    expect({50, 2}, Shard(0), Replicate(), {OpKind::kAllGather});
    expect({2, 50}, Shard(1), Replicate(), {OpKind::kAllGather});
    expect({5, 2}, Shard(0), Replicate(), {OpKind::kAllToAllV});
    expect({8, 2}, Shard(0), Shard(1), {OpKind::kAllToAllV});
    expect({8, 2}, Partial(), Shard(0), {OpKind::kReduceScatter});
    expect({5, 2}, Partial(), Shard(0), {OpKind::kReduceScatter});
    expect({1, 2}, Partial(), Shard(0), {OpKind::kAllReduce});
    expect({8, 2}, Partial(), Replicate(), {OpKind::kAllReduce});
    expect({0, 2}, Partial(), Shard(0), {});
    expect({0, 2}, Partial(), Replicate(), {});
    expect({0, 2}, Shard(1), Replicate(), {});
  }));
}

// Only the local tensor of rank 1 requires grad. The other ranks must take part in the collectives
// of its backward.
TEST(DTensor, OneRankMayRequireNoGrad) {
  require_ok(run_groups(3, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 3}});
    for (const Placements& from : {Placements{Shard(0)}, {Partial()}, {Replicate()}}) {
      const Placements to = {from == Placements{Shard(0)} ? Placement(Replicate()) : Shard(0)};
      const Box box = local_box(std::vector<int64_t>{4, 2}, mesh.shape(), mesh.coordinates(), from);
      const Tensor local = torch::ones(box.sizes).requires_grad_(world.rank() == 1);
      const DTensor result = DTensor::from_local(local, mesh, from, {4, 2}).redistribute(to);
      require(result.local().requires_grad(), "on all ranks");
      result.local().backward(torch::ones_like(result.local()));
      require(local.grad().defined() == (world.rank() == 1), "a gradient where it is wanted");
      if (world.rank() == 1) require(torch::equal(local.grad(), torch::ones(box.sizes)), "ones");
      const DTensor plain =
          DTensor::from_local(local.detach(), mesh, from, {4, 2}).redistribute(to);
      require(!plain.local().requires_grad(), "no rank requires grad");
    }
  }));
}

// The result of a column-parallel product is redistributed from columns to rows. There is only one
// row, so rank 1 gets none.
TEST(DTensor, TrainsThroughSeveralRedistributions) {
  require_ok(run_groups(2, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"tp", 2}});
    const Tensor x = counted({1, 3});
    const Tensor weight = counted({3, 3}).sin();
    const auto loss_of = [](const Tensor& y) { return y.tanh().square().sum(); };
    const Tensor expected_weight = weight.clone().requires_grad_(true);
    const Tensor expected_x = x.clone().requires_grad_(true);
    loss_of(torch::matmul(expected_x, expected_weight)).backward();

    // Rank 0 has two columns of y in the column-parallel product, and rank 1 has one. The only row
    // is on rank 0 after the redistribution.
    const DTensor split = DTensor::distribute(weight, mesh, {Shard(1)});
    split.local().requires_grad_(true);
    const Tensor replicated = x.clone().requires_grad_(true);
    const DTensor input = DTensor::from_local(replicated, mesh, {Replicate()}, {1, 3});
    // The gradient of x on each rank comes from that rank's columns only; the full gradient is
    // their sum.
    const Tensor columns = torch::matmul(input.local(), split.local());
    const DTensor y = DTensor::from_local(columns, mesh, {Shard(1)}, {1, 3});
    const DTensor rows = y.redistribute({Shard(0)});
    require(rows.local().size(0) == (world.rank() == 0 ? 1 : 0), "rank 1 has no row");
    loss_of(rows.local()).backward();
    require(
        torch::allclose(split.local().grad(), expected_weight.grad().narrow(
                                                  1, split.box().offsets[1], split.box().sizes[1])),
        "the gradient of the weight");
    const Tensor sum = replicated.grad().clone();
    world.all_reduce(sum);
    require(torch::allclose(sum, expected_x.grad()), "the gradient of x");
  }));
}

// The expected second derivative of (w * t^3).sum() with respect to t, times v, is 6 * w * t * v.
TEST(DTensor, HasASecondDerivative) {
  require_ok(run_groups(2, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}});
    const Tensor full = counted({3, 2}) - 2;
    const Tensor w = counted({3, 2}).cos();
    const Tensor v = counted({3, 2}).sin();
    for (const Placements& to : {Placements{Shard(1)}, {Replicate()}}) {
      const DTensor t = DTensor::distribute(full.clone().requires_grad_(true), mesh, {Shard(0)});
      const DTensor moved = t.redistribute(to);
      const auto mine = [&](const Tensor& whole, const DTensor& of) {
        const Box box = of.box();
        return whole.narrow(0, box.offsets[0], box.sizes[0])
            .narrow(1, box.offsets[1], box.sizes[1]);
      };
      const Tensor loss = (mine(w, moved) * moved.local().pow(3)).sum();
      const Tensor slope = torch::autograd::grad({loss}, {t.local()}, {}, /*retain_graph=*/true,
                                                 /*create_graph=*/true)[0];
      require(torch::allclose(slope, mine(3 * w * full.square(), t)), "the first");
      // Each rank computes the terms of its own elements.
      const Tensor second = torch::autograd::grad({(slope * mine(v, t)).sum()}, {t.local()})[0];
      require(torch::allclose(second, mine(6 * w * full * v, t)), "the second");
    }
  }));
}

TEST(DTensor, SharesNoMemoryUnlessNothingChanges) {
  require_ok(run_groups(2, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}, {"y", 1}});
    const DTensor tensor =
        DTensor::from_local(counted({4, 2}), mesh, {Replicate(), Replicate()}, {4, 2});
    const DTensor same = tensor.redistribute({Replicate(), Replicate()});
    require(same.local().is_same(tensor.local()), "nothing changes");
    for (const Placements& to : {Placements{Replicate(), Shard(0)},
                                 {Partial(ReduceOp::kMax), Replicate()},
                                 {Partial(), Replicate()},
                                 {Shard(0), Replicate()}}) {
      const DTensor other = tensor.redistribute(to);
      require(!other.local().is_alias_of(tensor.local()), to_string(std::span(to)));
      require(other.local().is_contiguous(), "contiguous");
    }
  }));
}

TEST(DTensor, WorksAloneWithoutALauncher) {
  require_ok(run_groups(1, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"dp", 1}, {"tp", 1}});
    const DTensor tensor =
        DTensor::distribute(counted({3, 2}).requires_grad_(true), mesh, {Shard(0), Partial()});
    const DTensor moved = tensor.redistribute({Partial(), Shard(1)});
    require(torch::equal(moved.local(), counted({3, 2})), "the values");
    moved.full_tensor().sum().backward();
    require(torch::equal(tensor.local().grad(), torch::ones({3, 2}, torch::kDouble)), "ones");
    const DTensor scalar = DTensor::distribute(torch::tensor(2.5), mesh, {Replicate(), Partial()});
    require(scalar.full_tensor().item<double>() == 2.5, "without dimensions");
  }));
}

TEST(DTensor, WrongUsesGiveSentences) {
  require_ok(run_groups(2, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}, {"y", 1}});
    const auto expect = [](const std::function<void()>& call, const std::string& sentence) {
      const std::string failure = failure_of(call);
      require(failure.find("kInvalidArgument: DTensor::") == 0 ||
                  failure.find("kInvalidArgument: redistribute: ") == 0,
              failure);
      require(failure.find(sentence) != std::string::npos, failure);
    };
    const Tensor full = counted({4, 2});
    const auto distribute = [&](const Tensor& tensor, const Placements& placements) {
      return [=] { (void)DTensor::distribute(tensor, mesh, placements); };
    };
    expect(distribute(full, {Shard(0)}),
           "distribute on mesh {x: 2, y: 1}: [Shard(0)] are 1 placements for a mesh of 2 axes");
    expect(distribute(full, {Shard(2), Replicate()}),
           "Shard(2) is for a tensor of more than 2 dimensions; use a dim from -2 to 1");
    expect(distribute(full, {Shard(-3), Replicate()}), "Shard(-3) is for a tensor of more than 2");
    expect(distribute(torch::tensor(1.0), {Shard(-1), Replicate()}),
           "Shard(-1) is for a tensor that has dimensions, but this one has none; use Replicate()");
    expect(distribute(full, {Partial(ReduceOp::kPremulSum), Replicate()}), "use Partial(sum)");
    expect(distribute(full, {Partial(), Partial(ReduceOp::kMax)}),
           "the result of sum and max on two axes depends on which is reduced first");
    expect(distribute(full.to(torch::kLong), {Partial(ReduceOp::kAvg), Replicate()}),
           "avg of int64 is refused");
    expect(distribute(Tensor(), {Shard(0), Replicate()}), "the tensor is undefined");
    expect(distribute(full.to(torch::kComplexDouble), {Shard(0), Replicate()}),
           "; pass torch::view_as_real(tensor), its real and imaginary parts");
    expect(distribute(full.to(torch::kFloat8_e4m3fn), {Shard(0), Replicate()}),
           "; convert it to one of these dtypes with to()");
    expect(distribute(full.to_sparse(), {Shard(0), Replicate()}),
           "is not a dense tensor with values");
    const Tensor leaf = counted({4, 2}).requires_grad_(true);
    expect(distribute(leaf * 2, {Shard(0), Replicate()}), "pass its detach()");
    expect(
        [&] {
          (void)DTensor::from_local(full, mesh, {Shard(0), Replicate()}, {4, 2});
        },
        "the local tensor has sizes (4, 2), but of a tensor of sizes (4, 2) with placements "
        "[Shard(0), Replicate()] the rank at coordinates (");
    expect(
        [&] {
          (void)DTensor::from_local(full, mesh, {Shard(0), Replicate()}, {-8, 2});
        },
        "(-8, 2) are not the sizes of a tensor");
    const DTensor tensor = DTensor::distribute(full, mesh, {Shard(0), Replicate()});
    expect([&] { (void)tensor.redistribute({Replicate()}); }, "give one for each axis");
    // All ranks throw, also those on which the tensor does not require grad.
    const Tensor local = full.clone().requires_grad_(world.rank() == 0);
    const DTensor greatest =
        DTensor::from_local(local, mesh, {Partial(ReduceOp::kMax), Replicate()}, {4, 2});
    expect(
        [&] {
          (void)greatest.redistribute({Replicate(), Replicate()});
        },
        "redistribute: a tensor that requires grad is Partial(max)");
    const torch::NoGradGuard no_grad;
    require(torch::equal(greatest.full_tensor(), full), "without grad it is reduced");
  }));
}

// If the arguments of one rank are invalid, all ranks throw that rank's error, and the mesh stays
// usable.
TEST(DTensor, ARefusalOfOneRankIsThrownOnAll) {
  const auto on_ranks = [](const std::function<void(const DeviceMesh&, bool is_wrong)>& make) {
    const auto result = run_groups(4, [&](const ProcessGroup& world, std::string& output) {
      const DeviceMesh mesh(world, {{"dp", 2}, {"tp", 2}});
      output = failure_of([&] { make(mesh, world.rank() == 2); });
      const DTensor usable = DTensor::distribute(counted({4}), mesh, {Shard(0), Replicate()});
      require(torch::equal(usable.full_tensor(), counted({4})), "usable");
    });
    require_ok(result);
    for (const auto& rank : result.ranks) EXPECT_EQ(rank.output, result.ranks[0].output);
    return result.ranks[0].output;
  };
  const Placements rows = {Shard(0), Replicate()};
  EXPECT_THAT(on_ranks([&](const DeviceMesh& mesh, bool is_wrong) {
                (void)DTensor::from_local(counted({is_wrong ? 3 : 2}), mesh, rows, {4});
              }),
              ::testing::AllOf(::testing::HasSubstr(
                                   "the local tensor has sizes (3), but of a tensor of sizes (4)"),
                               ::testing::HasSubstr("on rank 2 of 4")));
  EXPECT_THAT(on_ranks([&](const DeviceMesh& mesh, bool is_wrong) {
                (void)DTensor::from_local(is_wrong ? Tensor() : counted({2}), mesh, rows, {4});
              }),
              ::testing::HasSubstr("the tensor is undefined"));
  EXPECT_THAT(on_ranks([&](const DeviceMesh& mesh, bool is_wrong) {
                const int64_t size = is_wrong ? 6 : 4;
                (void)DTensor::from_local(counted({size / 2}), mesh, rows, {size});
              }),
              ::testing::HasSubstr("the sizes of the tensor is (4) on rank 0 and (6) on rank 2"));
  EXPECT_THAT(on_ranks([&](const DeviceMesh& mesh, bool is_wrong) {
                const Tensor full = counted({4});
                (void)DTensor::distribute(is_wrong ? full.to(torch::kFloat) : full, mesh, rows);
              }),
              ::testing::HasSubstr("the dtype is Double on rank 0 and Float on rank 2"));
  EXPECT_THAT(on_ranks([&](const DeviceMesh& mesh, bool is_wrong) {
                (void)DTensor::distribute(counted({4}), mesh,
                                          is_wrong ? Placements{Replicate(), Shard(0)} : rows);
              }),
              ::testing::HasSubstr("the list of placements is [Shard(0), Replicate()] on rank 0"));
}

TEST(DTensor, OneThatWasMovedFromIsUsable) {
  require_ok(run_groups(2, [](const ProcessGroup& world) {
    DeviceMesh mesh(world, {{"x", 2}});
    const DeviceMesh taken = std::move(mesh);
    require(mesh.size() == 2, "the mesh");  // NOLINT(bugprone-use-after-move): defined
    DTensor tensor = DTensor::distribute(counted({4}), taken, {Shard(0)});
    const DTensor moved = std::move(tensor);
    require(torch::equal(tensor.full_tensor(), moved.full_tensor()), "the tensor");  // NOLINT
  }));
}

}  // namespace
}  // namespace cadre
