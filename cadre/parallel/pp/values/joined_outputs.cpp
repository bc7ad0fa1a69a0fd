#include "cadre/parallel/pp/values/joined_outputs.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/pp/values/stage_values.h"

namespace cadre::parallel {
namespace {

[[noreturn]] void refuse_outputs(const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument,
              format("{}, so the outputs of the microbatches cannot be joined to those of the "
                     "batch; leave return_outputs out if they are not needed",
                     problem));
}

std::string form_of(const at::Tensor& tensor) {
  return format("{} {}", c10::toString(tensor.scalar_type()), list_of(tensor.sizes()));
}

// Returns whether the tensors have equal dtypes and sizes, except perhaps the number of rows.
bool have_one_form(const at::Tensor& a, const at::Tensor& b, int64_t batch_dim) {
  if (a.scalar_type() != b.scalar_type() || a.dim() != b.dim()) return false;
  const int64_t rows = batch_dim < 0 ? batch_dim + a.dim() : batch_dim;
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (dim != rows && a.size(dim) != b.size(dim)) return false;
  }
  return true;
}

}  // namespace

void JoinedOutputs::check(const Microbatch& microbatch, size_t index,
                          const at::Tensor& output) const {
  if (!output.defined()) {
    throw Error(ErrorCode::kInvalidArgument, "the stage returned an undefined tensor");
  }
  if (by_microbatch_.size() == 1) return;
  const bool has_rows =
      output.dim() == 0 || (batch_dim_ >= -output.dim() && batch_dim_ < output.dim() &&
                            output.size(batch_dim_) == microbatch.num_rows);
  if (!has_rows) {
    refuse_outputs(
        format("output {} of microbatch {} has the sizes {}, whose dimension {} does not count the "
               "{} rows of the microbatch (PipelineStepOptions::outputs_batch_dim names another "
               "dimension)",
               index, microbatch.index, list_of(output.sizes()), batch_dim_, microbatch.num_rows));
  }
  if (!have_one_form(output, (*first_)[index], batch_dim_)) {
    refuse_outputs(format("output {} is {} in microbatch {} and {} in an earlier one", index,
                          form_of(output), microbatch.index, form_of((*first_)[index])));
  }
}

void JoinedOutputs::add(const Microbatch& microbatch, const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor>& kept = by_microbatch_[static_cast<size_t>(microbatch.index)];
  for (const at::Tensor& output : outputs) kept.push_back(own_values(output));
  if (!first_) first_ = kept;
  if (kept.size() != first_->size()) {
    refuse_outputs(format("microbatch {} has {} outputs and an earlier one {}", microbatch.index,
                          kept.size(), first_->size()));
  }
  for (size_t i = 0; i < kept.size(); ++i) check(microbatch, i, kept[i]);
}

std::vector<at::Tensor> JoinedOutputs::join() const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> joined;
  for (size_t i = 0; i < first_->size(); ++i) {
    std::vector<at::Tensor> parts;
    for (const auto& of_microbatch : by_microbatch_) parts.push_back(of_microbatch[i]);
    joined.push_back((*first_)[i].dim() == 0 ? at::stack(parts)
                     : parts.size() == 1     ? parts[0]
                                             : at::cat(parts, batch_dim_));
  }
  return joined;
}

}  // namespace cadre::parallel
