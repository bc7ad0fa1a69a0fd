#include "cadre/launch/cli/schedule/schedule_options.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <numeric>
#include <system_error>

#include "cadre/core/base/format.h"
#include "cadre/core/base/nearest.h"
#include "cadre/core/schedule/partition.h"
#include "cadre/launch/cli/option_words.h"

namespace cadre::cli {
namespace {

constexpr std::array kScheduleOptions{OptionSpec{"--name", "NAME"},
                                      OptionSpec{"--ranks", "P"},
                                      OptionSpec{"--microbatches", "M"},
                                      OptionSpec{"--virtual", "V"},
                                      OptionSpec{"--from", "FILE"},
                                      OptionSpec{"--lower", "WHERE"},
                                      OptionSpec{"--csv", "FILE"},
                                      OptionSpec{"--json", "FILE"},
                                      OptionSpec{"--forward-ms", "T,T,..."},
                                      OptionSpec{"--backward-ms", "T,T,..."},
                                      OptionSpec{"--input-grad-ms", "T,..."},
                                      OptionSpec{"--weight-grad-ms", "T,..."},
                                      OptionSpec{"--layer-ms", "T,T,..."},
                                      OptionSpec{"--message-ms", "T"},
                                      OptionSpec{"--overlap", "SHARE"},
                                      OptionSpec{"--max-live", "N"},
                                      OptionSpec{"--list", ""},
                                      OptionSpec{"--help", "", 'h'}};
// The number of stages that PyTorch keeps unsharded at most. With the same limit, `cadre schedule`
// lowers a schedule to the same actions as PyTorch.
constexpr int kPyTorchUnshardedStages = 3;
// A time is 0 or between a nanosecond and 30 years. The upper limit keeps sums over all actions
// finite; the lower one keeps every time distinguishable from 0 in the picture of a step.
constexpr double kShortestMs = 1e-6;
constexpr double kLongestMs = 1e12;
constexpr std::string_view kExpectedMs = "expected milliseconds, 0 or from 1e-6 to 1e12";

Error wrong_option(const GivenOption& given, std::string_view sentence) {
  return Error(ErrorCode::kInvalidArgument, cadre::format("{}: {}", given.text(), sentence));
}

Error wrong_words(std::string_view sentence) {
  return Error(ErrorCode::kInvalidArgument, std::string(sentence));
}

std::optional<double> parse_number(std::string_view text) {
  double number = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end || !std::isfinite(number) || number < 0) {
    return std::nullopt;
  }
  return number;
}

std::optional<double> parse_milliseconds(std::string_view text) {
  const auto number = parse_number(text);
  if (number && *number != 0 && (*number < kShortestMs || *number > kLongestMs)) {
    return std::nullopt;
  }
  return number;
}

Status take_count(const ParsedWords& words, std::string_view name, int& count) {
  const GivenOption* given = words.find(name);
  if (given == nullptr) return {};
  const auto number = parse_integer(given->value);
  if (!number || *number < 1) return wrong_option(*given, "expected a number from 1 on");
  count = *number;
  return {};
}

Status take_number(const ParsedWords& words, std::string_view name, double& value) {
  const GivenOption* given = words.find(name);
  if (given == nullptr) return {};
  const auto number = parse_number(given->value);
  if (!number) return wrong_option(*given, "expected a number from 0 on");
  value = *number;
  return {};
}

Status take_milliseconds(const ParsedWords& words, std::string_view name, double& value) {
  const GivenOption* given = words.find(name);
  if (given == nullptr) return {};
  const auto number = parse_milliseconds(given->value);
  if (!number) return wrong_option(*given, kExpectedMs);
  value = *number;
  return {};
}

Status take_times(const ParsedWords& words, std::string_view name, std::vector<double>& times) {
  const GivenOption* given = words.find(name);
  if (given == nullptr) return {};
  for (size_t begin = 0; begin <= given->value.size();) {
    const size_t end = std::min(given->value.find(',', begin), given->value.size());
    const auto time = parse_milliseconds(std::string_view(given->value).substr(begin, end - begin));
    if (!time) return wrong_option(*given, cadre::format("{}, separated by commas", kExpectedMs));
    times.push_back(*time);
    begin = end + 1;
  }
  return {};
}

Status take_name(const ParsedWords& words, ScheduleOptions& options) {
  const GivenOption* name = words.find("--name");
  if (name == nullptr) return {};
  const PipelineScheduleInfo* info = find_pipeline_schedule(name->value);
  if (info == nullptr) {
    std::vector<std::string> names;
    for (const auto& known : pipeline_schedules()) names.emplace_back(known.name);
    const std::string near = nearest(name->value, names);
    return wrong_option(*name, near.empty() ? "there is no such schedule; cadre schedule --list"
                                              " shows all"
                                            : cadre::format("did you mean {}?", near));
  }
  PipelineScheduleOptions generated{
      .kind = info->kind, .num_ranks = 0, .num_microbatches = 0, .stages_per_rank = {}};
  CADRE_RETURN_IF_ERROR(take_count(words, "--ranks", generated.num_ranks));
  CADRE_RETURN_IF_ERROR(take_count(words, "--microbatches", generated.num_microbatches));
  if (words.find("--virtual") != nullptr) {
    CADRE_RETURN_IF_ERROR(take_count(words, "--virtual", generated.stages_per_rank.emplace(0)));
  }
  if (generated.num_ranks == 0 || generated.num_microbatches == 0) {
    return wrong_words(
        cadre::format("{} needs --ranks and --microbatches, for example: cadre "
                      "schedule --name {} --ranks 4 --microbatches 8",
                      name->text(), info->name));
  }
  options.generated = generated;
  return {};
}

Status take_input(const ParsedWords& words, ScheduleOptions& options) {
  CADRE_RETURN_IF_ERROR(take_name(words, options));
  const GivenOption* from = words.find("--from");
  if ((from == nullptr) == !options.generated) {
    return wrong_words("name a schedule or a CSV file of one: --name NAME or --from FILE");
  }
  if (from == nullptr) return {};
  for (const std::string_view name : {"--ranks", "--microbatches", "--virtual"}) {
    if (const GivenOption* given = words.find(name); given != nullptr) {
      return wrong_option(*given, "the file of --from has it already");
    }
  }
  options.csv_input = from->value;
  return {};
}

Status take_lowering(const ParsedWords& words, ScheduleOptions& options) {
  const GivenOption* lower = words.find("--lower");
  if (lower == nullptr) return {};
  PipelineLowering& lowering = options.lowering.emplace();
  lowering.max_unsharded_stages = kPyTorchUnshardedStages;
  if (lower->value == "as-sent") {
    lowering.receives = ReceivePlacement::kAsSent;
  } else if (lower->value != "before-use") {
    return wrong_option(*lower, "expected before-use or as-sent");
  }
  return {};
}

Status take_costs(const ParsedWords& words, ScheduleOptions& options) {
  StageTimes& times = options.times;
  CADRE_RETURN_IF_ERROR(take_times(words, "--forward-ms", times.forward_ms));
  CADRE_RETURN_IF_ERROR(take_times(words, "--backward-ms", times.backward_ms));
  CADRE_RETURN_IF_ERROR(take_times(words, "--input-grad-ms", times.input_grad_ms));
  CADRE_RETURN_IF_ERROR(take_times(words, "--weight-grad-ms", times.weight_grad_ms));
  CADRE_RETURN_IF_ERROR(take_times(words, "--layer-ms", times.layer_ms));
  if (!times.layer_ms.empty() && !times.forward_ms.empty()) {
    return wrong_words("give --layer-ms or --forward-ms: both say how long forwards take");
  }
  CADRE_RETURN_IF_ERROR(take_milliseconds(words, "--message-ms", options.message_ms));
  CADRE_RETURN_IF_ERROR(take_number(words, "--overlap", options.overlap_share));
  if (words.find("--max-live") == nullptr) return {};
  return take_count(words, "--max-live", options.limits.max_live_activations.emplace(0));
}

// Expands a list with one time for all stages to one time for each stage. Returns a list that
// already has one time for each stage unchanged.
Result<std::vector<double>> for_each_stage(std::string_view name, std::vector<double> times,
                                           size_t num_stages) {
  if (times.size() == 1) times.resize(num_stages, times.front());
  if (times.size() == num_stages) return times;
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("{} has {} times but the schedule has {} stages; give one time for "
                             "all stages or {} times",
                             name, times.size(), num_stages, num_stages));
}

std::vector<double> scaled(std::vector<double> times, double factor) {
  for (double& time : times) time *= factor;
  return times;
}

}  // namespace

Result<ScheduleOptions> parse_schedule_options(Words words) {
  const auto parsed =
      parse_words(kScheduleCommand, kScheduleOptions, OtherWords::kAmongOptions, words);
  if (!parsed.ok()) return parsed.error();
  ScheduleOptions options{.wants_help = parsed->find("--help") != nullptr,
                          .wants_list = parsed->find("--list") != nullptr};
  if (options.wants_help || options.wants_list) return options;
  if (!parsed->others.empty()) {
    return wrong_words(cadre::format("\"{}\" is not an option; name a schedule with --name",
                                     parsed->others.front()));
  }
  CADRE_RETURN_IF_ERROR(take_input(*parsed, options));
  CADRE_RETURN_IF_ERROR(take_lowering(*parsed, options));
  CADRE_RETURN_IF_ERROR(take_costs(*parsed, options));
  if (const GivenOption* csv = parsed->find("--csv")) options.csv_output = csv->value;
  if (const GivenOption* json = parsed->find("--json")) options.json_output = json->value;
  if (options.csv_output == "-" && options.json_output == "-") {
    return wrong_words("--csv - and --json -: only one of them can use standard output");
  }
  return options;
}

Result<ScheduleCosts> make_costs(const ScheduleOptions& options, int num_stages) {
  ScheduleCosts result{.costs = {.stages = {},
                                 .message_ms = options.message_ms,
                                 .overlap_share = options.overlap_share}};
  StageTimes times = options.times;
  if (!times.layer_ms.empty()) {
    auto begins = split_layers(times.layer_ms, num_stages);
    if (!begins.ok()) return begins.error().with_context("--layer-ms");
    result.layer_begins = *std::move(begins);
    for (int stage = 0; stage < num_stages; ++stage) {
      const auto layers = times.layer_ms.begin();
      times.forward_ms.push_back(std::accumulate(layers + result.layer_begins[stage],
                                                 layers + result.layer_begins[stage + 1], 0.0));
    }
  }
  if (times.forward_ms.empty()) times.forward_ms = {1};
  if (times.backward_ms.empty()) times.backward_ms = scaled(times.forward_ms, 2);
  if (times.input_grad_ms.empty()) times.input_grad_ms = scaled(times.backward_ms, 0.5);
  if (times.weight_grad_ms.empty()) times.weight_grad_ms = scaled(times.backward_ms, 0.5);
  result.costs.stages.resize(num_stages);
  const auto set = [&](std::string_view name, std::vector<double> given,
                       double StageCosts::*member) -> Status {
    const auto each = for_each_stage(name, std::move(given), result.costs.stages.size());
    if (!each.ok()) return each.error();
    for (size_t stage = 0; stage < each->size(); ++stage) {
      result.costs.stages[stage].*member = (*each)[stage];
    }
    return {};
  };
  CADRE_RETURN_IF_ERROR(set("--forward-ms", times.forward_ms, &StageCosts::forward_ms));
  CADRE_RETURN_IF_ERROR(set("--backward-ms", times.backward_ms, &StageCosts::backward_ms));
  CADRE_RETURN_IF_ERROR(set("--input-grad-ms", times.input_grad_ms, &StageCosts::input_grad_ms));
  CADRE_RETURN_IF_ERROR(set("--weight-grad-ms", times.weight_grad_ms, &StageCosts::weight_grad_ms));
  return result;
}

}  // namespace cadre::cli
