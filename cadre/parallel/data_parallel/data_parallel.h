// Data parallelism in one process: replicas of a module compute parts of a batch at the same time,
// on several devices or in threads of the CPU.
//
//   auto net = std::make_shared<Net>();                        // derived from torch::nn::Cloneable
//   cadre::DataParallel model{net, {.num_replicas = 4}};
//   torch::optim::SGD optimizer{model.parameters(), 0.1};
//   torch::mse_loss(model(x), y).backward();                   // into the parameters of `net`
//   optimizer.step();
//
// Each forward divides the tensors among its arguments by rows, copies the module, runs the copies,
// and joins their outputs; backward adds the gradients of the copies to those of the module. The
// first replica is the module itself, so BatchNorm's running statistics are those of the first
// part. DistributedDataParallel does less work in each step and also runs backward in parallel.
//
// Threads: calls of one object follow each other. Blocking: until all replicas have computed.
// Errors: of the replicas that have thrown, the error of the first one, which names it;
// kInvalidArgument for arguments that cannot be divided. The module may then have new running
// statistics. Source: torch.nn.DataParallel.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/data_parallel/parallel_apply.h"
#include "cadre/parallel/data_parallel/replicate.h"
#include "cadre/parallel/data_parallel/scatter_gather.h"
#include "cadre/tensor/hooks/map_tensors.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/hooks/output_tensors.h"

namespace cadre {

struct DataParallelOptions {
  // The device of each replica; the module is on the first one. One device may be named several
  // times. Empty: `num_replicas` times the device of the module.
  std::vector<c10::Device> devices = {};
  int num_replicas = 0;  // 0: as many as `devices`
  // Where the output is put; by default the first device.
  std::optional<c10::Device> output_device = {};
  // The dimension along which inputs are divided and outputs are joined.
  int64_t dim = 0;
};

namespace data_parallel {

// Checks the options and returns the device of each replica.
CADRE_EXPORT std::vector<c10::Device> devices_of(const torch::nn::Module* module,
                                                 const DataParallelOptions& options);

// Returns how many replicas get a part of these tensors. Throws kInvalidArgument if a tensor has no
// rows or another number of rows than the first one.
CADRE_EXPORT size_t count_parts(std::span<const at::Tensor> inputs, size_t num_devices,
                                int64_t dim);

// The parts of one argument of forward(), or its value for all replicas if it holds no tensor.
template <typename T>
struct Parts {
  T value;
  const T& of(size_t) const { return value; }
};
template <>
struct Parts<at::Tensor> {
  std::vector<at::Tensor> parts;
  const at::Tensor& of(size_t replica) const { return parts[replica]; }
};
template <>
struct Parts<std::optional<at::Tensor>> {
  std::vector<at::Tensor> parts;
  std::optional<at::Tensor> of(size_t replica) const {
    return parts.empty() ? std::nullopt : std::optional(parts[replica]);
  }
};

template <typename T>
using PartsOf =
    Parts<std::conditional_t<std::is_convertible_v<const T&, at::Tensor>, at::Tensor, T>>;

template <typename T>
PartsOf<T> divide(const T& argument, std::span<const c10::Device> devices, int64_t dim) {
  if constexpr (std::is_convertible_v<const T&, at::Tensor>) {
    return {scatter(argument, devices, dim)};
  } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    if (!argument) return {};
    return {scatter(*argument, devices, dim)};
  } else {
    static_assert(!wrap::HoldsReplaceableTensors<T>::value,
                  "cadre::DataParallel divides arguments of the type torch::Tensor and "
                  "std::optional<torch::Tensor>; pass the tensors of a container one by one");
    return {argument};
  }
}

// Joins the outputs: a tensor, or a tuple of tensors and such tuples.
template <typename T>
struct Join {
  static_assert(std::is_same_v<T, at::Tensor>,
                "cadre::DataParallel joins outputs of the type torch::Tensor, and tuples of them");
  static T of(const std::vector<std::optional<T>>& outputs, c10::Device device, int64_t dim) {
    std::vector<at::Tensor> tensors;
    for (const auto& output : outputs) tensors.push_back(*output);
    return gather(tensors, device, dim);
  }
};
template <typename... T>
struct Join<std::tuple<T...>> {
  using Tuple = std::tuple<T...>;
  static Tuple of(const std::vector<std::optional<Tuple>>& outputs, c10::Device device,
                  int64_t dim) {
    return join(outputs, device, dim, std::index_sequence_for<T...>());
  }

 private:
  template <size_t... kIndex>
  static Tuple join(const std::vector<std::optional<Tuple>>& outputs, c10::Device device,
                    int64_t dim, std::index_sequence<kIndex...>) {
    const auto column = [&]<size_t kColumn>(std::integral_constant<size_t, kColumn>) {
      using Element = std::tuple_element_t<kColumn, Tuple>;
      std::vector<std::optional<Element>> elements;
      for (const auto& output : outputs) elements.push_back(std::get<kColumn>(*output));
      return Join<Element>::of(elements, device, dim);
    };
    return Tuple(column(std::integral_constant<size_t, kIndex>())...);
  }
};

}  // namespace data_parallel

template <typename M>
class DataParallel {
 public:
  // `make_replica` makes a module of the same structure, in each forward; by default M is cloned.
  explicit DataParallel(std::shared_ptr<M> module, const DataParallelOptions& options = {},
                        data_parallel::MakeReplica<M> make_replica = {})
      : module_(std::move(module)),
        devices_(data_parallel::devices_of(module_.get(), options)),
        output_device_(options.output_device.value_or(devices_.front())),
        dim_(options.dim),
        make_replica_(std::move(make_replica)) {}
  // Takes a holder of libtorch, such as torch::nn::Linear or torch::nn::Sequential.
  template <typename Holder>
    requires std::is_same_v<typename Holder::ContainedType, M>
  explicit DataParallel(const Holder& holder, const DataParallelOptions& options = {},
                        data_parallel::MakeReplica<M> make_replica = {})
      : DataParallel(holder.ptr(), options, std::move(make_replica)) {}

  // Tensors among the arguments are divided by rows; other values are given to each replica.
  template <typename... Args>
  auto forward(const Args&... args) {
    using Output = std::remove_cvref_t<decltype(module_->forward(args...))>;
    std::vector<at::Tensor> inputs;
    (append(inputs, args), ...);
    const size_t num_parts = data_parallel::count_parts(inputs, devices_.size(), dim_);
    // The tensors are divided among all devices, also if only the first ones get a part.
    const std::tuple parts(data_parallel::divide<Args>(args, devices_, dim_)...);
    const std::span used = std::span(devices_).first(num_parts);
    const auto replicas = data_parallel::replicate<M>(module_, used, make_replica_);
    std::vector<std::optional<Output>> outputs(num_parts);
    data_parallel::run_replicas(used, [&](size_t i) {
      outputs[i].emplace(std::apply(
          [&](const auto&... part) { return replicas[i]->forward(part.of(i)...); }, parts));
    });
    auto joined = data_parallel::Join<Output>::of(outputs, output_device_, dim_);
    data_parallel::keep_until_backward(wrap::tensors_of(joined),
                                       {replicas.begin(), replicas.end()});
    return joined;
  }
  template <typename... Args>
  auto operator()(const Args&... args) {
    return forward(args...);
  }

  const std::shared_ptr<M>& module() const { return module_; }
  M* operator->() const { return module_.get(); }
  std::span<const c10::Device> devices() const { return devices_; }
  // Returns each parameter of the module once.
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> parameters;
    for (NamedTensor& parameter : distinct_parameters(*module_)) {
      parameters.push_back(std::move(parameter.tensor));
    }
    return parameters;
  }
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }

 private:
  template <typename T>
  static void append(std::vector<at::Tensor>& inputs, const T& argument) {
    if constexpr (std::is_convertible_v<const T&, at::Tensor>) {
      inputs.push_back(argument);
    } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
      if (argument) inputs.push_back(*argument);
    }
  }

  std::shared_ptr<M> module_;
  std::vector<c10::Device> devices_;
  c10::Device output_device_;
  int64_t dim_;
  data_parallel::MakeReplica<M> make_replica_;
};

template <typename Holder>
  requires requires { typename Holder::ContainedType; }
DataParallel(const Holder&) -> DataParallel<typename Holder::ContainedType>;
template <typename Holder>
  requires requires { typename Holder::ContainedType; }
DataParallel(const Holder&, const DataParallelOptions&)
    -> DataParallel<typename Holder::ContainedType>;

}  // namespace cadre
