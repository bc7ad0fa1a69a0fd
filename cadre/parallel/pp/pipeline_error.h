// The error of a pipeline's step. It has the action of the schedule that this rank was running.
#pragma once

#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/schedule/action.h"

namespace cadre {

class CADRE_EXPORT PipelineError : public Error {
 public:
  PipelineError(const Error& error, PipelineAction action)
      : Error(error), action_(std::move(action)) {}

  // Returns the action that this rank was running, with its stage and microbatch.
  const PipelineAction& action() const { return action_; }

 private:
  PipelineAction action_;
};

}  // namespace cadre
