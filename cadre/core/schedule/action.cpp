#include "cadre/core/schedule/action.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"

namespace cadre {
namespace {

// The names in the order of PipelineActionKind.
constexpr std::array<std::string_view, 12> kActionNames{
    "F",      "B",      "I",      "W",      "UNSHARD",     "RESHARD",
    "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD", "OVERLAP_F_B"};
constexpr size_t kMaxShownCharacters = 60;

Error not_an_action(std::string_view text, std::string_view expected) {
  const std::string_view shown = text.substr(0, kMaxShownCharacters);
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("\"{}{}\" is no action of a pipeline schedule: {}", printable(shown),
                             shown.size() < text.size() ? "..." : "", expected));
}

std::string_view without_blanks(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

// Parses the whole text as a decimal number below `limit`.
std::optional<int> small_number(std::string_view digits, int limit) {
  int value = 0;
  const auto [end, failure] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (failure != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  if (value < 0 || value >= limit) return std::nullopt;
  return value;
}

Result<PipelineAction> parse_single_action(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789";
  const size_t name_begin = std::min(text.find_first_not_of(kDigits), text.size());
  const size_t name_end = std::min(text.find_first_of(kDigits, name_begin), text.size());
  const std::string_view name = text.substr(name_begin, name_end - name_begin);
  const auto found = std::ranges::find(kActionNames, name);
  const auto kind = static_cast<PipelineActionKind>(found - kActionNames.begin());
  if (name_begin == 0 || found == kActionNames.end() || kind == PipelineActionKind::kOverlap) {
    return not_an_action(text,
                         "expected a stage, F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, "
                         "UNSHARD, RESHARD or REDUCE_GRAD, and a microbatch, like 2F0");
  }
  PipelineAction action{.kind = kind};
  const auto stage = small_number(text.substr(0, name_begin), kMaxPipelineStages);
  if (!stage) {
    return not_an_action(
        text, cadre::format("the number of the stage must be below {}", kMaxPipelineStages));
  }
  action.stage = *stage;
  const std::string_view rest = text.substr(name_end);
  if (!has_microbatch(kind)) {
    if (rest.empty()) return action;
    return not_an_action(
        text, cadre::format("{} is for all microbatches, so no number may follow it", name));
  }
  action.microbatch = small_number(rest, kMaxPipelineMicrobatches);
  if (!action.microbatch) {
    return not_an_action(
        text, cadre::format("the number of a microbatch, below {1}, must follow {0}", name,
                            kMaxPipelineMicrobatches));
  }
  return action;
}

Result<PipelineAction> parse_overlap(std::string_view text) {
  constexpr std::string_view kExpected =
      "expected a forward and a backward that run together, like (0F3;1B0)OVERLAP_F_B";
  const size_t close = text.find(')');
  const size_t semicolon = text.find(';');
  if (close == std::string_view::npos || semicolon == std::string_view::npos || semicolon > close ||
      text.substr(close + 1) != to_string(PipelineActionKind::kOverlap)) {
    return not_an_action(text, kExpected);
  }
  PipelineAction action{.kind = PipelineActionKind::kOverlap};
  for (const std::string_view part :
       {text.substr(1, semicolon - 1), text.substr(semicolon + 1, close - semicolon - 1)}) {
    auto parsed = parse_single_action(without_blanks(part));
    if (!parsed.ok()) return parsed.error();
    action.parts.push_back(std::move(parsed).value());
  }
  const PipelineActionKind second = action.parts[1].kind;
  if (action.parts[0].kind != PipelineActionKind::kForward ||
      (second != PipelineActionKind::kBackward && second != PipelineActionKind::kInputGrad)) {
    return not_an_action(text, kExpected);
  }
  return action;
}

}  // namespace

std::string_view to_string(PipelineActionKind kind) {
  return kActionNames[static_cast<size_t>(kind)];
}

bool is_computation(PipelineActionKind kind) {
  return kind <= PipelineActionKind::kWeightGrad;
}

bool is_message(PipelineActionKind kind) {
  return kind >= PipelineActionKind::kSendForward && kind <= PipelineActionKind::kRecvBackward;
}

bool has_microbatch(PipelineActionKind kind) {
  return is_computation(kind) || is_message(kind);
}

std::span<const PipelineAction> leaves_of(const PipelineAction& action) {
  if (action.kind == PipelineActionKind::kOverlap) return action.parts;
  return {&action, 1};
}

std::string to_text(const PipelineAction& action) {
  if (action.kind != PipelineActionKind::kOverlap) {
    std::string text = cadre::format("{}{}", action.stage, to_string(action.kind));
    if (action.microbatch) text += std::to_string(*action.microbatch);
    return text;
  }
  std::string text;
  for (const PipelineAction& part : action.parts)
    text += (text.empty() ? "(" : ";") + to_text(part);
  return text + ")" + std::string(to_string(action.kind));
}

Result<PipelineAction> parse_pipeline_action(std::string_view text) {
  text = without_blanks(text);
  return text.starts_with('(') ? parse_overlap(text) : parse_single_action(text);
}

}  // namespace cadre
