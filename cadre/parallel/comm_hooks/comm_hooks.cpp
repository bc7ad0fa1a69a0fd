#include "cadre/parallel/comm_hooks/comm_hooks.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/round.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::comm_hooks {
namespace {

using Start = std::function<FinishReduction(const GradBucket&, const ProcessGroup&)>;

class WithoutMemory final : public CommHook::State {
 public:
  explicit WithoutMemory(Start start) : start_(std::move(start)) {}
  FinishReduction start(const GradBucket& bucket, const ProcessGroup& group) override {
    return start_(bucket, group);
  }

 private:
  Start start_;
};

FinishReduction start_sum(const GradBucket& bucket, const ProcessGroup& group) {
  const auto work = std::make_shared<Work>(group.all_reduce_async(bucket.buffer));
  return [work] { work->wait(); };
}

bool is_16_bits(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

// Runs another hook on the gradients in 16 bits.
class Compressed final : public CommHook::State {
 public:
  Compressed(at::ScalarType dtype, std::unique_ptr<CommHook::State> inner)
      : dtype_(dtype), inner_(std::move(inner)) {}

  FinishReduction start(const GradBucket& bucket, const ProcessGroup& group) override {
    if (is_16_bits(bucket.buffer.scalar_type())) return inner_->start(bucket, group);
    GradBucket compressed = bucket;
    compressed.buffer = bucket.buffer.to(dtype_);
    for (at::Tensor& gradient : compressed.gradients) {
      const int64_t offset = gradient.storage_offset() - bucket.buffer.storage_offset();
      gradient = compressed.buffer.as_strided(gradient.sizes(), gradient.strides(), offset);
    }
    return
        [finish = inner_->start(compressed, group), from = compressed.buffer, to = bucket.buffer] {
          finish();
          to.copy_(from);
        };
  }
  SavedCommHook saved() const override { return inner_->saved(); }
  void load(const SavedCommHook& saved) override { inner_->load(saved); }

 private:
  at::ScalarType dtype_;
  std::unique_ptr<CommHook::State> inner_;
};

Hook compressed_by(const std::string& name, at::ScalarType dtype, const Hook& inner) {
  if (!inner) {
    throw Error(ErrorCode::kInvalidArgument,
                format("comm_hooks::{}: the inner hook is null; make it first, for example with "
                       "comm_hooks::allreduce()",
                       name));
  }
  return std::make_shared<const CommHook>(
      format("{}({})", name, inner->name()),
      [dtype, inner] { return std::make_unique<Compressed>(dtype, inner->make_state()); },
      inner->traits());
}

// The elements are 0 to 255, as those of PyTorch's observer: the range of the values, extended to
// contain 0, is divided evenly.
constexpr double kLargest = 255;

FinishReduction start_quantized(const GradBucket& bucket, const ProcessGroup& group) {
  const at::Tensor& own = bucket.buffer;
  const int64_t numel = own.numel();
  if (numel == 0) return [] {};
  const double least = std::min(own.min().item<double>(), 0.0);
  const double most = std::max(own.max().item<double>(), 0.0);
  // The scale of a NaN or of an infinity makes all elements NaN, which a GradScaler then notices.
  const double scale = most == least ? 1.0 : (most - least) / kLargest;
  const double zero = std::clamp(std::round(-least / scale), 0.0, kLargest);
  struct Message {
    at::Tensor scales, all_scales, elements, all_elements;
    std::vector<Work> works;
  };
  const auto message = std::make_shared<Message>();
  const int64_t num_ranks = group.world_size();
  message->scales = at::tensor({scale, zero}, own.options().dtype(at::kDouble));
  message->all_scales = at::empty({num_ranks, 2}, message->scales.options());
  message->elements = (at::round(own / scale) + zero).clamp(0, kLargest).to(at::kByte);
  message->all_elements = at::empty({num_ranks, numel}, message->elements.options());
  message->works.push_back(group.all_gather_async(message->all_scales, message->scales));
  message->works.push_back(group.all_gather_async(message->all_elements, message->elements));
  return [message, own, num_ranks] {
    for (const Work& work : message->works) work.wait();
    const at::Tensor scales = message->all_scales.to(at::kFloat);
    at::Tensor sum;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const at::Tensor of_rank = (message->all_elements.select(0, rank).to(at::kFloat) -
                                  scales.select(0, rank).select(0, 1)) *
                                 scales.select(0, rank).select(0, 0);
      sum = rank == 0 ? of_rank : sum.add_(of_rank);
    }
    own.copy_(sum);
  };
}

// Sums over the wrapper's group, and from start_step on over the subgroup.
class PostLocal final : public CommHook::State {
 public:
  explicit PostLocal(PostLocalSgdOptions options) : options_(std::move(options)) {}

  FinishReduction start(const GradBucket& bucket, const ProcessGroup& group) override {
    if (bucket.index == 0) begin_step(bucket, group);
    if (!is_local_) return start_sum(bucket, group);
    if (options_.subgroup.world_size() == 1) {
      return [buffer = bucket.buffer, weight = bucket.weight] { divide(buffer, weight); };
    }
    const FinishReduction finish = start_sum(bucket, options_.subgroup);
    return [finish, buffer = bucket.buffer, total = total_] {
      total->work.wait();
      finish();
      divide(buffer, total->weight.item<double>());
    };
  }

  SavedCommHook saved() const override {
    return {{kSteps, at::tensor(num_steps_, at::TensorOptions(at::kLong))}};
  }
  void load(const SavedCommHook& saved) override {
    const bool fits = saved.size() == 1 && saved[0].first == kSteps && saved[0].second.defined() &&
                      saved[0].second.scalar_type() == at::kLong && saved[0].second.numel() == 1 &&
                      saved[0].second.item<int64_t>() >= 0;
    if (!fits) {
      throw Error(ErrorCode::kInvalidArgument,
                  "comm_hooks::post_local_sgd: the saved state is not one of this hook; expected a "
                  "number of steps, as comm_hook_state() returns it");
    }
    num_steps_ = saved[0].second.item<int64_t>();
  }

 private:
  static constexpr const char* kSteps = "num_steps";
  struct Total {
    at::Tensor weight;  // shape (1), float64: the weights of the ranks of the subgroup together
    Work work;
  };

  // Subgroups without samples have gradients of zeros.
  static void divide(const at::Tensor& buffer, double weight) {
    if (weight != 0.0) buffer.div_(weight);
  }

  void begin_step(const GradBucket& bucket, const ProcessGroup& group) {
    check_subgroup(group);
    is_local_ = num_steps_ >= options_.start_step;
    ++num_steps_;
    if (!is_local_ || options_.subgroup.world_size() == 1) return;
    const at::Tensor weight = at::tensor({bucket.weight}, at::TensorOptions(at::kDouble));
    Work work = options_.subgroup.all_reduce_async(weight);
    total_ = std::make_shared<Total>(Total{weight, std::move(work)});
  }

  void check_subgroup(const ProcessGroup& group) const {
    for (const int rank : options_.subgroup.global_ranks()) {
      if (group.group_rank(rank)) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  format("comm_hooks::post_local_sgd: rank {} of the world is in the subgroup and "
                         "not in the group of the wrapper. Split the subgroup from that group",
                         rank));
    }
  }

  PostLocalSgdOptions options_;
  int64_t num_steps_ = 0;
  bool is_local_ = false;
  std::shared_ptr<Total> total_;  // that of the present step; shared with the functions that wait
};

}  // namespace

Hook post_local_sgd(const PostLocalSgdOptions& options) {
  if (options.start_step < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                format("comm_hooks::post_local_sgd: start_step is {}; expected 0 or more",
                       options.start_step));
  }
  return std::make_shared<const CommHook>(
      format("post_local_sgd(start_step {}, subgroups of {})", options.start_step,
             options.subgroup.world_size()),
      [options] { return std::make_unique<PostLocal>(options); },
      CommHookTraits{.replicas_may_differ = true});
}

Hook allreduce() {
  return custom("allreduce", start_sum);
}

Hook fp16_compress_wrapper(const Hook& inner) {
  return compressed_by("fp16_compress_wrapper", at::kHalf, inner);
}

Hook bf16_compress_wrapper(const Hook& inner) {
  return compressed_by("bf16_compress_wrapper", at::kBFloat16, inner);
}

Hook fp16_compress() {
  return fp16_compress_wrapper(allreduce());
}

Hook bf16_compress() {
  return bf16_compress_wrapper(allreduce());
}

Hook quantize_per_tensor() {
  return custom("quantize_per_tensor", start_quantized);
}

Hook custom(std::string name, Start start) {
  if (!start || name.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "comm_hooks::custom: a hook needs a name and a function");
  }
  return std::make_shared<const CommHook>(std::move(name), [start = std::move(start)] {
    return std::make_unique<WithoutMemory>(start);
  });
}

}  // namespace cadre::comm_hooks
