// Measures a pipeline whose stages only sleep: how long it takes to pass a tensor to the next
// stage, or how close a step comes to the ideal time of its schedule. Rank 0 prints one line of
// JSON. Blocks until done.
//
//   cadre run --nproc-per-node 2 --no-python pipeline_step handover [iterations [elements]]
//   cadre run --nproc-per-node 4 --no-python pipeline_step emulated SCHEDULE
//     [steps [microbatches [elements [forward_us [backward_us]]]]]
//
// handover: the time from the end of the first stage's forward to the beginning of the second
// stage's forward, and the same for the backwards; alternating with send() and recv() in the same
// group. The ranks are on one host and share a steady clock.
// emulated: the stages of a rank together take forward_us in forward and backward_us in backward,
// and pass a float32 tensor of `elements` to the next stage. If the schedule splits the backward,
// I (gradient of the input) and W (gradient of the weights) take one half each. The first stage has
// no gradient of its input, so its W takes the whole time.
#include <cadre/cadre.h>
#include <sys/prctl.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/schedule/generate.h"
#include "cadre/core/schedule/simulate.h"

namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The time that this rank has spent in computations in the current step, in nanoseconds.
int64_t busy_ns = 0;

// A sleep may end up to this much too late. So the last part of a computation is spent in a busy
// loop, which competes with other ranks for the cores.
constexpr microseconds kMaxOversleep(100);

// Runs `compute`, then sleeps until `duration` has passed since the start.
template <typename Compute>
auto for_at_least(microseconds duration, const Compute& compute) {
  const auto start = Clock::now();
  auto result = compute();
  std::this_thread::sleep_until(start + duration - kMaxOversleep);
  while (Clock::now() < start + duration) std::this_thread::yield();
  busy_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
  return result;
}

struct StageTimes {
  microseconds forward{0}, input_grad{0}, weight_grad{0};
};

// A layer that only takes time: maps (rows, n) to (rows, elements). Its weight is a single number.
struct Sleep : torch::autograd::Function<Sleep> {
  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor& weight,
                        int64_t elements, const StageTimes& times) {
    context->save_for_backward({input});
    context->saved_data["input_grad"] = static_cast<int64_t>(times.input_grad.count());
    context->saved_data["weight_grad"] = static_cast<int64_t>(times.weight_grad.count());
    return for_at_least(times.forward, [&] {
      return torch::full({input.size(0), elements}, 1.0).mul_(weight);
    });
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    microseconds duration(0);
    if (context->needs_input_grad(0)) {
      duration += microseconds(context->saved_data["input_grad"].toInt());
    }
    if (context->needs_input_grad(1)) {
      duration += microseconds(context->saved_data["weight_grad"].toInt());
    }
    return for_at_least(duration, [&]() -> variable_list {
      variable_list results(4);
      if (context->needs_input_grad(0)) {
        results[0] = torch::full_like(context->get_saved_variables()[0], 1.0);
      }
      if (context->needs_input_grad(1)) results[1] = gradients[0].select(1, 0).sum();
      return results;
    });
  }
};

struct EmulatedStage : torch::nn::Module {
  EmulatedStage(int64_t num_elements, const StageTimes& given)
      : elements(num_elements), times(given) {
    weight = register_parameter("weight", torch::ones({}));
  }
  Tensor forward(const Tensor& x) { return Sleep::apply(x, weight, elements, times); }
  int64_t elements;
  StageTimes times;
  Tensor weight;
};

struct Settings {
  std::string schedule;
  int repeats = 200;
  int microbatches = 8;
  int elements = 1 << 18;
  int forward_us = 5000;
  int backward_us = 10000;
};

// Returns the measurements of all ranks: (ranks, values.size()) int64.
Tensor gathered(const cadre::ProcessGroup& world, const std::vector<int64_t>& values) {
  const Tensor all =
      torch::empty({world.world_size(), static_cast<int64_t>(values.size())}, torch::kLong);
  world.all_gather(all, torch::tensor(values));
  return all;
}

StageTimes times_of(const Settings& settings, int stage, int stages_per_rank) {
  const microseconds half(settings.backward_us / (2 * stages_per_rank));
  const microseconds forward(settings.forward_us / stages_per_rank);
  // The first stage has no gradient of its input, so its W takes the whole time of the backward.
  return stage == 0 ? StageTimes{forward, microseconds(0), 2 * half}
                    : StageTimes{forward, half, half};
}

int64_t num_computations(const cadre::PipelineSchedule& schedule, int rank) {
  int64_t count = 0;
  for (const cadre::PipelineAction& action : schedule.ranks[static_cast<size_t>(rank)]) {
    for (const cadre::PipelineAction& leaf : cadre::leaves_of(action)) {
      if (cadre::is_computation(leaf.kind)) ++count;
    }
  }
  return count;
}

double simulated_ms(const cadre::PipelineSchedule& schedule, const Settings& settings,
                    bool has_equal_stages) {
  const int stages_per_rank = schedule.num_stages() / schedule.num_ranks();
  cadre::PipelineCosts costs{.stages = {}};
  for (int stage = 0; stage < schedule.num_stages(); ++stage) {
    const StageTimes times = times_of(settings, has_equal_stages ? 1 : stage, stages_per_rank);
    const auto ms = [](microseconds time) { return 1e-3 * static_cast<double>(time.count()); };
    costs.stages.push_back({.forward_ms = ms(times.forward),
                            .backward_ms = ms(times.input_grad + times.weight_grad),
                            .input_grad_ms = ms(times.input_grad),
                            .weight_grad_ms = ms(times.weight_grad)});
  }
  return cadre::simulate_pipeline(schedule, costs).value_or_throw().makespan_ms;
}

void measure_emulated(const cadre::ProcessGroup& world, const Settings& settings) {
  const auto* const info = cadre::find_pipeline_schedule(settings.schedule);
  if (info == nullptr) {
    throw cadre::Error(cadre::ErrorCode::kInvalidArgument,
                       cadre::format("there is no schedule \"{}\"", settings.schedule));
  }
  const auto schedule = cadre::make_pipeline_schedule({.kind = info->kind,
                                                       .num_ranks = world.world_size(),
                                                       .num_microbatches = settings.microbatches})
                            .value_or_throw();
  const int num_stages = schedule.num_stages();
  const int stages_per_rank = num_stages / world.world_size();
  std::vector<cadre::PipelineStage> stages;
  for (int stage = 0; stage < num_stages; ++stage) {
    if (schedule.rank_of_stage[static_cast<size_t>(stage)] != world.rank()) continue;
    stages.emplace_back(std::make_shared<EmulatedStage>(settings.elements,
                                                        times_of(settings, stage, stages_per_rank)),
                        cadre::PipelineStageOptions{.stage = stage, .num_stages = num_stages});
  }
  cadre::Pipeline pipeline(stages, world, {.schedule = schedule});
  const Tensor batch = torch::ones({settings.microbatches, 1});
  const auto loss = [](const Tensor& output, const Tensor&) { return output.select(1, 0).mean(); };
  constexpr int kWarmUp = 2;
  std::vector<double> steps;
  std::vector<std::vector<double>> bubbles(static_cast<size_t>(world.world_size()));
  for (int i = 0; i < settings.repeats + kWarmUp; ++i) {
    world.barrier();
    busy_ns = 0;
    const int64_t start = now_ns();
    const auto result = pipeline.step(batch, batch, loss);
    const int64_t end = now_ns();
    if (result.loss.defined() && result.loss.item<double>() != 1.0) {
      throw cadre::Error(cadre::ErrorCode::kInternal, "the stages handed over other values");
    }
    const Tensor all = gathered(world, {start, end, busy_ns});
    if (i < kWarmUp) continue;
    const int64_t first = all.select(1, 0).min().item<int64_t>();
    const int64_t last = all.select(1, 1).max().item<int64_t>();
    steps.push_back(1e-6 * static_cast<double>(last - first));
    for (int rank = 0; rank < world.world_size(); ++rank) {
      bubbles[static_cast<size_t>(rank)].push_back(
          1e-6 * static_cast<double>(last - first - all[rank][2].item<int64_t>()));
    }
  }
  if (world.rank() != 0) return;
  std::cout << "{\"step_ms\": " << median(steps)
            << ", \"ideal_ms\": " << simulated_ms(schedule, settings, false)
            << ", \"equal_stages_ms\": " << simulated_ms(schedule, settings, true)
            << ", \"stages_per_rank\": " << stages_per_rank
            << ", \"computations\": " << num_computations(schedule, 0) << ", \"bubbles_ms\": [";
  for (size_t rank = 0; rank < bubbles.size(); ++rank) {
    std::cout << (rank > 0 ? ", " : "") << median(bubbles[rank]);
  }
  std::cout << "]}" << std::endl;
}

// The times at which, in the last step, the tensor was ready to be sent and had arrived.
struct HandOver {
  int64_t ready_ns = 0;
  int64_t arrived_ns = 0;
};
HandOver forward_hand_over, backward_hand_over;
float expected = 0;

void check_arrived(const Tensor& tensor) {
  if (tensor.eq(expected).all().item<bool>()) return;
  throw cadre::Error(cadre::ErrorCode::kInternal, "a tensor arrived with other values");
}

// The stage that sends: maps (1, 1) to (1, elements).
struct Sender : torch::autograd::Function<Sender> {
  static Tensor forward(AutogradContext*, const Tensor&, const Tensor&, int64_t elements) {
    Tensor output = torch::full({1, elements}, expected);
    forward_hand_over.ready_ns = now_ns();
    return output;
  }
  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    backward_hand_over.arrived_ns = now_ns();
    check_arrived(gradients[0]);
    return {Tensor(), torch::zeros({}), Tensor()};
  }
};

// The stage that receives: maps (1, elements) to (1, 1).
struct Receiver : torch::autograd::Function<Receiver> {
  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor&) {
    forward_hand_over.arrived_ns = now_ns();
    check_arrived(input);
    context->saved_data["elements"] = input.size(1);
    return torch::zeros({1, 1});
  }
  static variable_list backward(AutogradContext* context, const variable_list&) {
    Tensor gradient = torch::full({1, context->saved_data["elements"].toInt()}, expected);
    backward_hand_over.ready_ns = now_ns();
    return {gradient, torch::zeros({})};
  }
};

struct EndStage : torch::nn::Module {
  EndStage(bool sends, int64_t num_elements) : is_first(sends), elements(num_elements) {
    weight = register_parameter("weight", torch::zeros({}));
  }
  Tensor forward(const Tensor& x) {
    return is_first ? Sender::apply(x, weight, elements) : Receiver::apply(x, weight);
  }
  bool is_first;
  int64_t elements;
  Tensor weight;
};

// Sends one tensor from rank `sender` to the other rank with send() and recv().
void send_plainly(const cadre::ProcessGroup& world, const Tensor& buffer, int sender,
                  HandOver& hand_over) {
  world.barrier();
  if (world.rank() == sender) {
    buffer.fill_(expected);
    hand_over.ready_ns = now_ns();
    world.send(buffer, 1 - sender);
  } else {
    world.recv(buffer, sender);
    hand_over.arrived_ns = now_ns();
    check_arrived(buffer);
  }
}

void measure_hand_over(const cadre::ProcessGroup& world, const Settings& settings) {
  if (world.world_size() != 2) {
    throw cadre::Error(cadre::ErrorCode::kInvalidArgument, "a hand-over takes two ranks");
  }
  const auto stage = std::make_shared<EndStage>(world.rank() == 0, settings.elements);
  cadre::Pipeline pipeline({{stage, {.stage = world.rank(), .num_stages = 2}}}, world);
  const Tensor batch = torch::ones({1, 1});
  const auto loss = [](const Tensor& output, const Tensor&) { return output.sum(); };
  const Tensor buffer = torch::zeros({1, settings.elements});
  HandOver plain_forward, plain_backward;
  std::vector<std::vector<double>> times(4);
  const int warm_up = 1 + settings.repeats / 10;
  for (int i = 0; i < settings.repeats + warm_up; ++i) {
    expected = static_cast<float>(i + 1);
    world.barrier();
    pipeline.step(batch, batch, loss);
    send_plainly(world, buffer, 0, plain_forward);
    send_plainly(world, buffer, 1, plain_backward);
    std::vector<int64_t> stamps;
    for (const HandOver& hand_over :
         {forward_hand_over, backward_hand_over, plain_forward, plain_backward}) {
      stamps.push_back(hand_over.ready_ns);
      stamps.push_back(hand_over.arrived_ns);
    }
    const Tensor all = gathered(world, stamps);
    if (i < warm_up) continue;
    for (int64_t k = 0; k < 4; ++k) {
      const int64_t sender = k % 2;
      const int64_t spent =
          all[1 - sender][2 * k + 1].item<int64_t>() - all[sender][2 * k].item<int64_t>();
      times[static_cast<size_t>(k)].push_back(1e-3 * static_cast<double>(spent));
    }
  }
  if (world.rank() != 0) return;
  std::cout << "{\"forward_us\": " << median(times[0]) << ", \"backward_us\": " << median(times[1])
            << ", \"plain_forward_us\": " << median(times[2])
            << ", \"plain_backward_us\": " << median(times[3]) << "}" << std::endl;
}

// Returns false if the arguments are invalid.
bool parse(const std::vector<std::string>& arguments, Settings& settings) {
  if (arguments.empty()) return false;
  size_t first = 1;
  std::vector<int*> numbers = {&settings.repeats, &settings.elements};
  if (arguments[0] == "emulated") {
    if (arguments.size() < 2) return false;
    settings.schedule = arguments[1];
    settings.repeats = 10;
    first = 2;
    numbers = {&settings.repeats, &settings.microbatches, &settings.elements, &settings.forward_us,
               &settings.backward_us};
  } else if (arguments[0] != "handover") {
    return false;
  }
  if (arguments.size() > first + numbers.size()) return false;
  for (size_t i = first; i < arguments.size(); ++i) {
    *numbers[i - first] = std::atoi(arguments[i].c_str());
    if (*numbers[i - first] <= 0) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  if (!parse({argv + 1, argv + argc}, settings)) {
    std::cerr << "usage: pipeline_step handover [iterations [elements]] | emulated SCHEDULE [steps "
                 "[microbatches [elements [forward_us [backward_us]]]]], numbers above 0"
              << std::endl;
    return 2;
  }
  at::set_num_threads(1);
  prctl(PR_SET_TIMERSLACK, 1UL);  // the kernel would otherwise end sleeps late
  const auto world = cadre::init_process_group();
  if (settings.schedule.empty()) {
    measure_hand_over(world, settings);
  } else {
    measure_emulated(world, settings);
  }
  world.close();
  return 0;
} catch (const cadre::Error& error) {
  std::cerr << "pipeline_step: " << error.what() << std::endl;
  return 1;
}
