// Calls every public function of cadre/tensor/group once, as a program outside of this repository
// would, and checks the results. package_test.py compares the called names with those that the
// headers declare.
#include <ATen/ATen.h>
#include <cadre/error.h>
#include <cadre/functional.h>
#include <cadre/optim.h>
#include <cadre/process_group.h>
#include <cadre/symmetric_tensor.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using cadre::P2POp;
using cadre::ProcessGroup;
using cadre::ReduceOp;
using cadre::Work;
using Tensors = std::vector<Tensor>;
constexpr std::chrono::seconds kTimeout(30);

void require(bool condition, const char* what) {
  if (!condition) throw cadre::Error(cadre::ErrorCode::kInternal, what);
}

// Returns a tensor of shape (rows) filled with the number.
Tensor of(double value, int64_t rows = 2) {
  return at::full({rows}, value);
}

struct World {
  const ProcessGroup& group;
  int rank = group.rank();
  int size = group.world_size();
  int right = (rank + 1) % size;
  int left = (rank + size - 1) % size;
  double sum = size * (size + 1) / 2.0;  // the sum of rank + 1 over all ranks
  double own = rank + 1.0;
};

void in_place(const World& w) {
  const Tensor tensor = of(w.own);
  w.group.all_reduce(tensor, {.op = ReduceOp::kSum, .timeout = kTimeout});
  require(at::equal(tensor, of(w.sum)), "all_reduce");
  const Work work = w.group.all_reduce_async(tensor, {.op = ReduceOp::kMax});
  work.wait(kTimeout);
  require(work.is_completed() && !work.error(), "all_reduce_async");
  w.group.broadcast(tensor, {.root = 0});
  w.group.broadcast_async(tensor, {.root = 0}).wait();
  w.group.reduce(tensor, {.root = 0, .op = ReduceOp::kMin});
  w.group.reduce_async(tensor, {.root = 0, .op = ReduceOp::kMin}).wait();
  require(at::equal(tensor, of(w.sum)), "broadcast and reduce");
  const Tensors both = {of(w.own), at::full({3}, w.rank, at::kLong)};
  w.group.all_reduce_coalesced(both);
  w.group.all_reduce_coalesced_async(both, {.op = ReduceOp::kMax}).wait();
  require(at::equal(both[0], of(w.sum)), "all_reduce_coalesced");
}

void flat(const World& w) {
  const Tensor all = at::empty({w.size, 2});
  w.group.all_gather(all, of(w.own));
  w.group.all_gather_async(all, of(w.own)).wait();
  require(all.sum().item<double>() == 2 * w.sum, "all_gather");
  const Tensor part = at::empty({2});
  w.group.reduce_scatter(part, all);
  w.group.reduce_scatter_async(part, all).wait();
  require(at::equal(part, of(w.own * w.size)), "reduce_scatter");
  w.group.all_gather_coalesced({all}, {of(w.own)});
  w.group.all_gather_coalesced_async({all}, {of(w.own)}).wait();
  w.group.reduce_scatter_coalesced({part}, {all});
  w.group.reduce_scatter_coalesced_async({part}, {all}).wait();
  w.group.gather(w.rank == 0 ? all : Tensor(), part, {.root = 0});
  w.group.gather_async(w.rank == 0 ? all : Tensor(), part, {.root = 0}).wait();
  w.group.scatter(part, w.rank == 0 ? all : Tensor(), {.root = 0});
  w.group.scatter_async(part, w.rank == 0 ? all : Tensor(), {.root = 0}).wait();
  require(at::equal(part, of(w.own * w.size)), "gather and scatter");
  const Tensor exchanged = at::empty({w.size});
  w.group.all_to_all(exchanged, at::full({w.size}, w.own));
  w.group.all_to_all_async(exchanged, at::full({w.size}, w.own)).wait();
  require(exchanged.sum().item<double>() == w.sum, "all_to_all");
}

void lists(const World& w) {
  Tensors outputs;
  Tensors inputs;
  Tensors even;
  for (int rank = 0; rank < w.size; ++rank) {
    outputs.push_back(at::zeros({rank + 1}));
    inputs.push_back(of(w.own, rank + 1));
    even.push_back(of(w.own));
  }
  const Tensor own = of(w.own, w.rank + 1);
  w.group.all_gather(outputs, own);
  w.group.all_gather_async(outputs, own).wait();
  require(at::equal(outputs.back(), of(w.size, w.size)), "all_gather");
  const Tensor reduced = at::empty({w.rank + 1});
  w.group.reduce_scatter(reduced, inputs);
  w.group.reduce_scatter_async(reduced, inputs).wait();
  require(at::equal(reduced, of(w.sum, w.rank + 1)), "reduce_scatter");
  const Tensor part = of(w.own);
  w.group.gather(w.rank == 0 ? even : Tensors(), part);
  w.group.gather_async(w.rank == 0 ? even : Tensors(), part).wait();
  w.group.scatter(part, w.rank == 0 ? even : Tensors());
  w.group.scatter_async(part, w.rank == 0 ? even : Tensors()).wait();
  require(at::equal(part, of(w.own)), "gather and scatter of lists");
  Tensors received;
  for (int rank = 0; rank < w.size; ++rank) received.push_back(at::empty({w.rank + 1}));
  w.group.all_to_all(received, inputs);
  w.group.all_to_all_async(received, inputs).wait();
  require(at::equal(received.back(), of(w.size, w.rank + 1)), "all_to_all");
}

void messages(const World& w) {
  w.group.barrier({.timeout = kTimeout});
  w.group.barrier_async().wait();
  w.group.batch_send_recv({});
  if (w.size == 1) return;
  const Tensor received = at::empty({2});
  if (w.rank == 0) w.group.send(of(w.own), w.right, {.tag = 1});
  if (w.left == 0) w.group.recv(received, w.left, {.tag = 1, .timeout = kTimeout});
  const Work sent = w.group.send_async(of(w.own), w.right);
  w.group.recv_async(received, w.left).wait();
  sent.wait();
  w.group.batch_send_recv({P2POp::send(of(w.own), w.right), P2POp::recv(received, w.left)});
  w.group.batch_send_recv_async({P2POp::send(of(w.own), w.right), P2POp::recv(received, w.left)})
      .wait();
  require(at::equal(received, of(w.left + 1.0)), "messages");
  if (w.rank > 0) w.group.send(of(w.own), 0, {.tag = 2});
  for (int i = 1; w.rank == 0 && i < w.size; ++i) {
    const int source = w.group.recv_from_any(received, {.tag = 2});
    require(at::equal(received, of(source + 1.0)), "recv_from_any");
  }
}

void memory(const World& w) {
  const Tensor shared = cadre::SymmetricTensor::allocate(w.group, 5, at::kFloat).local();
  w.group.all_reduce(shared.fill_(w.own));
  require(at::equal(shared, of(w.sum, 5)), "in place");
  const int64_t numel = cadre::SymmetricTensor::kPageBytes / 4;
  const auto mapped =
      cadre::SymmetricTensor::allocate(w.group, numel, at::kFloat, {.with_whole = true});
  if (mapped.has_whole()) {
    mapped.local().fill_(w.own);
    mapped.signal_peers(0);
    mapped.wait_for_peers(0, {.timeout = kTimeout});
    require(mapped.whole().sum().item<double>() == w.sum * numel, "whole");
  }
  const auto symmetric = cadre::SymmetricTensor::allocate(w.group, 3, at::kFloat);
  symmetric.local().fill_(w.own);
  if (symmetric.shares_memory()) {
    symmetric.signal(w.right, 0);
    symmetric.wait_signal(w.left, 0, {.timeout = kTimeout});
    require(at::equal(symmetric.peer(w.left), of(w.left + 1.0, 3)), "SymmetricTensor");
  }
  const Tensor one = of(1);
  require(at::equal(cadre::zeros_beside(one), at::zeros_like(one)), "zeros_beside");
  require(cadre::moved_beside(one, shared).is_same(shared), "moved_beside");
}

void through_autograd(const World& w) {
  namespace functional = cadre::functional;
  const Tensor x = at::full({w.size}, w.own).requires_grad_();
  Tensor y = functional::all_reduce(x, w.group, {.timeout = kTimeout});
  y = functional::all_gather(y, w.group);
  y = functional::reduce_scatter(y, w.group, {.op = ReduceOp::kAvg});
  y = functional::all_to_all(y, w.group);
  y = functional::broadcast(y, w.group, {.root = 0});
  y = functional::copy_to_group(y, w.group);
  y = functional::reduce_from_group(y, w.group);
  y = functional::scatter_to_group(y, w.group, {.dim = 0});
  y = functional::gather_from_group(y, w.group, {.dim = 0});
  y.sum().backward();
  require(x.grad().defined(), "a gradient through every function");
}

void one_rank_for_all(const World& w) {
  const cadre::MainRankOptions options{.of_each_node = true, .timeout = kTimeout};
  int num_runs = 0;
  cadre::on_main_rank(w.group, [&] { ++num_runs; });
  cadre::run_main_rank_first(
      w.group, [&] { ++num_runs; }, options);
  num_runs += cadre::main_rank_first(w.group, [] { return 1; });
  require(num_runs == (cadre::is_main_rank(w.group) ? 3 : 2), "main rank");
  require(w.group.local_rank() == w.rank && w.group.local_world_size() == w.size, "local rank");
  require(w.group.node_rank() == 0 && w.group.num_nodes() == 1, "one host");
  require(!w.group.host().empty(), "host");
  require(!w.group.device(), "device");
  const cadre::RankLog log(w.group, {.component = "program"});
  require(log.is_writing() == (w.rank == 0), "is_writing");
  log.debug("below the level of the log");
  log.info("below the level of the log");
  if (w.size == 0) {
    log.warning("never");
    log.error("never");
    log.write(cadre::LogLevel::kError, "never");
  }
}

void subgroups(const World& w) {
  const auto same = w.group.split({.color = 0, .key = w.rank, .timeout = kTimeout});
  const auto first = w.group.new_group({0});
  require(first.has_value() == (w.rank == 0), "new_group");
  const ProcessGroup alone =
      w.group.new_group_over_store({w.rank}, {.store = nullptr, .id = "alone"});
  require(alone.global_rank(0) == w.rank && alone.name() == "alone", "new_group_over_store");
  require(same->global_ranks().size() == static_cast<size_t>(w.size), "split");
  require(w.group.group_rank(w.rank) == w.rank, "group_rank");
  require(w.group.communicator().world_size() == w.size, "communicator");
  alone.close();
  if (first) first->close();
  if (w.rank == 0) same->abort("every call");
  const ProcessGroup again = same->rejoin({.timeout = kTimeout, .connect_timeout = kTimeout});
  require(again.world_size() == w.size, "rejoin");
  again.close(kTimeout);
}

// A program that a launcher has started is refused.
void ranks_of_this_program(bool is_launched) {
  std::atomic<int> num_ranks = 0;
  try {
    cadre::spawn([&](const ProcessGroup& world) { num_ranks += world.world_size(); }, 2,
                 {.method = cadre::SpawnMethod::kThreads, .timeout = kTimeout});
    require(!is_launched && num_ranks == 4, "spawn");
  } catch (const cadre::Error& error) {
    if (!is_launched || error.code() != cadre::ErrorCode::kInvalidArgument) throw;
  }
}

}  // namespace

int main() try {
  const ProcessGroup group = cadre::init_process_group({.timeout = kTimeout});
  const World world{group};
  in_place(world);
  flat(world);
  lists(world);
  messages(world);
  memory(world);
  through_autograd(world);
  one_rank_for_all(world);
  subgroups(world);
  group.close();
  ranks_of_this_program(/*is_launched=*/world.size > 1);
  std::printf("every call on %d ranks\n", world.size);
} catch (const cadre::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
