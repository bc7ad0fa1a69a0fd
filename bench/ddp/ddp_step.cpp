// Measures one training step without its optimizer (zero_grad, forward, backward) on rank 0: alone
// while the other ranks wait, on all ranks at once without communication, and with
// DistributedDataParallel. Also measures two parts of the difference separately: the copy of all
// gradients into buckets, and the reduction of these buckets. Rank 0 prints the medians, and the
// 99th percentile with DDP, as one line of JSON. Blocks until done.
//
//   cadre run --nproc-per-node 2 --no-python ddp_step [steps [layers [width [batch]]]]
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

torch::nn::Sequential make_mlp(int layers, int width) {
  torch::nn::Sequential mlp;
  for (int i = 0; i < layers; ++i) {
    mlp->push_back(torch::nn::Linear(width, width));
    mlp->push_back(torch::nn::ReLU());
  }
  return mlp;
}

struct StepTimes {
  double median_ms = 0;
  double p99_ms = 0;
};

StepTimes measure(int steps, const std::function<void()>& step) {
  std::vector<double> times;
  for (int i = 0; i < steps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    step();
    const std::chrono::duration<double, std::milli> spent =
        std::chrono::steady_clock::now() - start;
    times.push_back(spent.count());
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times[times.size() * 99 / 100]};
}

// The work that DDP does with the gradients of a step, without forward and backward. Its memory and
// buckets are those of DDP.
class Buckets {
 public:
  Buckets(const cadre::ProcessGroup& world, const cadre::BucketLayout& layout,
          const std::vector<torch::Tensor>& parameters)
      : world_(world) {
    for (const auto& bucket : layout.buckets) {
      int64_t numel = 0;
      for (const int64_t index : bucket.parameters) numel += parameters[index].numel();
      flats_.push_back(cadre::SymmetricTensor::allocate(world, numel, torch::kFloat).local());
      int64_t offset = 0;
      for (const int64_t index : bucket.parameters) {
        const torch::Tensor& gradient = parameters[index].grad();
        views_.emplace_back(flats_.back().narrow(0, offset, gradient.numel()).view_as(gradient),
                            gradient);
        offset += gradient.numel();
      }
    }
  }

  void copy() const {
    for (const auto& [view, gradient] : views_) view.copy_(gradient);
  }
  // Enqueues the reductions of all buckets except the last one, as DDP does during a backward.
  void reduce() const {
    std::vector<cadre::Work> enqueued;
    for (size_t i = 0; i + 1 < flats_.size(); ++i) {
      enqueued.push_back(world_.all_reduce_async(flats_[i], {.op = cadre::ReduceOp::kAvg}));
    }
    for (const cadre::Work& work : enqueued) work.wait();
    world_.all_reduce(flats_.back(), {.op = cadre::ReduceOp::kAvg});
  }

 private:
  cadre::ProcessGroup world_;
  std::vector<torch::Tensor> flats_;
  std::vector<std::pair<torch::Tensor, torch::Tensor>> views_;
};

// Returns `otherwise` if the argument is missing, and 0 if it is not a positive number.
int argument(int argc, char** argv, int index, int otherwise) {
  return argc > index ? std::max(std::atoi(argv[index]), 0) : otherwise;
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argument(argc, argv, 1, 20);
  const int layers = argument(argc, argv, 2, 6);
  const int width = argument(argc, argv, 3, 1024);
  const int batch = argument(argc, argv, 4, 64);
  if (argc > 5 || std::min({steps, layers, width, batch}) == 0) {
    std::cerr << "usage: ddp_step [steps [layers [width [batch]]]], numbers above 0" << std::endl;
    return 2;
  }
  at::set_num_threads(1);
  const auto world = cadre::init_process_group();
  torch::manual_seed(world.rank());
  auto plain = make_mlp(layers, width);
  auto wrapped = make_mlp(layers, width);
  cadre::DistributedDataParallel model{wrapped, world};
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      plain->parameters()[i].copy_(wrapped->parameters()[i]);
    }
  }
  const auto x = torch::randn({batch, width});
  const std::function<void()> local_step = [&] {
    plain->zero_grad();
    plain->forward(x).pow(2).mean().backward();
  };
  const std::function<void()> ddp_step = [&] {
    wrapped->zero_grad();
    model(x).pow(2).mean().backward();
  };

  // Checks the gradients of DDP before the measurement: they must be the mean of the gradients that
  // each rank computes alone.
  local_step();
  ddp_step();
  const auto mean = plain->parameters()[0].grad().clone();
  world.all_reduce(mean, {.op = cadre::ReduceOp::kAvg});
  if (!torch::allclose(mean, wrapped->parameters()[0].grad(), 1e-5, 1e-9)) {
    std::cerr << "rank " << world.rank() << ": the reduced gradient is wrong" << std::endl;
    return 1;
  }

  for (int i = 0; i < 3; ++i) local_step(), ddp_step();
  world.barrier();
  const StepTimes alone = world.rank() == 0 ? measure(steps, local_step) : StepTimes{};
  world.barrier();
  const StepTimes together = measure(steps, local_step);
  world.barrier();
  const StepTimes ddp = measure(steps, ddp_step);
  const Buckets buckets(world, model.learned_layout().value(), plain->parameters());
  world.barrier();
  const StepTimes copy = measure(steps, [&] { buckets.copy(); });
  world.barrier();
  const StepTimes reduction = measure(steps, [&] { buckets.reduce(); });
  if (world.rank() == 0) {
    std::cout << "{\"alone_ms\": " << alone.median_ms << ", \"together_ms\": " << together.median_ms
              << ", \"ddp_ms\": " << ddp.median_ms << ", \"ddp_p99_ms\": " << ddp.p99_ms
              << ", \"copy_ms\": " << copy.median_ms
              << ", \"reduction_ms\": " << reduction.median_ms << "}" << std::endl;
  }
  world.close();
  return 0;
}
