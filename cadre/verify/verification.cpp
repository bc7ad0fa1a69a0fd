#include "cadre/verify/verification.h"

#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/checkpoint/rank_agreement.h"
#include "cadre/verify/comparison.h"
#include "cadre/verify/reference_run.h"
#include "cadre/verify/user_errors.h"

namespace cadre {
namespace {

void check_options(const VerificationOptions& options) {
  if (options.num_steps < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                format("verify_strategies: num_steps is {}; at least one step is needed",
                       options.num_steps));
  }
  for (const auto& bound :
       {options.bounds.loss, options.bounds.gradients, options.bounds.parameters}) {
    if (bound && !(*bound >= 0)) {
      throw Error(
          ErrorCode::kInvalidArgument,
          format("verify_strategies: a bound is {}; bounds are shares of the largest value, "
                 "0 or more",
                 *bound));
    }
  }
}

// The largest deviations of one rank, which the ranks exchange.
struct RankDeviations {
  struct Of {
    double share;
    double difference;
    double bound;
    int64_t step;
    int64_t parameter;  // its index; -1: none
  };
  std::array<Of, 3> of;  // loss, gradients, parameters
};

class Verification {
 public:
  Verification(const ProcessGroup& world, const VerificationProgram& program,
               const VerificationOptions& options)
      : world_(world),
        program_(program),
        options_(options),
        agreement_(world, options.step_timeout) {}

  VerifyReport run(const std::vector<StrategyCase>& cases) {
    say(format("one process: {} {}", options_.num_steps, steps_text()));
    reference_ = verify::run_reference(world_, program_, options_);
    VerifyReport report{
        .world_size = world_.world_size(), .num_steps = options_.num_steps, .strategies = {}};
    for (size_t i = 0; i < cases.size(); ++i) {
      const std::string name = name_of(cases[i], world_.world_size());
      say(format("{} on {} {}: {} {} ({} of {})", name, world_.world_size(),
                 world_.world_size() == 1 ? "process" : "processes", options_.num_steps,
                 steps_text(), i + 1, cases.size()));
      report.strategies.push_back(try_case(cases[i]));
      report.strategies.back().strategy = name;
    }
    return report;
  }

 private:
  std::string_view steps_text() const { return options_.num_steps == 1 ? "step" : "steps"; }

  void say(const std::string& line) const {
    if (options_.progress && world_.rank() == 0) options_.progress(line);
  }

  StrategyReport try_case(const StrategyCase& strategy) const {
    verify::Comparison comparison(reference_, world_.rank());
    const Status trained = verify::as_status([&] { train(strategy, comparison); });
    const auto gathered =
        agreement_.gather(trained.ok() ? Result<std::string>(encode(comparison)) : trained.error());
    if (gathered.ok()) return worst_of(*gathered);
    // If one rank alone fails, the others wait for it in an operation, which fails the group; then
    // no further strategy can run.
    const auto so_far = agreement_.gather(encode(comparison));
    if (!so_far.ok()) throw trained.ok() ? gathered.error() : trained.error();
    StrategyReport failed = worst_of(*so_far);
    failed.error = gathered.error().message();
    return failed;
  }

  void train(const StrategyCase& strategy, verify::Comparison& comparison) const {
    const auto training = program_.make_training(strategy);
    for (int64_t step = 1; step <= options_.num_steps; ++step) {
      comparison.add_loss(step, training->backward(step));
      comparison.add_gradients(step, training->gradients());
      training->update(step);
      comparison.add_parameters(step, training->parameters());
    }
  }

  std::string encode(const verify::Comparison& comparison) const {
    RankDeviations deviations{};
    const std::array used{&comparison.loss(), &comparison.gradients(), &comparison.parameters()};
    for (size_t i = 0; i < used.size(); ++i) {
      const Deviation& deviation = used[i]->deviation;
      int64_t parameter = -1;
      for (size_t k = 0; k < reference_.names.size(); ++k) {
        if (reference_.names[k] == deviation.name) parameter = static_cast<int64_t>(k);
      }
      deviations.of[i] = {.share = used[i]->share,
                          .difference = deviation.difference,
                          .bound = deviation.bound,
                          .step = deviation.step,
                          .parameter = parameter};
    }
    std::string bytes(sizeof(deviations), '\0');
    std::memcpy(bytes.data(), &deviations, sizeof(deviations));
    return bytes;
  }

  StrategyReport worst_of(const std::vector<std::string>& by_rank) const {
    std::array<verify::UsedBound, 3> worst;
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      RankDeviations deviations{};
      std::memcpy(&deviations, by_rank[rank].data(), sizeof(deviations));
      for (size_t i = 0; i < worst.size(); ++i) {
        const RankDeviations::Of& of = deviations.of[i];
        const auto parameter = static_cast<size_t>(of.parameter);
        verify::keep_worse(
            worst[i], {.share = of.share,
                       .deviation = {.difference = of.difference,
                                     .bound = of.bound,
                                     .name = of.parameter < 0 ? "" : reference_.names[parameter],
                                     .step = of.step,
                                     .rank = static_cast<int>(rank)}});
      }
    }
    return {.strategy = {},
            .loss = worst[0].deviation,
            .gradients = worst[1].deviation,
            .parameters = worst[2].deviation,
            .error = {}};
  }

  ProcessGroup world_;
  const VerificationProgram& program_;
  const VerificationOptions& options_;
  RankAgreement agreement_;
  verify::ReferenceRun reference_;
};

}  // namespace

VerifyReport run_verification(const ProcessGroup& world, const VerificationProgram& program,
                              const std::vector<StrategyCase>& cases,
                              const VerificationOptions& options) {
  check_options(options);
  return Verification(world, program, options).run(cases);
}

}  // namespace cadre
