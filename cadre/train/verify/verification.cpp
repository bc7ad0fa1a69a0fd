#include "cadre/train/verify/verification.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/group/caught_error.h"
#include "cadre/train/verify/comparison.h"
#include "cadre/train/verify/reference_run.h"

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
    if (bound && !(*bound >= 0 && *bound < 1)) {
      throw Error(
          ErrorCode::kInvalidArgument,
          format("verify_strategies: a bound is {}; bounds are shares of the largest value, "
                 "from 0 to less than 1: with 1 or more, zeros would be within them",
                 *bound));
    }
  }
}

constexpr const char* kVerifier = "verify_strategies";

std::string text_of(const std::optional<double>& bound) {
  return bound ? format("{:a}", *bound) : "the default";
}

// Returns the fields that must be equal on all ranks.
std::vector<AgreedField> fields_of(const std::vector<StrategyCase>& cases,
                                   const VerificationOptions& options, int world_size) {
  std::string names;
  for (const StrategyCase& strategy : cases) {
    names += (names.empty() ? "" : ", ") + name_of(strategy, world_size);
  }
  return {{"num_steps", format("{}", options.num_steps)},
          {"bounds.loss", text_of(options.bounds.loss)},
          {"bounds.gradients", text_of(options.bounds.gradients)},
          {"bounds.parameters", text_of(options.bounds.parameters)},
          {"the list of strategies", names}};
}

// The largest deviations that one rank has found. The ranks exchange them.
struct RankDeviations {
  struct Of {
    double share;
    double difference;
    double bound;
    int64_t step;
    int64_t tensor;  // the index of the parameter or buffer; -1 for the loss
  };
  std::array<Of, 4> of;  // the order is loss, gradients, parameters, buffers
};

// The outcome of a case on one rank. The ranks exchange it at the end of the case. An empty message
// means that the rank had no error.
struct RankOutcome {
  RankDeviations deviations{};
  Error error{ErrorCode::kInternal, ""};

  bool has_error() const { return !error.message().empty(); }
};

// Returns the deviations, the error code and the message as one text.
std::string encode(const RankOutcome& outcome) {
  std::string text(sizeof(RankDeviations), '\0');
  std::memcpy(text.data(), &outcome.deviations, sizeof(RankDeviations));
  text += static_cast<char>(outcome.error.code());
  return text + outcome.error.message();
}

RankOutcome decode(const std::string& text) {
  constexpr size_t kHeadBytes = sizeof(RankDeviations) + 1;
  RankOutcome outcome;
  std::memcpy(&outcome.deviations, text.data(), sizeof(RankDeviations));
  outcome.error =
      Error(static_cast<ErrorCode>(text[sizeof(RankDeviations)]), text.substr(kHeadBytes));
  return outcome;
}

// Returns the rank whose error is the cause. If one rank fails alone, it aborts the group of the
// case; the errors of the other ranks then only report that abort.
std::optional<size_t> rank_at_fault(const std::vector<RankOutcome>& outcomes) {
  std::optional<size_t> first;
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (!outcomes[rank].has_error()) continue;
    const ErrorCode code = outcomes[rank].error.code();
    if (code != ErrorCode::kAborted && code != ErrorCode::kPeerLost) return rank;
    if (!first) first = rank;
  }
  return first;
}

class Verification {
 public:
  Verification(const ProcessGroup& world, const VerificationProgram& program,
               const VerificationOptions& options)
      : world_(world), program_(program), options_(options) {}

  VerifyReport run(const std::vector<StrategyCase>& cases) {
    say(format("one process: {} {}", options_.num_steps, steps_text()));
    reference_ = verify::run_reference(world_, program_, options_);
    check_reference();
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

  // Throws if the reference changes no parameter or has only zero gradients: a wrong training could
  // then not deviate from it.
  void check_reference() const {
    if (reference_.has_gradients && reference_.changes_parameters) return;
    throw Error(ErrorCode::kInvalidArgument,
                format("verify_strategies: in {} {} of one process {}, so a wrong computation "
                       "would not be noticed. Check that the loss depends on the parameters, the "
                       "learning rate, and the number of steps",
                       options_.num_steps, steps_text(),
                       reference_.has_gradients ? "no parameter changes" : "every gradient is 0"));
  }

  AgreementSubject subject() const { return {kVerifier, options_.step_timeout}; }

  StrategyReport try_case(const StrategyCase& strategy) const {
    const std::string not_run = reason_not_to_run(strategy);
    if (!not_run.empty()) return {.strategy = {}, .error = {}, .not_run = not_run};
    std::vector<int> everyone(static_cast<size_t>(world_.world_size()));
    std::iota(everyone.begin(), everyone.end(), 0);
    const ProcessGroup group = *world_.new_group(everyone);
    verify::Comparison comparison(reference_, world_.rank());
    RankOutcome own;
    try {
      train(strategy, group, comparison);
    } catch (...) {
      own.error = caught_error();
      // Other ranks may be waiting for this rank in a collective.
      group.abort(format("rank {}: {}", world_.rank(), own.error.message()));
    }
    own.deviations = deviations_of(comparison);
    std::vector<RankOutcome> outcomes;
    try {
      for (const std::string& text : gather_texts(world_, subject(), [&] { return encode(own); })) {
        outcomes.push_back(decode(text));
      }
    } catch (const Error&) {
      if (own.has_error()) throw own.error;
      throw;
    }
    StrategyReport report = worst_of(outcomes);
    if (const auto rank = rank_at_fault(outcomes)) {
      report.error = world_.world_size() == 1
                         ? outcomes[*rank].error.message()
                         : format("rank {}: {}", *rank, outcomes[*rank].error.message());
    }
    return report;
  }

  // Returns why the case cannot run, with an equal text on all ranks; an empty text if it can run.
  std::string reason_not_to_run(const StrategyCase& strategy) const {
    if (!program_.why_not) return {};
    const auto reasons =
        gather_texts(world_, subject(), [&] { return program_.why_not(strategy); });
    const auto given = std::ranges::find_if_not(reasons, &std::string::empty);
    return given == reasons.end() ? std::string() : *given;
  }

  void train(const StrategyCase& strategy, const ProcessGroup& group,
             verify::Comparison& comparison) const {
    const auto training = program_.make_training(strategy, group);
    for (int64_t step = 1; step <= options_.num_steps; ++step) {
      comparison.add_loss(step, training->backward(step));
      comparison.add_gradients(step, training->gradients());
      training->update(step);
      comparison.add_parameters(step, training->parameters());
      comparison.add_buffers(step, training->buffers());
    }
    training->close();
  }

  RankDeviations deviations_of(const verify::Comparison& comparison) const {
    RankDeviations deviations{};
    const std::array used{&comparison.loss(), &comparison.gradients(), &comparison.parameters(),
                          &comparison.buffers()};
    for (size_t i = 0; i < used.size(); ++i) {
      const Deviation& deviation = used[i]->deviation;
      const std::vector<std::string>& names = names_of(i);
      const auto found = std::ranges::find(names, deviation.name);
      deviations.of[i] = {.share = used[i]->share,
                          .difference = deviation.difference,
                          .bound = deviation.bound,
                          .step = deviation.step,
                          .tensor = found == names.end() ? -1 : found - names.begin()};
    }
    return deviations;
  }

  // Returns the names to which the index RankDeviations::Of::tensor refers.
  const std::vector<std::string>& names_of(size_t index) const {
    return index == 3 ? reference_.buffer_names : reference_.names;
  }

  StrategyReport worst_of(const std::vector<RankOutcome>& by_rank) const {
    std::array<verify::UsedBound, 4> worst;
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      for (size_t i = 0; i < worst.size(); ++i) {
        const RankDeviations::Of& of = by_rank[rank].deviations.of[i];
        const auto tensor = static_cast<size_t>(of.tensor);
        verify::keep_worse(worst[i],
                           {.share = of.share,
                            .deviation = {.difference = of.difference,
                                          .bound = of.bound,
                                          .name = of.tensor < 0 ? "" : names_of(i)[tensor],
                                          .step = of.step,
                                          .rank = static_cast<int>(rank)}});
      }
    }
    return {.strategy = {},
            .loss = worst[0].deviation,
            .gradients = worst[1].deviation,
            .parameters = worst[2].deviation,
            .buffers = worst[3].deviation,
            .error = {}};
  }

  ProcessGroup world_;
  const VerificationProgram& program_;
  const VerificationOptions& options_;
  verify::ReferenceRun reference_;
};

}  // namespace

VerifyReport run_verification(const ProcessGroup& world, const VerificationProgram& program,
                              const std::vector<StrategyCase>& cases,
                              const VerificationOptions& options) {
  check_equal_on_all_ranks(
      world, kVerifier,
      [&] {
        check_options(options);
        return fields_of(cases, options, world.world_size());
      },
      "pass the same options on all ranks");
  return Verification(world, program, options).run(cases);
}

}  // namespace cadre
