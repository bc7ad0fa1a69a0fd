// PowerSGD. A matrix M of gradients, summed over the ranks, is approximated by P * Q^T:
//
//   P = sum of M * Q over the ranks, made orthonormal;   Q = sum of M^T * P over the ranks.
//
// This is one step of a power iteration. It sends (rows + columns) * rank elements instead of rows
// * columns, in two all_reduces, of which the second begins when the first is done. What the
// approximation leaves out is divided evenly among the ranks, which add it to their next gradients.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/comm_hooks/comm_hooks.h"

namespace cadre::comm_hooks {
namespace {

// Approximating begins only after the buckets have their final layout, which the first step learns.
constexpr int64_t kFirstIter = 2;
// Gram and Schmidt's method is faster than a QR decomposition up to this number of columns.
constexpr int64_t kMaxColumnsByGramSchmidt = 2;

enum class Form { kByParameter, kBatched };

at::Tensor orthonormal(const at::Tensor& matrix, double epsilon) {
  if (matrix.size(1) > kMaxColumnsByGramSchmidt) {
    return std::get<0>(at::linalg_qr(matrix, "reduced"));
  }
  std::vector<at::Tensor> columns;
  for (int64_t i = 0; i < matrix.size(1); ++i) {
    at::Tensor column = matrix.narrow(1, i, 1);
    for (const at::Tensor& earlier : columns) {
      column = column - (earlier * column).sum() * earlier;
    }
    // A column of zeros stays one: there is nothing to send in its direction.
    const at::Tensor norm = column.norm() + epsilon;
    columns.push_back(column / norm.masked_fill(norm == 0, 1.0));
  }
  return at::cat(columns, 1);
}

class PowerSgd final : public CommHook::State {
 public:
  PowerSgd(const PowerSgdOptions& options, Form form) : options_(options), form_(form) {}

  FinishReduction start(const GradBucket& bucket, const ProcessGroup& group) override;
  SavedCommHook saved() const override;
  void load(const SavedCommHook& saved) override;

 private:
  // One matrix of a bucket in this step.
  struct Approximation {
    at::Tensor matrix;  // (rows, columns), float32 or float64: this rank's gradients and its error
    at::Tensor target;  // the gradient into which the result is written; same numel or less
    at::Tensor q;       // (columns, rank)
    at::Tensor p;       // (rows, rank)
  };
  struct Step {
    std::vector<Approximation> matrices;
    std::vector<at::Tensor> whole;  // gradients that are summed as they are
    at::Tensor sent_whole;
    at::Tensor sent_p;
    std::optional<Work> whole_work;
    std::optional<Work> p_work;
  };

  void split(const GradBucket& bucket, Step& step);
  void add(const GradBucket& bucket, const at::Tensor& gradient, int64_t rows, int64_t columns,
           Step& step);
  at::Tensor first_q(int64_t columns, int64_t rank, const at::TensorOptions& options);
  void finish(size_t bucket, Step& step, const ProcessGroup& group);

  PowerSgdOptions options_;
  Form form_;
  int64_t iter_ = 0;
  uint64_t num_drawn_ = 0;  // the number of random matrices so far
  // By bucket and place in it. Each is empty unless its option is set.
  std::map<std::pair<size_t, size_t>, at::Tensor> errors_;
  std::map<std::pair<size_t, size_t>, at::Tensor> qs_;
};

at::Tensor flat_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  return at::cat(flat);
}

at::Tensor PowerSgd::first_q(int64_t columns, int64_t rank, const at::TensorOptions& options) {
  // All ranks draw the same numbers, and no numbers of the program's generators.
  const auto generator = at::detail::createCPUGenerator(options_.random_seed + num_drawn_++);
  const auto on_cpu = at::TensorOptions(options.dtype()).device(at::kCPU);
  return at::randn({columns, rank}, generator, on_cpu).to(options.device());
}

void PowerSgd::add(const GradBucket& bucket, const at::Tensor& gradient, int64_t rows,
                   int64_t columns, Step& step) {
  const std::pair place{bucket.index, step.matrices.size()};
  const auto dtype = gradient.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor matrix = at::zeros({rows, columns}, gradient.options().dtype(dtype));
  matrix.view({-1}).narrow(0, 0, gradient.numel()).copy_(gradient.reshape({-1}));
  if (options_.use_error_feedback) {
    const auto error = errors_.find(place);
    if (error != errors_.end()) matrix.add_(error->second);
  }
  const int64_t rank =
      std::min({options_.matrix_approximation_rank, matrix.size(0), matrix.size(1)});
  const auto known = qs_.find(place);
  const at::Tensor q =
      known == qs_.end() ? first_q(columns, rank, matrix.options()) : known->second;
  step.matrices.push_back({.matrix = matrix,
                           .target = gradient,
                           .q = orthonormal(q, options_.orthogonalization_epsilon),
                           .p = {}});
}

// Divides the bucket's gradients into those that are approximated and those that are sent whole.
void PowerSgd::split(const GradBucket& bucket, Step& step) {
  if (form_ == Form::kBatched) {
    const auto side =
        static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(bucket.buffer.numel()))));
    return add(bucket, bucket.buffer, side, side, step);
  }
  for (const at::Tensor& gradient : bucket.gradients) {
    const int64_t rows = gradient.dim() == 0 ? 1 : gradient.size(0);
    const int64_t columns = rows == 0 ? 0 : gradient.numel() / rows;
    const int64_t rank = std::min({options_.matrix_approximation_rank, rows, columns});
    const double num_sent = static_cast<double>((rows + columns) * rank);
    if (num_sent * options_.min_compression_rate < static_cast<double>(gradient.numel())) {
      add(bucket, gradient, rows, columns, step);
    } else {
      step.whole.push_back(gradient);
    }
  }
}

FinishReduction PowerSgd::start(const GradBucket& bucket, const ProcessGroup& group) {
  const bool is_whole = iter_ < options_.start_iter;
  if (bucket.is_last) ++iter_;
  if (is_whole) {
    const auto work = std::make_shared<Work>(group.all_reduce_async(bucket.buffer));
    return [work] { work->wait(); };
  }
  const auto step = std::make_shared<Step>();
  split(bucket, *step);
  if (!step->whole.empty()) {
    step->sent_whole = flat_of(step->whole);
    step->whole_work = group.all_reduce_async(step->sent_whole);
  }
  if (!step->matrices.empty()) {
    std::vector<at::Tensor> ps;
    for (const Approximation& of : step->matrices) ps.push_back(at::matmul(of.matrix, of.q));
    step->sent_p = flat_of(ps);
    step->p_work = group.all_reduce_async(step->sent_p);
  }
  return [this, step, index = bucket.index, group] { finish(index, *step, group); };
}

void PowerSgd::finish(size_t bucket, Step& step, const ProcessGroup& group) {
  if (step.whole_work) {
    step.whole_work->wait();
    int64_t offset = 0;
    for (const at::Tensor& gradient : step.whole) {
      gradient.copy_(step.sent_whole.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
      offset += gradient.numel();
    }
  }
  if (!step.p_work) return;
  step.p_work->wait();
  int64_t offset = 0;
  std::vector<at::Tensor> qs;
  for (Approximation& of : step.matrices) {
    const int64_t rows = of.matrix.size(0);
    const int64_t rank = of.q.size(1);
    of.p = orthonormal(step.sent_p.narrow(0, offset, rows * rank).view({rows, rank}),
                       options_.orthogonalization_epsilon);
    offset += rows * rank;
    qs.push_back(at::matmul(of.matrix.t(), of.p));
  }
  const at::Tensor sent_q = flat_of(qs);
  group.all_reduce(sent_q);
  offset = 0;
  for (size_t i = 0; i < step.matrices.size(); ++i) {
    const Approximation& of = step.matrices[i];
    const at::Tensor q = sent_q.narrow(0, offset, of.q.numel()).view(of.q.sizes());
    offset += of.q.numel();
    const at::Tensor sum = at::matmul(of.p, q.t());
    of.target.copy_(sum.view({-1}).narrow(0, 0, of.target.numel()).view(of.target.sizes()));
    if (options_.use_error_feedback) {
      errors_[{bucket, i}] = of.matrix - sum / static_cast<double>(group.world_size());
    }
    if (options_.warm_start) qs_[{bucket, i}] = q.clone();
  }
}

SavedCommHook PowerSgd::saved() const {
  const auto count = [](int64_t value) {
    return at::full({}, value, at::TensorOptions(at::kLong));
  };
  SavedCommHook saved = {{"iter", count(iter_)},
                         {"num_drawn", count(static_cast<int64_t>(num_drawn_))}};
  const auto append = [&](const char* kind, const auto& tensors) {
    for (const auto& [place, tensor] : tensors) {
      saved.emplace_back(format("{}.{}.{}", kind, place.first, place.second), tensor);
    }
  };
  append("error", errors_);
  append("q", qs_);
  return saved;
}

// Returns the bucket and the place in it from "error.3.0"; nullopt if the name has another form.
std::optional<std::pair<size_t, size_t>> place_of(const std::string& name) {
  const size_t first = name.find('.');
  const size_t second = first == std::string::npos ? first : name.find('.', first + 1);
  if (second == std::string::npos) return std::nullopt;
  const auto number = [&](size_t begin, size_t end) -> std::optional<size_t> {
    const std::string digits = name.substr(begin, end - begin);
    constexpr size_t kMaxDigits = 9;
    const bool is_number = !digits.empty() && digits.size() <= kMaxDigits &&
                           std::ranges::all_of(digits, [](char c) { return c >= '0' && c <= '9'; });
    return is_number ? std::optional<size_t>(std::stoul(digits)) : std::nullopt;
  };
  const auto bucket = number(first + 1, second);
  const auto index = number(second + 1, name.size());
  if (!bucket || !index) return std::nullopt;
  return std::pair{*bucket, *index};
}

void PowerSgd::load(const SavedCommHook& saved) {
  PowerSgd loaded(options_, form_);
  for (const auto& [name, tensor] : saved) {
    const auto place = place_of(name);
    const bool is_count = name == "iter" || name == "num_drawn";
    if (is_count && tensor.defined() && tensor.numel() == 1 && tensor.scalar_type() == at::kLong) {
      const auto value = tensor.item<int64_t>();
      if (name == "iter") loaded.iter_ = value;
      if (name == "num_drawn") loaded.num_drawn_ = static_cast<uint64_t>(value);
    } else if (place && tensor.defined() && tensor.dim() == 2 && name.starts_with("error.")) {
      loaded.errors_[*place] = tensor.clone();
    } else if (place && tensor.defined() && tensor.dim() == 2 && name.starts_with("q.")) {
      loaded.qs_[*place] = tensor.clone();
    } else {
      throw Error(ErrorCode::kInvalidArgument,
                  format("comm_hooks::power_sgd: the saved tensor \"{}\" is none of iter, "
                         "num_drawn, error.<bucket>.<matrix> and q.<bucket>.<matrix> in their "
                         "shapes. Load what this hook has saved on this rank",
                         name));
    }
  }
  *this = std::move(loaded);
}

Hook power_sgd_hook(const char* name, const PowerSgdOptions& options, Form form) {
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorCode::kInvalidArgument, format("comm_hooks::{}: {}", name, what));
  };
  if (options.matrix_approximation_rank < 1) refuse("matrix_approximation_rank must be at least 1");
  if (!(options.min_compression_rate > 0)) refuse("min_compression_rate must be greater than 0");
  if (!(options.orthogonalization_epsilon >= 0)) {
    refuse("orthogonalization_epsilon must not be negative");
  }
  if (options.start_iter < kFirstIter) {
    refuse(
        format("start_iter is {} and must be at least {}, because the first step arranges the "
               "buckets",
               options.start_iter, kFirstIter));
  }
  return std::make_shared<const CommHook>(
      format(
          "{}(rank {}, start_iter {}, min_compression_rate {}, use_error_feedback {}, warm_start "
          "{}, orthogonalization_epsilon {}, random_seed {})",
          name, options.matrix_approximation_rank, options.start_iter, options.min_compression_rate,
          options.use_error_feedback, options.warm_start, options.orthogonalization_epsilon,
          options.random_seed),
      [options, form] { return std::make_unique<PowerSgd>(options, form); });
}

}  // namespace

Hook power_sgd(const PowerSgdOptions& options) {
  return power_sgd_hook("power_sgd", options, Form::kByParameter);
}

Hook batched_power_sgd(const PowerSgdOptions& options) {
  return power_sgd_hook("batched_power_sgd", options, Form::kBatched);
}

}  // namespace cadre::comm_hooks
