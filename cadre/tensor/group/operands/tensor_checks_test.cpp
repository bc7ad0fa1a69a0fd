// Tests that tensors which cannot take part in a collective are refused before any data is sent.
// Ranks are threads.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/group/symmetric_tensor.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

TEST(ProcessGroup, ListsThatCannotTakePartAreRefusedBeforeAnythingIsSent) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const auto expect = [](const std::function<void()>& call, const std::string& text) {
      const std::string failure = failure_of(call);
      require(failure.starts_with("kInvalidArgument: ") && failure.find(text) != std::string::npos,
              "expected \"" + text + "\", got \"" + failure + "\"");
    };
    const Tensor two = torch::zeros({2});
    const Tensor three = torch::zeros({3});
    const Tensors pair = {torch::zeros({2}), torch::zeros({2})};
    const Tensors mixed = {torch::zeros({2}), torch::zeros({2}, torch::kInt)};
    const Tensors ragged = {torch::zeros({2}), torch::zeros({3})};
    expect([&] { group.all_gather(Tensors{two}, two); },
           "the list of outputs has 1 tensors, expected one for each of 2 ranks");
    expect([&] { group.all_gather(mixed, two); }, "the outputs are float32 and int32");
    expect([&] { group.all_gather(pair, three); }, "the same dtype and number of elements");
    expect([&] { group.all_gather({torch::zeros({1}).expand({2}), two}, two); }, "share memory");
    expect([&] { group.all_gather({two.to_sparse(), two}, two); }, "is sparse");
    expect([&] { group.all_gather(pair, torch::zeros({2}, torch::kComplexFloat)); },
           "is complex64");
    expect([&] { group.reduce_scatter(three, pair); }, "the same dtype and number of elements");
    expect([&] { group.reduce_scatter(two, {two, Tensor()}); }, "the input is undefined");
    expect([&] { group.reduce_scatter(two, pair, {.op = ReduceOp::kBor}); }, "bor of float32");
    expect([&] { group.gather(ragged, two, {.root = group.rank()}); }, "differ in size: (2) (3)");
    expect([&] { group.scatter(two, ragged, {.root = group.rank()}); }, "differ in size: (2) (3)");
    expect([&] { group.all_to_all(pair, mixed); }, "the inputs are float32 and int32");
    Tensors own_is_longer = pair;
    own_is_longer[static_cast<size_t>(group.rank())] = three;
    expect([&] { group.all_to_all(pair, own_is_longer); }, "the same dtype and number of elements");
    expect(
        [&] {
          group.all_reduce_coalesced({two, torch::zeros({2, 3}).t()});
        },
        "is not contiguous");
    expect(
        [&] {
          group.all_gather_coalesced({two, two}, {two});
        },
        "there are 2 outputs for 1 inputs");
    expect([&] { group.reduce_scatter_coalesced({two}, {three}); },
           "the input has 3 elements (3), expected world size 2 times the output's 2 (2)");
    expect(
        [&] {
          group.batch_send_recv({P2POp::send(two, 1 - group.rank()), P2POp::send(two, 2)});
        },
        "the peer 2 is not in the group of 2 ranks");
    expect([&] { group.batch_send_recv({P2POp::recv(two, group.rank())}); },
           "is this rank itself; copy the data instead");
    require(group.communicator().num_collectives() == 0, "nothing was issued");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// If this were allowed, all outputs that share memory would hold only the value that was written
// last.
TEST(ProcessGroup, ListsOfOutputsThatShareMemoryAreRefused) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const auto expect = [&](const std::function<void()>& call) {
      const std::string failure = failure_of(call);
      require(failure.find("the tensors 0 and 1 of the list share memory; pass tensors that do not "
                           "overlap") != std::string::npos,
              failure);
      require(!group.error(), "the group has failed");
    };
    const Tensor two = torch::zeros({2});
    const Tensor four = torch::zeros({4});
    const Tensor square = torch::zeros({2, 2});
    expect([&] { group.all_gather({two, two}, two.clone()); });
    expect([&] { group.all_gather({square.select(1, 0), square.select(1, 0)}, two); });
    expect([&] { group.gather({two, two}, two.clone(), {.root = group.rank()}); });
    expect([&] { group.all_to_all({four.narrow(0, 0, 2), four.narrow(0, 1, 2)}, {two, two}); });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The outputs are the columns of one matrix: their memory interleaves, but they share no element.
TEST(ProcessGroup, ListsOfInterleavedOutputsAreFilled) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const Tensor matrix = torch::zeros({3, 2});
    group.all_gather({matrix.select(1, 0), matrix.select(1, 1)},
                     torch::full({3}, group.rank() + 1.0F));
    require(matrix.select(1, 0).eq(1).all().item<bool>(), "of rank 0");
    require(matrix.select(1, 1).eq(2).all().item<bool>(), "of rank 1");
    group.batch_send_recv({});
    require(group.batch_send_recv_async({}).is_completed(), "an empty batch");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

void expect_refusal(const std::function<void()>& call, const std::string& text) {
  const std::string failure = failure_of(call);
  require(failure.find("kInvalidArgument") != std::string::npos &&
              failure.find(text) != std::string::npos,
          "expected \"" + text + "\", got \"" + failure + "\"");
}

TEST(ProcessGroup, RefusesMetaTensorsAndOtherDtypesWithARemedyThatWorks) {
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    const auto expect = expect_refusal;
    // libtorch cannot copy a meta tensor, so the error must not advise a copy.
    const Tensor meta = torch::zeros({2}, torch::kMeta);
    expect([&] { group.all_reduce(meta); },
           "the tensor (2) is on meta, so it has a shape and no values; give it values first: for "
           "a module from defer_init(), call cadre::materialize() or wrap the module");
    expect([&] { group.all_gather(meta, torch::zeros({2})); },
           "the output (2) is on meta, so it has a shape and no values; pass one with memory: "
           "torch::empty_like(output, torch::kCPU)");
    expect([&] { group.all_reduce(torch::zeros({2}, torch::kComplexFloat)); },
           "; pass torch::view_as_real(tensor), its real and imaginary parts");
    expect([&] { group.broadcast(torch::zeros({2}, torch::kFloat8_e4m3fn)); },
           "; keep copy = tensor.to(torch::kBFloat16), pass the copy");
    expect([&] { group.broadcast(torch::zeros({2}, torch::kUInt16)); },
           "; keep copy = tensor.to() with one of these dtypes, pass the copy");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ProcessGroup, RefusesWhatCannotTakePart) {
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    const auto expect = expect_refusal;
    const std::string where = "on group \"world\", rank 0: ";
    expect([&] { group.all_reduce(Tensor()); }, "all_reduce " + where + "the tensor is undefined");
    expect([&] { group.all_reduce(torch::zeros({2}, torch::kComplexFloat)); },
           "the tensor (2) is complex64; supported are uint8, int32,");
    expect([&] { group.all_reduce(torch::zeros({1}).expand({4})); },
           "all_reduce " + where + "elements of the tensor (4) share memory, as after expand()");
    expect([&] { group.recv(torch::zeros({1}).expand({4}), 0); }, "share memory");
    expect([&] { group.all_reduce(torch::imag(torch::zeros({2}, torch::kComplexFloat).conj())); },
           "is a negated view; keep copy = tensor.resolve_neg()");
    const Tensor six = torch::zeros({6});
    expect([&] { group.all_gather(six.narrow(0, 0, 4), six.narrow(0, 2, 4)); },
           "the input and the output share memory, and the smaller tensor (4) is not slice 0 of "
           "the larger one (4)");
    expect([&] { group.reduce_scatter(six.narrow(0, 0, 4), six.narrow(0, 2, 4)); }, "share memory");
    expect([&] { group.all_reduce(six, {.op = ReduceOp::kPremulSum}); },
           "all_reduce " + where + "premul_sum needs this rank's factor");
    expect([&] { group.broadcast(torch::zeros({2, 2}).to_sparse()); }, "is sparse");
    expect([&] { group.all_reduce(torch::zeros({2}, torch::kInt), {.op = ReduceOp::kAvg}); },
           "all_reduce " + where + "avg of int32 is refused: the mean of integers is no integer");
    expect([&] { group.reduce_scatter(six, six.clone(), {.op = ReduceOp::kBor}); },
           "bor of float32 is refused");
    expect([&] { (void)group.all_reduce_async(torch::zeros({4, 4}).t()); }, "is not contiguous");
    expect([&] { group.all_gather(torch::zeros({3}), torch::zeros({2})); },
           "the output has 3 elements (3), expected world size 1 times the input's 2 (2)");
    expect([&] { group.reduce_scatter(torch::zeros({2}), torch::zeros({2}, torch::kInt)); },
           "the input is int32 but the output is float32");
    expect([&] { (void)SymmetricTensor::allocate(group, 4, torch::kComplexDouble); },
           "elements of dtype complex128");
    expect([&] { group.reduce(torch::zeros({2}), {.root = 1}); },
           "reduce " + where + "root 1 is not in the group of 1 ranks");
    expect([&] { group.all_to_all(six, six); },
           "all_to_all " + where + "the input and the output overlap");
    expect([&] { (void)group.broadcast_async(six, {.root = 1}); }, "broadcast_async " + where);
    expect([&] { group.gather(torch::zeros({3}), torch::zeros({2})); },
           "the output has 3 elements (3), expected world size 1 times the input's 2 (2)");
    expect([&] { group.scatter(torch::zeros({2}), Tensor()); }, "the input is undefined");
    const Tensor rows = torch::zeros({4, 2});
    expect(
        [&] {
          group.all_to_all(torch::zeros({3, 2}), rows);
        },
        "the output has 6 elements (3, 2), expected the input's 8 (4, 2); pass splits");
    expect([&] { group.all_to_all(rows, rows); }, "the input and the output overlap");
    expect([&] { group.all_to_all(torch::zeros({}), torch::zeros({1})); },
           "the output has no dimension 0 to be split");
    const Tensor other = torch::zeros({4, 2});
    expect(
        [&] {
          group.all_to_all(other, rows, {.input_split_sizes = {2, 2}});
        },
        "the input (4, 2) has 2 splits, expected one for each of 1 ranks");
    expect([&] { group.all_to_all(other, rows, {.output_split_sizes = {5}}); },
           "the output (4, 2) has a split of 5 rows, but 4 rows are left");
    expect([&] { group.all_to_all(other, rows, {.output_split_sizes = {3}}); },
           "the splits of the output (4, 2) add up to 3, expected 4");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
