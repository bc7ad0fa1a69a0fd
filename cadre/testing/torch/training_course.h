// What a training has computed, step by step, to compare it with another one.
//
// Threads: plain values; a ScopedVariable changes the environment of the process. Blocking: as the
// training. Errors: failures of the test.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <utility>
#include <vector>

#include "cadre/tensor/group/process_group.h"

namespace cadre::testing {

struct TrainingCourse {
  std::vector<double> losses;             // the means over the batches
  std::vector<double> norms;              // the norms of the gradients before they were scaled
  std::vector<at::Tensor> parameters;     // the weights at the end
  std::optional<double> evaluation = {};  // the loss at the end on another batch
};

inline void expect_near(const TrainingCourse& course, const TrainingCourse& truth) {
  ASSERT_EQ(course.losses.size(), truth.losses.size());
  for (size_t i = 0; i < truth.losses.size(); ++i) {
    EXPECT_NEAR(course.losses[i], truth.losses[i], 2e-5) << "loss of step " << i;
    EXPECT_NEAR(course.norms[i], truth.norms[i], 2e-4) << "norm of step " << i;
  }
  ASSERT_EQ(course.evaluation.has_value(), truth.evaluation.has_value());
  if (truth.evaluation) EXPECT_NEAR(*course.evaluation, *truth.evaluation, 2e-5);
  ASSERT_EQ(course.parameters.size(), truth.parameters.size());
  for (size_t i = 0; i < truth.parameters.size(); ++i) {
    EXPECT_LT((course.parameters[i] - truth.parameters[i]).abs().max().item<double>(), 2e-5)
        << "parameter " << i;
  }
}

using TrainingBatch = std::pair<at::Tensor, at::Tensor>;  // inputs and targets

// Returns this rank's consecutive rows of a batch.
inline TrainingBatch rows_of(const TrainingBatch& batch, const ProcessGroup& ranks) {
  const int64_t num_rows = batch.first.size(0);
  const int64_t begin = num_rows * ranks.rank() / ranks.world_size();
  const int64_t end = num_rows * (ranks.rank() + 1) / ranks.world_size();
  return {batch.first.slice(0, begin, end), batch.second.slice(0, begin, end)};
}

// Makes the steps [first, end) of a cadre::Training, with its step(inputs, targets, loss) or by a
// loop of the program. rows_at(step) returns this rank's rows.
template <typename Training, typename RowsAt, typename Loss>
void train_course(Training& training, bool by_step, int first, int end, const RowsAt& rows_at,
                  const Loss& loss_of, TrainingCourse& course) {
  for (int step = first; step < end; ++step) {
    const auto [inputs, targets] = rows_at(step);
    if (by_step) {
      const auto result = training.step(inputs, targets, loss_of);
      course.losses.push_back(training.mean(result.loss));
      course.norms.push_back(result.norm.value());
    } else {
      const at::Tensor loss = loss_of(training.forward(inputs), targets);
      training.backward(loss);
      course.losses.push_back(training.mean(loss));
      course.norms.push_back(training.step().value());
    }
  }
}

// A variable of the environment that is set as long as this object lives.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~ScopedVariable() { ::unsetenv(name_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* name_;
};

}  // namespace cadre::testing
