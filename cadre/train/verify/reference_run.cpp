#include "cadre/train/verify/reference_run.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/group/operands/world_of_one.h"
#include "cadre/tensor/hooks/replica_check.h"

namespace cadre::verify {
namespace {

constexpr const char* kVerifier = "verify_strategies";
constexpr const char* kRemedy =
    "the reference of a verification trains without other ranks. Take the group that is handed to "
    "make_module(group) and loss(model, rows, group), which has one rank in the reference and all "
    "ranks under a strategy, instead of one that the functions have captured";
// A gradient's differences are divided by its scale: its largest absolute value, but at least this
// fraction of the model's largest gradient.
constexpr double kShareOfLargestGradient = 0.01;

// Constants of the disturbed training in float32: the size of its random errors in the gradients
// (as a fraction of their bound) and in the parameters, and the factor by which the resulting
// differences are multiplied.
constexpr double kDisturbedShareOfBound = 0.1;
constexpr double kDisturbedRoundings = 4 * 0x1p-24;
constexpr double kDisturbanceFactor = 4;
// If a gradient's largest value is between this fraction and kShareOfLargestGradient of the model's
// largest gradient, it does not consist of rounding errors. Its bound is then tightened: to one
// relative to its own size, or to the measured effect of the disturbances times
// kSmallGradientFactor.
constexpr double kShareOfRoundingError = 1e-4;
constexpr double kSmallGradientFactor = 16;
constexpr double kLargestBound = 1e-2;

double largest(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? tensor.abs().max().item<double>() : 0;
}

double default_bound(at::ScalarType dtype, const std::string& name) {
  if (dtype == at::kDouble) return 1e-10;
  if (dtype == at::kFloat) return 1e-5;
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: parameter \"{}\" has dtype {}, for which there are no default bounds: "
                     "give bounds.loss, bounds.gradients and bounds.parameters, or verify in "
                     "float64 (options.dtype)",
                     kVerifier, name, c10::toString(dtype)));
}

// Returns the scale of each gradient: the number to which its differences are relative.
std::vector<double> scales_of(const std::vector<NamedTensor>& gradients) {
  std::vector<double> scales;
  for (const NamedTensor& gradient : gradients) scales.push_back(largest(gradient.tensor));
  const double largest_of_all = *std::ranges::max_element(scales);
  for (double& scale : scales) {
    scale = std::max(scale, kShareOfLargestGradient * largest_of_all);
  }
  return scales;
}

double enlarged(double bound, double difference) {
  if (!(difference * kDisturbanceFactor <= kLargestBound)) return std::max(bound, kLargestBound);
  return std::max(bound, difference * kDisturbanceFactor);
}

// Repeats the training with random errors of a few roundings in the initial parameters and in the
// gradients. Its distance from the reference shows how much rounding errors grow in this model.
class DisturbedTraining {
 public:
  explicit DisturbedTraining(std::unique_ptr<ReferenceTraining> training)
      : training_(std::move(training)),
        generator_(at::make_generator<at::CPUGeneratorImpl>(kSeed)) {
    const at::NoGradGuard no_grad;
    for (NamedTensor& parameter : training_->parameters()) {
      parameter.tensor.mul_(1 + kDisturbedRoundings * noise(parameter.tensor));
    }
  }

  // The differences of a step from the reference: that of the loss, relative to the reference's
  // loss, and those of the gradients, relative to their scales.
  struct Differences {
    double loss = 0;
    std::vector<double> gradients = {};
  };
  Differences backward(int64_t step, double loss, const std::vector<NamedTensor>& gradients) {
    const at::NoGradGuard no_grad;
    Differences differences;
    {
      const at::AutoGradMode with_grad(true);
      differences.loss = std::abs(training_->backward(step) - loss) / std::abs(loss);
    }
    const std::vector<double> scales = scales_of(gradients);
    const std::vector<NamedTensor> own = training_->gradients();
    for (size_t i = 0; i < own.size(); ++i) {
      const bool is_compared = own[i].tensor.defined() && gradients[i].tensor.defined();
      differences.gradients.push_back(is_compared && scales[i] > 0
                                          ? largest(own[i].tensor - gradients[i].tensor) / scales[i]
                                          : 0);
    }
    return differences;
  }

  // Returns the difference of each buffer from the reference's. Call it after an update.
  std::vector<double> buffer_differences(const std::vector<NamedTensor>& buffers) {
    std::vector<double> differences;
    const std::vector<NamedTensor> own = training_->buffers();
    for (size_t i = 0; i < own.size(); ++i) {
      differences.push_back(
          largest(own[i].tensor.to(at::kDouble) - buffers[i].tensor.to(at::kDouble)));
    }
    return differences;
  }

  // `bounds` are the bounds of the gradients, relative to their scales.
  void update(int64_t step, const std::vector<double>& bounds) {
    {
      const at::NoGradGuard no_grad;
      const std::vector<NamedTensor> own = training_->gradients();
      const std::vector<double> scales = scales_of(own);
      for (size_t i = 0; i < own.size(); ++i) {
        at::Tensor gradient = own[i].tensor;
        if (!gradient.defined()) continue;
        // A gradient of 0 gets no random error, because it is exact: for example that of an
        // embedding's row for a token that does not occur.
        const at::Tensor is_used = gradient.ne(0).to(gradient.scalar_type());
        gradient.add_(noise(gradient) * is_used, kDisturbedShareOfBound * bounds[i] * scales[i]);
      }
    }
    training_->update(step);
  }

 private:
  static constexpr uint64_t kSeed = 1;

  // Returns random values, uniform in [-1, 1).
  at::Tensor noise(const at::Tensor& like) {
    return at::empty(like.sizes(), like.scalar_type())
        .uniform_(-1, 1, generator_)
        .to(like.device());
  }

  std::unique_ptr<ReferenceTraining> training_;
  at::Generator generator_;
};

// Runs the reference's optimizer on several copies of the parameters. Each copy gets gradients that
// differ from the reference's by their bound, in a direction of its own. The differences between
// the resulting parameters bound what an accepted gradient may do to a parameter.
class PerturbedUpdates {
 public:
  PerturbedUpdates(ReferenceTraining& reference, const std::vector<NamedTensor>& initial) {
    for (size_t k = 0; k < kNumDirections; ++k) {
      Copy& copy = copies_.emplace_back();
      for (const NamedTensor& parameter : initial) {
        copy.parameters.push_back(
            {parameter.name, parameter.tensor.detach().clone().requires_grad_(true)});
      }
      copy.rule = reference.rule_for(copy.parameters);
    }
  }

  void update(int64_t step, std::span<const ReferenceTensor> gradients) {
    for (size_t k = 0; k < kNumDirections; ++k) {
      Copy& copy = copies_[k];
      for (size_t i = 0; i < gradients.size(); ++i) {
        at::Tensor parameter = copy.parameters[i].tensor;
        parameter.mutable_grad() = perturbed(gradients[i], {.index = k, .step = step});
      }
      copy.rule->update(step);
    }
  }

  // Returns, for each element of parameter i, twice the largest difference from `reference` over
  // all directions.
  at::Tensor bounds(size_t i, const at::Tensor& reference) const {
    const at::NoGradGuard no_grad;
    at::Tensor bounds = at::zeros_like(reference);
    for (const Copy& copy : copies_) {
      bounds = at::maximum(bounds, (copy.parameters[i].tensor - reference).abs());
    }
    return 2 * bounds;
  }

 private:
  static constexpr size_t kNumDirections = 6;
  struct Copy {
    std::vector<NamedTensor> parameters;
    std::unique_ptr<UpdateRule> rule;
  };

  // The directions in which the gradients are changed: up, down, away from zero, towards zero; and
  // with alternating signs: up and down, away and towards.
  struct Direction {
    size_t index;
    int64_t step;
    bool is_by_sign() const { return index == 2 || index == 3 || index == 5; }
    bool is_negative() const { return index < 4 ? index % 2 == 1 : step % 2 == 1; }
  };
  static at::Tensor perturbed(const ReferenceTensor& gradient, const Direction& direction) {
    if (!gradient.values.defined()) return {};
    const at::NoGradGuard no_grad;
    const double by = (direction.is_negative() ? -1 : 1) * gradient.bound * gradient.scale;
    if (!direction.is_by_sign()) return gradient.values + by;
    return gradient.values + at::sign(gradient.values) * by;
  }

  std::vector<Copy> copies_;
};

class ReferenceRecorder {
 public:
  ReferenceRecorder(const ProcessGroup& world, const VerificationProgram& program,
                    const VerificationOptions& options)
      : options_(options), world_(world), is_first_(world.rank() == 0) {
    const ProcessGroup alone = *world.split({.color = world.rank(), .name = "one process"});
    agree([&] {
      training_ = program.make_reference(alone);
      if (is_first_ && !is_all_given(options.bounds) && has_float32(*training_)) {
        disturbed_.emplace(program.make_reference(alone));
      }
      parameters_ = training_->parameters();
      buffers_ = copies(training_->buffers());
      if (parameters_.empty()) {
        throw Error(ErrorCode::kInvalidArgument,
                    "the module has no parameters, so there is nothing to train and to compare");
      }
    });
    wrap::check_replicas_match(kVerifier, {.parameters = parameters_, .buffers = {}}, world_);
    for (NamedTensor& parameter : parameters_) {
      run_.names.push_back(parameter.name);
      parameter.tensor = parameter.tensor.detach().clone();
    }
    wrap::broadcast_tensors(parameters_, 0, world_);
    for (NamedTensor& buffer : buffers_) run_.buffer_names.push_back(buffer.name);
    choose_bounds();
    if (!options.bounds.parameters && has_float32(*training_)) {
      perturbed_.emplace(*training_, parameters_);
    }
  }

  ReferenceRun run() {
    for (int64_t step = 1; step <= options_.num_steps; ++step) record(step);
    return std::move(run_);
  }

 private:
  // Calls `run` on every rank, with a world of one process. If it throws on one rank, all ranks
  // throw that error.
  void agree(const std::function<void()>& run) const {
    const auto refusal = common_refusal(world_, {kVerifier, options_.step_timeout}, [&run] {
      const WorldOfOneScope scope(kRemedy);
      run();
    });
    if (!refusal) return;
    const Error& error = refusal->error;
    throw(world_.world_size() == 1 ? error : error.with_context(format("rank {}", refusal->rank)))
        .with_context("the training of one process");
  }

  static bool is_all_given(const VerifyBounds& bounds) {
    return bounds.loss && bounds.gradients && bounds.parameters;
  }

  static bool has_float32(ReferenceTraining& training) {
    return std::ranges::any_of(training.parameters(), [](const NamedTensor& parameter) {
      return parameter.tensor.scalar_type() == at::kFloat;
    });
  }

  void choose_bounds() {
    for (const NamedTensor& parameter : parameters_) {
      const auto choose = [&](const std::optional<double>& given) {
        return given ? *given : default_bound(parameter.tensor.scalar_type(), parameter.name);
      };
      gradient_bounds_.push_back(choose(options_.bounds.gradients));
      parameter_bounds_.push_back(choose(options_.bounds.parameters));
      loss_bound_ = std::max(loss_bound_, choose(options_.bounds.loss));
    }
  }

  void record(int64_t step) {
    double loss = 0;
    std::vector<NamedTensor> gradients = parameters_;  // copied only for the names and sizes
    std::vector<NamedTensor> parameters;
    std::vector<NamedTensor> buffers = buffers_;
    StepBounds bounds{
        .loss = 0, .gradients = gradient_bounds_, .buffers = std::vector<double>(buffers_.size())};
    agree([&] {
      if (!is_first_) return;
      loss = training_->backward(step);
      check_loss(step, loss);
      gradients = copies(training_->gradients());
      bounds = bounds_of(step, loss, gradients);
      training_->update(step);
      parameters = copies(training_->parameters());
      buffers = copies(training_->buffers());
      bounds.buffers = buffer_bounds(buffers);
    });
    if (!is_first_) {
      for (NamedTensor& gradient : gradients) gradient.tensor = at::empty_like(gradient.tensor);
      parameters = copies(parameters_);
      buffers = copies(buffers_);
    }
    send(loss, gradients, bounds);
    wrap::broadcast_tensors(parameters, 0, world_);
    if (!buffers.empty()) wrap::broadcast_tensors(buffers, 0, world_);
    ReferenceStep& recorded = run_.steps.emplace_back();
    recorded.loss = loss;
    recorded.loss_bound = bounds.loss;
    add_gradients(recorded, gradients, bounds);
    add_parameters(recorded, step, parameters);
    for (size_t i = 0; i < buffers.size(); ++i) {
      recorded.buffers.push_back({.values = buffers[i].tensor,
                                  .scale = largest(buffers[i].tensor.to(at::kDouble)),
                                  .bound = bounds.buffers[i]});
    }
    note_changes(gradients, parameters);
  }

  struct StepBounds {
    double loss = 0;
    std::vector<double> gradients;
    std::vector<double> buffers = {};
  };

  // Records whether any gradient is not 0 and whether any parameter changes. If neither happens, a
  // comparison with the reference proves nothing.
  void note_changes(const std::vector<NamedTensor>& gradients,
                    const std::vector<NamedTensor>& parameters) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (largest(gradients[i].tensor) > 0) run_.has_gradients = true;
      if (!parameters[i].tensor.equal(parameters_[i].tensor)) run_.changes_parameters = true;
    }
  }

  // Is called on rank 0 only.
  std::vector<double> buffer_bounds(const std::vector<NamedTensor>& buffers) {
    std::vector<double> bounds;
    std::vector<double> differences(buffers.size(), 0);
    if (disturbed_) differences = disturbed_->buffer_differences(buffers);
    for (size_t i = 0; i < buffers.size(); ++i) {
      const at::Tensor& values = buffers[i].tensor;
      if (!values.is_floating_point()) {
        bounds.push_back(0);
      } else if (options_.bounds.parameters) {
        bounds.push_back(*options_.bounds.parameters);
      } else if (values.scalar_type() == at::kDouble) {
        bounds.push_back(default_bound(at::kDouble, buffers[i].name));
      } else if (values.scalar_type() == at::kFloat) {
        const double scale = largest(values);
        bounds.push_back(enlarged(default_bound(at::kFloat, buffers[i].name),
                                  scale > 0 ? differences[i] / scale : 0));
      } else {
        bounds.push_back(kLargestBound);
      }
    }
    return bounds;
  }

  // Is called on rank 0 only.
  StepBounds bounds_of(int64_t step, double loss, const std::vector<NamedTensor>& gradients) {
    StepBounds bounds{.loss = loss_bound_, .gradients = gradient_bounds_, .buffers = {}};
    if (!disturbed_) return bounds;
    const auto differences = disturbed_->backward(step, loss, gradients);
    disturbed_->update(step, gradient_bounds_);
    if (!options_.bounds.loss) bounds.loss = enlarged(bounds.loss, differences.loss);
    if (options_.bounds.gradients) return bounds;
    const std::vector<double> scales = scales_of(gradients);
    for (size_t i = 0; i < bounds.gradients.size(); ++i) {
      if (parameters_[i].tensor.scalar_type() != at::kFloat) continue;
      bounds.gradients[i] = std::min(enlarged(bounds.gradients[i], differences.gradients[i]),
                                     bound_of_small(largest(gradients[i].tensor), scales[i],
                                                    differences.gradients[i], gradient_bounds_[i]));
    }
    return bounds;
  }

  // Returns a tighter bound for a gradient whose largest value, `own`, is small compared with the
  // model's largest gradient; it is relative to `scale`, like `difference`. Returns infinity (no
  // tighter bound) if the gradient is not smaller than its scale, or so small that it consists of
  // rounding errors.
  static double bound_of_small(double own, double scale, double difference, double default_bound) {
    const bool is_small =
        own < scale && own > scale * kShareOfRoundingError / kShareOfLargestGradient;
    if (!is_small) return std::numeric_limits<double>::infinity();
    return std::max(default_bound * own / scale, kSmallGradientFactor * difference);
  }

  static std::vector<NamedTensor> copies(std::vector<NamedTensor> tensors) {
    for (NamedTensor& tensor : tensors) {
      if (tensor.tensor.defined()) tensor.tensor = tensor.tensor.detach().clone();
    }
    return tensors;
  }

  static void check_loss(int64_t step, double loss) {
    if (std::isfinite(loss)) return;
    throw Error(ErrorCode::kInvalidArgument,
                format("the loss of step {} is {}: there is nothing to compare with. Check the "
                       "model, its data and the learning rate",
                       step, loss));
  }

  // Sends rank 0's values to all ranks: the loss, which gradients are defined, the gradients, and
  // all bounds.
  void send(double& loss, std::vector<NamedTensor>& gradients, StepBounds& bounds) const {
    const size_t count = gradients.size();
    const size_t num_buffers = bounds.buffers.size();
    const at::Tensor head =
        at::empty({static_cast<int64_t>(2 * count + num_buffers + 2)}, at::kDouble);
    auto* values = head.mutable_data_ptr<double>();
    auto* of_gradients = values + 2;
    auto* of_buffers = of_gradients + 2 * count;
    std::ranges::copy(bounds.buffers, of_buffers);
    values[0] = loss;
    values[1] = bounds.loss;
    for (size_t i = 0; i < count; ++i) {
      of_gradients[2 * i] = gradients[i].tensor.defined() ? 1 : 0;
      of_gradients[2 * i + 1] = bounds.gradients[i];
    }
    world_.broadcast(head);
    loss = values[0];
    bounds.loss = values[1];
    std::copy_n(of_buffers, num_buffers, bounds.buffers.begin());
    std::vector<NamedTensor> sent;
    for (size_t i = 0; i < count; ++i) {
      bounds.gradients[i] = of_gradients[2 * i + 1];
      at::Tensor& gradient = gradients[i].tensor;
      if (of_gradients[2 * i] == 0) {
        gradient = at::Tensor();
        continue;
      }
      gradient = gradient.contiguous();
      sent.push_back(gradients[i]);
    }
    wrap::broadcast_tensors(sent, 0, world_);
  }

  static void add_gradients(ReferenceStep& recorded, const std::vector<NamedTensor>& gradients,
                            const StepBounds& bounds) {
    const std::vector<double> scales = scales_of(gradients);
    for (size_t i = 0; i < gradients.size(); ++i) {
      recorded.gradients.push_back(
          {.values = gradients[i].tensor, .scale = scales[i], .bound = bounds.gradients[i]});
    }
  }

  void add_parameters(ReferenceStep& recorded, int64_t step,
                      const std::vector<NamedTensor>& parameters) {
    if (perturbed_) perturbed_->update(step, recorded.gradients);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& values = parameters[i].tensor;
      ReferenceTensor& parameter = recorded.parameters.emplace_back(ReferenceTensor{
          .values = values, .scale = largest(values), .bound = parameter_bounds_[i]});
      if (!perturbed_ || values.scalar_type() != at::kFloat || parameter.scale == 0) continue;
      parameter.bounds =
          (perturbed_->bounds(i, values) / parameter.scale).clamp_min_(parameter.bound);
    }
  }

  const VerificationOptions& options_;
  ProcessGroup world_;
  const bool is_first_;
  std::unique_ptr<ReferenceTraining> training_;
  std::vector<NamedTensor> parameters_;  // the values before the first step
  std::vector<NamedTensor> buffers_;     // the values before the first step
  std::vector<double> gradient_bounds_;  // has one bound for each parameter
  std::vector<double> parameter_bounds_;
  double loss_bound_ = 0;
  std::optional<DisturbedTraining> disturbed_;  // set on rank 0 only
  std::optional<PerturbedUpdates> perturbed_;
  ReferenceRun run_;
};

}  // namespace

ReferenceRun run_reference(const ProcessGroup& world, const VerificationProgram& program,
                           const VerificationOptions& options) {
  return ReferenceRecorder(world, program, options).run();
}

}  // namespace cadre::verify
