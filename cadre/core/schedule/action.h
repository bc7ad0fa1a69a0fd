// One action of a rank in a pipeline schedule, and its text form: "2F0", "3SEND_F1".
//
// Threads: plain values and pure functions. Blocking: never. Lifetime: an action owns its parts.
// Errors: kInvalidArgument, with the text and what was expected, for every text that is no action.
// Source: the intermediate representation of torch.distributed.pipelining (PyTorch 2.13). The text
// form is the same: STAGE KIND MICROBATCH, and "(0F3;1B0)OVERLAP_F_B" for two actions that run
// together.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre {

enum class PipelineActionKind : uint8_t {
  kForward,       // "F"
  kBackward,      // "B": the gradients of the input and of the weights
  kInputGrad,     // "I": only the gradient of the input
  kWeightGrad,    // "W": the gradients of the weights, after the I of the same microbatch
  kUnshard,       // "UNSHARD": gathers the parameters of a stage
  kReshard,       // "RESHARD": frees the gathered parameters
  kSendForward,   // "SEND_F": the output of a forward, to the next stage
  kRecvForward,   // "RECV_F": the input of a forward, from the previous stage
  kSendBackward,  // "SEND_B": the gradient of a stage's input, to the previous stage
  kRecvBackward,  // "RECV_B": the gradient of a stage's output, from the next stage
  kReduceGrad,    // "REDUCE_GRAD": reduces the accumulated gradients of a stage over its replicas
  kOverlap,       // "OVERLAP_F_B": a forward and a backward of two microbatches, run together
};

CADRE_EXPORT std::string_view to_string(PipelineActionKind kind);

// Returns true for F (forward), B (backward), I (gradient of the input) and W (gradients of the
// weights).
CADRE_EXPORT bool is_computation(PipelineActionKind kind);
// Returns true for the four sends and receives.
CADRE_EXPORT bool is_message(PipelineActionKind kind);
// Returns true for all kinds except UNSHARD, RESHARD, REDUCE_GRAD and OVERLAP_F_B.
CADRE_EXPORT bool has_microbatch(PipelineActionKind kind);

struct PipelineAction {
  PipelineActionKind kind = PipelineActionKind::kForward;
  int stage = 0;  // the index of the stage in the whole model, from 0; kOverlap does not use it
  std::optional<int> microbatch = {};  // is set if has_microbatch(kind)
  // Only kOverlap has parts: a forward, then a backward (B or I).
  std::vector<PipelineAction> parts = {};

  friend bool operator==(const PipelineAction&, const PipelineAction&) = default;
};

// Returns the action itself, or the parts of an overlap. Valid as long as `action` is.
CADRE_EXPORT std::span<const PipelineAction> leaves_of(const PipelineAction& action);

// Numbers from outside are bounded, so that a short text cannot lead to a large allocation.
inline constexpr int kMaxPipelineStages = 1 << 16;
inline constexpr int kMaxPipelineMicrobatches = 1 << 20;

CADRE_EXPORT std::string to_text(const PipelineAction& action);
// Parses an action such as "2F0". Blanks around the text are ignored.
CADRE_EXPORT Result<PipelineAction> parse_pipeline_action(std::string_view text);

}  // namespace cadre
