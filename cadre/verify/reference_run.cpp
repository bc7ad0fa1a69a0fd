#include "cadre/verify/reference_run.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/checkpoint/rank_agreement.h"
#include "cadre/verify/user_errors.h"
#include "cadre/wrap/replica_check.h"
#include "cadre/wrap/replica_group.h"

namespace cadre {
namespace {

constexpr const char* kVerifier = "verify_strategies";
// A gradient's scale is at least this share of the largest gradient.
constexpr double kShareOfLargestGradient = 0.01;

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

// The reference's optimizer on parameters of its own, with gradients that differ from the
// reference's by their bound in one of four directions.
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
        parameter.mutable_grad() = perturbed(gradients[i], k);
      }
      copy.rule->update(step);
    }
  }

  // Twice the largest difference that any direction has made of parameter i.
  at::Tensor bounds(size_t i, const at::Tensor& reference) const {
    const at::NoGradGuard no_grad;
    at::Tensor bounds = at::zeros_like(reference);
    for (const Copy& copy : copies_) {
      bounds = at::maximum(bounds, (copy.parameters[i].tensor - reference).abs());
    }
    return 2 * bounds;
  }

 private:
  static constexpr size_t kNumDirections = 4;
  struct Copy {
    std::vector<NamedTensor> parameters;
    std::unique_ptr<UpdateRule> rule;
  };

  static at::Tensor perturbed(const ReferenceTensor& gradient, size_t direction) {
    if (!gradient.values.defined()) return {};
    const at::NoGradGuard no_grad;
    const double by = (direction % 2 == 0 ? 1 : -1) * gradient.bound * gradient.scale;
    if (direction < 2) return gradient.values + by;
    return gradient.values + at::sign(gradient.values) * by;
  }

  std::vector<Copy> copies_;
};

class ReferenceRecorder {
 public:
  ReferenceRecorder(const ProcessGroup& world, const VerificationProgram& program,
                    const VerificationOptions& options)
      : options_(options),
        world_(world),
        agreement_(world, options.step_timeout),
        replicas_(make_replica_group(world)) {
    const Status made = as_status([&] { training_ = program.make_reference(); });
    agree(made);
    parameters_ = training_->parameters();
    check_replicas_match(kVerifier, {.parameters = parameters_, .buffers = {}}, *replicas_);
    for (NamedTensor& parameter : parameters_) {
      run_.names.push_back(parameter.name);
      parameter.tensor = parameter.tensor.detach().clone();
    }
    broadcast_tensors(parameters_, 0, *replicas_);
    choose_bounds();
    if (has_float32()) perturbed_.emplace(*training_, parameters_);
  }

  ReferenceRun run() {
    for (int64_t step = 1; step <= options_.num_steps; ++step) record(step);
    return std::move(run_);
  }

 private:
  // Throws on all ranks what one has.
  void agree(const Status& own) const {
    const auto outcome =
        agreement_.gather(own.ok() ? Result<std::string>(std::string()) : own.error());
    if (!outcome.ok()) throw outcome.error().with_context("the training of one process");
  }

  bool is_first() const { return world_.rank() == 0; }

  bool has_float32() const {
    return !options_.bounds.parameters &&
           std::ranges::any_of(parameters_, [](const NamedTensor& parameter) {
             return parameter.tensor.scalar_type() != at::kDouble;
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
    std::vector<NamedTensor> gradients = parameters_;  // of the same sizes
    std::vector<NamedTensor> parameters;
    const Status computed = as_status([&] {
      if (!is_first()) return;
      loss = training_->backward(step);
      check_loss(step, loss);
      gradients = copies(training_->gradients());
      training_->update(step);
      parameters = copies(training_->parameters());
    });
    agree(computed);
    if (!is_first()) {
      for (NamedTensor& gradient : gradients) gradient.tensor = at::empty_like(gradient.tensor);
      parameters = copies(parameters_);
    }
    send(loss, gradients);
    broadcast_tensors(parameters, 0, *replicas_);
    add(step, loss, gradients, parameters);
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

  // The loss, which gradients are defined, and those.
  void send(double& loss, std::vector<NamedTensor>& gradients) const {
    const auto count = static_cast<int64_t>(gradients.size());
    const at::Tensor head = at::empty({count + 1}, at::kDouble);
    auto* values = head.mutable_data_ptr<double>();
    values[0] = loss;
    for (int64_t i = 0; i < count; ++i) {
      values[i + 1] = gradients[static_cast<size_t>(i)].tensor.defined() ? 1 : 0;
    }
    replicas_->broadcast(head, 0);
    loss = values[0];
    std::vector<NamedTensor> sent;
    for (int64_t i = 0; i < count; ++i) {
      NamedTensor& gradient = gradients[static_cast<size_t>(i)];
      if (values[i + 1] == 0) {
        gradient.tensor = at::Tensor();
      } else {
        gradient.tensor = gradient.tensor.contiguous();
        sent.push_back(gradient);
      }
    }
    broadcast_tensors(sent, 0, *replicas_);
  }

  void add(int64_t step, double loss, const std::vector<NamedTensor>& gradients,
           const std::vector<NamedTensor>& parameters) {
    ReferenceStep& recorded = run_.steps.emplace_back();
    recorded.loss = loss;
    recorded.loss_bound = loss_bound_;
    double largest_of_all = 0;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const double scale = largest(gradients[i].tensor);
      largest_of_all = std::max(largest_of_all, scale);
      recorded.gradients.push_back(
          {.values = gradients[i].tensor, .scale = scale, .bound = gradient_bounds_[i]});
    }
    for (ReferenceTensor& gradient : recorded.gradients) {
      gradient.scale = std::max(gradient.scale, kShareOfLargestGradient * largest_of_all);
    }
    if (perturbed_) perturbed_->update(step, recorded.gradients);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& values = parameters[i].tensor;
      ReferenceTensor& parameter = recorded.parameters.emplace_back(ReferenceTensor{
          .values = values, .scale = largest(values), .bound = parameter_bounds_[i]});
      if (!perturbed_ || values.scalar_type() == at::kDouble || parameter.scale == 0) continue;
      parameter.bounds =
          (perturbed_->bounds(i, values) / parameter.scale).clamp_min_(parameter.bound);
    }
  }

  const VerificationOptions& options_;
  ProcessGroup world_;
  RankAgreement agreement_;
  std::shared_ptr<ReplicaGroup> replicas_;
  std::unique_ptr<ReferenceTraining> training_;
  std::vector<NamedTensor> parameters_;  // before the first step
  std::vector<double> gradient_bounds_;  // by parameter
  std::vector<double> parameter_bounds_;
  double loss_bound_ = 0;
  std::optional<PerturbedUpdates> perturbed_;
  ReferenceRun run_;
};

}  // namespace

ReferenceRun run_reference(const ProcessGroup& world, const VerificationProgram& program,
                           const VerificationOptions& options) {
  return ReferenceRecorder(world, program, options).run();
}

}  // namespace cadre
