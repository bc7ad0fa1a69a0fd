#include "cadre/parallel/reduction/agreement/refusals.h"

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::reduction {

void refuse_lost_wrapper(const Wrapper& wrapper) {
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: backward() through a forward whose wrapper "
                     "was destroyed, so the gradients would be those of this rank alone. Keep the "
                     "{} until backward() has returned",
                     wrapper.place(), wrapper.name));
}

void refuse_second_backward(const Wrapper& wrapper) {
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: a second backward() through one forward; "
                     "the gradients of the first were reduced already. Add the losses and call "
                     "backward() once, or hold no_sync() during all but the last",
                     wrapper.place()));
}

void refuse_create_graph(const Wrapper& wrapper) {
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: backward(create_graph=true), but a reduced "
                     "gradient has no graph. Take higher derivatives with torch::autograd::grad() "
                     "and call a plain backward() on the loss",
                     wrapper.place()));
}

void refuse_no_samples(const Wrapper& wrapper) {
  throw Error(ErrorCode::kInvalidArgument, format("{}: no rank has a sample in this step, so "
                                                  "there is no mean; end the loop on all ranks",
                                                  wrapper.place()));
}

void refuse_direct_call(const Wrapper& wrapper, const std::string& parameter) {
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: a gradient of \"{}\" came without a "
                     "forward through the wrapper since the last reduction. Call model(...), not "
                     "model.module()(...); for a second backward through one forward, add the "
                     "losses or hold no_sync() during the first",
                     wrapper.place(), parameter));
}

void refuse_repeated_gradient(const Wrapper& wrapper, const std::string& parameter) {
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: the gradient of \"{}\" came twice in one "
                     "backward (a nested backward reaches it again) and may be reduced already. "
                     "Hold no_sync() during this backward and call reduce_gradients() after it",
                     wrapper.place(), parameter));
}

void refuse_unlike_shares(const Wrapper& wrapper, std::span<const int64_t> of_forwards,
                          int64_t num_samples) {
  throw Error(
      ErrorCode::kInvalidArgument,
      format("{}: one backward() through forwards of {} and {} samples. This rank's share of the "
             "samples of all ranks differs between them, so one weight cannot serve both. Call "
             "backward() for each forward alone, or give every rank the same share of the samples "
             "of each forward and of the accumulated ones. To reduce all of them once, multiply "
             "each loss by the samples of its forward divided by the samples of this rank in the "
             "step, as backward_in_parts() does, hold no_sync({{.losses_are_weighted = true}}) "
             "during this backward and call reduce_gradients() after it",
             wrapper.place(), of_forwards.empty() ? 0 : of_forwards[0], num_samples));
}

void refuse_exchange(const Wrapper& wrapper, const std::string& ranks,
                     const UnequalSamples& samples) {
  throw Error(
      ErrorCode::kInvalidArgument,
      format("{}: a collective of cadre::functional ran in this backward() on {}, and the ranks "
             "have unequal numbers of samples ({} on rank 0, {} on rank {}). It adds the gradients "
             "of other ranks before the wrapper can weight them, so the result would not be the "
             "gradient of the mean over all samples. Set weighting = GradientWeighting::kSum on "
             "all ranks, and let each rank's loss be the sum over its samples, divided by the "
             "number of samples of all ranks; or give all ranks equally many "
             "samples; or, for a synchronous batch normalization, which is such a collective under "
             "no_sync(), call backward_in_parts(). The parameters are unchanged: zero the "
             "gradients and continue",
             wrapper.place(), ranks, samples.of_0, samples.of_other, samples.other));
}

}  // namespace cadre::reduction
