#include "cadre/parallel/layers/counter_based_dropout.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/philox.h"
#include "cadre/tensor/mesh/layout.h"

namespace cadre {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// All values on which a dropout mask depends.
struct Mask final : torch::CustomClassHolder {
  PhiloxKey key;
  uint64_t threshold;  // an element is dropped if its random word is below it
  double scale;
  int64_t first_sample;
  int64_t sample_stride;
  DropoutRegion region;
};

// Returns the generator's key, which differs for each step and layer.
PhiloxKey key_of(const DropoutStream& stream, uint64_t layer) {
  const auto low = [](uint64_t value) { return static_cast<uint32_t>(value); };
  const auto high = [](uint64_t value) { return static_cast<uint32_t>(value >> 32); };
  const PhiloxCounter words =
      philox4x32({low(stream.step), high(stream.step), low(layer), high(layer)},
                 {low(stream.seed), high(stream.seed)});
  return {words[0], words[1]};
}

// Applies dropout to `size` features of one row, beginning with the feature `offset` of the whole
// row. Four neighbouring features of the whole row share one counter of the generator, whatever
// part of the row is passed.
template <typename T>
void drop_row(const T* input, T* output, int64_t size, int64_t offset, uint32_t row,
              const Mask& mask, int64_t sample) {
  const auto scale = static_cast<at::opmath_type<T>>(mask.scale);
  const auto drop = [&](int64_t i, uint32_t word) {
    output[i] = word < mask.threshold
                    ? T(0)
                    : static_cast<T>(static_cast<at::opmath_type<T>>(input[i]) * scale);
  };
  const auto words_of = [&](int64_t block) {
    return philox4x32({static_cast<uint32_t>(block), row, static_cast<uint32_t>(sample),
                       static_cast<uint32_t>(static_cast<uint64_t>(sample) >> 32)},
                      mask.key);
  };
  int64_t i = 0;
  while (i < size) {
    const int64_t element = offset + i;
    const PhiloxCounter words = words_of(element / 4);
    const int64_t first = element % 4;
    if (first == 0 && i + 4 <= size) {
      for (int64_t k = 0; k < 4; ++k) drop(i + k, words[static_cast<size_t>(k)]);
      i += 4;
    } else {
      for (int64_t k = first; k < 4 && i < size; ++k) drop(i++, words[static_cast<size_t>(k)]);
    }
  }
}

// input: (B, R..., D), contiguous, a part of a whole tensor. The generator's counter for a row of D
// features is the index of this row within its sample in the whole tensor.
at::Tensor masked(const at::Tensor& input, const Mask& mask) {
  const at::Tensor output = at::empty_like(input);
  const std::vector<int64_t>& whole = mask.region.sizes;
  const std::vector<int64_t>& offsets = mask.region.offsets;
  const size_t num_middle = whole.empty() ? 0 : whole.size() - 1;  // the dimensions R
  const int64_t features = whole.empty() ? 1 : input.size(-1);
  const int64_t num_rows = features == 0 ? 0 : input.numel() / features;
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "counter_based_dropout", [&] {
        const scalar_t* in = input.const_data_ptr<scalar_t>();
        scalar_t* out = output.mutable_data_ptr<scalar_t>();
        for (int64_t r = 0; r < num_rows; ++r) {
          int64_t rest = r;
          int64_t row = 0;
          int64_t stride = 1;
          for (size_t k = num_middle; k-- > 0;) {
            const int64_t size = input.size(static_cast<int64_t>(k) + 1);
            row += (offsets[k] + rest % size) * stride;
            rest /= size;
            stride *= whole[k];
          }
          drop_row(in + r * features, out + r * features, features,
                   whole.empty() ? 0 : offsets.back(), static_cast<uint32_t>(row), mask,
                   mask.first_sample + rest * mask.sample_stride);
        }
      });
  return output;
}

// Four tensors of int64 that hold 32-bit words; their shapes are broadcast to one.
using PhiloxTensors = std::array<at::Tensor, 4>;

at::Tensor low_word(const at::Tensor& value) {
  return value.bitwise_and(int64_t{0xffffffff});
}
// The shift copies the sign, and the mask removes it.
at::Tensor high_word(const at::Tensor& value) {
  return low_word(at::bitwise_right_shift(value, 32));
}

// Computes philox4x32() by operators of tensors, for devices. A product of two words has 64 bits,
// all of which int64 keeps, although some products are negative numbers there.
PhiloxTensors philox_words(PhiloxTensors counter, PhiloxKey key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const at::Tensor first = counter[0] * int64_t{kPhiloxFactors[0]};
    const at::Tensor second = counter[2] * int64_t{kPhiloxFactors[1]};
    counter = {
        high_word(second).bitwise_xor(counter[1]).bitwise_xor_(int64_t{key[0]}), low_word(second),
        high_word(first).bitwise_xor(counter[3]).bitwise_xor_(int64_t{key[1]}), low_word(first)};
    key[0] += kPhiloxKeySteps[0];
    key[1] += kPhiloxKeySteps[1];
  }
  return counter;
}

// Returns the index within its sample, in the whole tensor, of each row of a sample of the input:
// shape (rows).
at::Tensor rows_within_sample(const at::Tensor& input, const DropoutRegion& region,
                              const at::TensorOptions& options) {
  at::Tensor rows = at::zeros({1}, options);
  for (size_t k = 0; k + 1 < region.sizes.size(); ++k) {
    const int64_t begin = region.offsets[k];
    const at::Tensor places =
        at::arange(begin, begin + input.size(static_cast<int64_t>(k) + 1), options);
    rows = (rows.unsqueeze(1) * region.sizes[k] + places).flatten();
  }
  return rows;
}

// Does what masked() does, with the same bits, by operators of tensors. They need memory for about
// eight integers of 64 bits for each element of the input while they run.
at::Tensor masked_on_device(const at::Tensor& input, const Mask& mask) {
  if (input.numel() == 0) return input.clone();
  const DropoutRegion& region = mask.region;
  const bool has_features = !region.sizes.empty();
  const int64_t begin = has_features ? region.offsets.back() : 0;
  const int64_t end = begin + (has_features ? input.size(-1) : 1);
  const at::TensorOptions options = input.options().dtype(at::kLong);
  const at::Tensor blocks = at::arange(begin / 4, (end + 3) / 4, options);
  const at::Tensor samples =
      (at::arange(input.size(0), options) * mask.sample_stride + mask.first_sample)
          .view({-1, 1, 1});
  const PhiloxTensors words = philox_words(
      {blocks.view({1, 1, -1}), rows_within_sample(input, region, options).view({1, -1, 1}),
       low_word(samples), high_word(samples)},
      mask.key);
  const at::Tensor of_features =
      at::stack(at::TensorList(words), -1).flatten(-2).narrow(-1, begin % 4, end - begin);
  const at::Tensor is_dropped =
      of_features.lt(static_cast<int64_t>(mask.threshold)).view(input.sizes());
  const at::ScalarType dtype = input.scalar_type();
  return (input.to(at::toOpMathType(dtype)) * mask.scale).to(dtype).masked_fill_(is_dropped, 0);
}

// Dropout with a fixed mask is linear and its matrix is diagonal, so the function is its own
// backward, of every order.
struct MaskedFunction : torch::autograd::Function<MaskedFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const c10::intrusive_ptr<Mask>& mask) {
    context->saved_data["mask"] = c10::IValue::make_capsule(mask);
    return input.is_cpu() ? masked(input.contiguous(), *mask)
                          : masked_on_device(input.contiguous(), *mask);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto mask =
        c10::static_intrusive_pointer_cast<Mask>(context->saved_data["mask"].toCapsule());
    return {apply(gradients[0], mask), {}};
  }
};

[[noreturn]] void refuse(const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, format("counter_based_dropout: {}", problem));
}

void check_probability(double p) {
  if (!(p >= 0 && p <= 1)) refuse(format("the probability {} is not between 0 and 1", p));
}

// Returns the region with all sizes filled in. Throws if the region does not fit the input.
DropoutRegion completed(DropoutRegion region, const at::Tensor& input) {
  const auto num_dims = static_cast<size_t>(input.dim() - 1);
  const std::vector<int64_t> own(input.sizes().begin() + 1, input.sizes().end());
  if (region.sizes.empty()) region.sizes = own;
  if (region.offsets.empty()) region.offsets.resize(num_dims, 0);
  bool fits = region.sizes.size() == num_dims && region.offsets.size() == num_dims;
  double num_rows = 1;
  for (size_t i = 0; fits && i < num_dims; ++i) {
    fits = region.offsets[i] >= 0 && own[i] <= region.sizes[i] &&
           region.offsets[i] <= region.sizes[i] - own[i];
    if (i + 1 < num_dims) num_rows *= static_cast<double>(region.sizes[i]);
  }
  if (!fits) {
    refuse(format(
        "the input {} does not fit into a tensor whose samples have the sizes {} at the offsets {}",
        list_of(input.sizes()), list_of(region.sizes), list_of(region.offsets)));
  }
  // The generator's counter has 32 bits for the row and 34 bits for the feature.
  if (num_rows > 0x1p32 || (num_dims > 0 && region.sizes.back() > int64_t{1} << 34)) {
    refuse(format("samples of the sizes {} have more than 2^32 rows or 2^34 features",
                  list_of(region.sizes)));
  }
  return region;
}

}  // namespace

at::Tensor counter_based_dropout(const at::Tensor& input, double p, const DropoutStream& stream,
                                 uint64_t layer, const DropoutRegion& region) {
  check_probability(p);
  if (input.dim() == 0 || !at::isFloatingType(input.scalar_type()) || input.is_meta()) {
    refuse("the input must be a floating-point tensor with values and at least one dimension");
  }
  if (p == 0) return input;
  const auto mask = c10::make_intrusive<Mask>();
  mask->key = key_of(stream, layer);
  mask->threshold = static_cast<uint64_t>(std::round(p * 0x1p32));
  mask->scale = p == 1 ? 0 : 1 / (1 - p);
  mask->first_sample = stream.first_sample;
  mask->sample_stride = stream.sample_stride;
  mask->region = completed(region, input);
  return MaskedFunction::apply(input, mask);
}

CounterBasedDropoutImpl::CounterBasedDropoutImpl(CounterBasedDropoutOptions given)
    : options(std::move(given)) {
  check_options();
}

// The options are a public member, so the program may have changed them after construction.
void CounterBasedDropoutImpl::check_options() const {
  check_probability(options.p);
  if (options.stream == nullptr) refuse("options.stream is null; all layers of a model share one");
  if (options.features && *options.features < 1) {
    refuse(format("options.features is {}, expected at least 1", *options.features));
  }
}

std::string CounterBasedDropoutImpl::options_text() const {
  check_options();
  return format("p {}, layer {}, seed {}, features {}", options.p, options.layer,
                options.stream->seed,
                options.features ? format("{}", *options.features) : "not given");
}

at::Tensor CounterBasedDropoutImpl::forward(const at::Tensor& input) {
  if (!is_training()) return input;
  check_options();
  if (context() != nullptr) return drop_tokens(input, *context());
  return counter_based_dropout(input, options.p, *options.stream, options.layer, region_of(input));
}

// Applies dropout to each run of consecutive tokens separately, as a region of the whole sequence.
at::Tensor CounterBasedDropoutImpl::drop_tokens(const at::Tensor& input,
                                                const ContextParallel& sequence) const {
  DropoutRegion region = region_of(input);
  if (region.sizes.empty() && input.dim() > 0) {
    region = {.sizes = {input.sizes().begin() + 1, input.sizes().end()},
              .offsets = std::vector<int64_t>(static_cast<size_t>(input.dim() - 1), 0)};
  }
  if (input.dim() < 3 || region.sizes[region.sizes.size() - 2] != sequence.num_own_tokens()) {
    refuse(format(
        "the input has the sizes {}, but this layer needs (B, ..., T, D) with T = {}, this rank's "
        "share of the {} tokens that were passed to set_context_parallel()",
        list_of(input.sizes()), sequence.num_own_tokens(), sequence.options().num_tokens));
  }
  const size_t dim = region.sizes.size() - 2;
  // The input has the tokens [begin, end) of this rank's tokens. With sequence parallelism these
  // are only some of them.
  const int64_t begin = region.offsets[dim];
  const int64_t end = begin + input.size(-2);
  region.sizes[dim] = sequence.options().num_tokens;
  std::vector<at::Tensor> parts;
  int64_t first = 0;  // the index, among this rank's tokens, of the run's first one
  for (const TokenRun& run : sequence.runs(sequence.group().rank())) {
    const int64_t from = std::max(begin, first);
    const int64_t size = std::min(end, first + run.size) - from;
    region.offsets[dim] = run.begin + from - first;
    first += run.size;
    if (size <= 0) continue;
    parts.push_back(counter_based_dropout(input.narrow(-2, from - begin, size), options.p,
                                          *options.stream, options.layer, region));
  }
  return parts.empty() ? input : at::cat(parts, -2);
}

DropoutRegion CounterBasedDropoutImpl::region_of(const at::Tensor& input) const {
  const LayerParallelism* const how = parallelism();
  // Throws if the input has only a part of the features, because each rank would apply the mask of
  // the first features to its part.
  if (options.features && !has_style(ParallelStyle::kColwise) &&
      (input.dim() == 0 || input.size(-1) != *options.features)) {
    refuse(
        format("the input {} does not have the {} features of options.features; a layer whose "
               "input is this rank's part of the features must be kColwise",
               list_of(input.sizes()), *options.features));
  }
  if (how == nullptr || how->style == ParallelStyle::kReplicated) return {};
  const int num_ranks = how->group.world_size();
  const int rank = how->group.rank();
  const bool is_sequence = how->style == ParallelStyle::kSequence;
  if (input.dim() < (is_sequence ? 3 : 2)) {
    refuse(format("the input {} of a {} layer is not {}", list_of(input.sizes()),
                  to_string(how->style), is_sequence ? "(B, ..., T, D)" : "(B, ..., D)"));
  }
  DropoutRegion region{.sizes = {input.sizes().begin() + 1, input.sizes().end()}};
  region.offsets.resize(region.sizes.size(), 0);
  if (is_sequence) {
    const size_t dim = region.sizes.size() - 2;
    region.offsets[dim] = rank * region.sizes[dim];
    region.sizes[dim] *= num_ranks;
    return region;
  }
  const Chunk chunk = chunk_of(*options.features, num_ranks, rank);
  check_features(input, chunk.size);
  region.sizes.back() = *options.features;
  region.offsets.back() = chunk.begin;
  return region;
}

std::optional<int64_t> CounterBasedDropoutImpl::divided_dim(std::string_view, ParallelStyle) const {
  return std::nullopt;
}

std::optional<std::string> CounterBasedDropoutImpl::problem_of(const LayerParallelism& how) const {
  if (how.style == ParallelStyle::kRowwise) {
    return "a dropout is kSequence, kColwise or kReplicated";
  }
  if (how.gather_output) {
    return "a dropout works on each element, so it gathers nothing; leave out gather_output";
  }
  if (how.style == ParallelStyle::kColwise && !options.features) {
    return "set options.features to the size of the whole last dimension, which tells each rank "
           "which elements it holds";
  }
  return std::nullopt;
}

void CounterBasedDropoutImpl::pretty_print(std::ostream& stream) const {
  stream << "cadre::CounterBasedDropout(p=" << options.p << ", layer=" << options.layer << ")";
}

}  // namespace cadre
