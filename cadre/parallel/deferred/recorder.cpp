#include "cadre/parallel/deferred/recorder.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/deferred/operation_facts.h"
#include "cadre/parallel/deferred/replay.h"
#include "cadre/tensor/hooks/operations/written_argument.h"

namespace cadre {

namespace {

constexpr size_t kMaxWritableBytes = 16 << 10;

// If `original` is a wrapped number, marks `tensor` as one, too, because libtorch's type promotion
// treats wrapped numbers like scalars. Returns `tensor`.
at::Tensor as_number_like(const at::Tensor& original, at::Tensor tensor) {
  if (original.unsafeGetTensorImpl()->is_wrapped_number()) {
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return tensor;
}

at::Tensor meta_like(const at::Tensor& tensor) {
  return as_number_like(tensor, at::empty_strided(tensor.sizes(), tensor.strides(),
                                                  tensor.options().device(at::kMeta)));
}

at::Tensor copy_of(const at::Tensor& tensor) {
  return as_number_like(tensor, tensor.detach().clone());
}

const void* key_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                  : nullptr;
}

// Handles one call of an operation that the dispatcher has passed to the recorder.
class Recorder {
 public:
  Recorder(const c10::OperatorHandle& handle, std::vector<c10::IValue>& stack)
      : handle_(handle),
        schema_(handle.schema()),
        stack_(stack),
        first_(stack.size() - schema_.arguments().size()),
        scope_(Tape::joined(tape_of_scope())) {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) look_at_argument(i);
  }

  void run() {
    if (!is_recorded()) return handle_.callBoxed(&stack_);
    check_call();
    const bool is_random = handle_.hasTag(at::Tag::nondeterministic_seeded);
    const std::vector<c10::IValue> arguments(stack_.begin() + first(), stack_.end());
    if (writes_real_) {
      if (!written_.empty())
        refuse(
            "the operation also writes to a tensor from outside of defer_init(), which cannot be "
            "recorded; write to the two tensors in separate operations");
      return run_on_values(arguments);
    }
    auto operation = make_operation(arguments);
    if (is_random) {
      operation->generator = state_of_generator(arguments);
      if (!written_.empty()) run_on_meta(arguments);
      run_on_values(arguments);
    } else if (!run_on_meta(arguments)) {
      run_on_values(arguments);
    }
    record(std::move(operation));
  }

 private:
  struct Input {
    at::Tensor tensor;
    size_t argument;
    bool is_deferred;
  };

  // Lets the deferred inputs be accessed while this object exists: libtorch's implementations for
  // meta tensors read data pointers, although they do not use them.
  class Unguarded {
   public:
    explicit Unguarded(const std::vector<Input>& inputs) : inputs_(inputs) {
      for (const Input& input : inputs_) {
        if (input.is_deferred) Tape::guard_memory(input.tensor, /*is_guarded=*/false);
      }
    }
    ~Unguarded() {
      for (const Input& input : inputs_) {
        if (input.is_deferred) Tape::guard_memory(input.tensor, /*is_guarded=*/true);
      }
    }
    Unguarded(const Unguarded&) = delete;
    Unguarded& operator=(const Unguarded&) = delete;

   private:
    const std::vector<Input>& inputs_;
  };

  std::ptrdiff_t first() const { return static_cast<std::ptrdiff_t>(first_); }
  std::string name() const { return c10::toString(handle_.operator_name()); }

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorCode::kInvalidArgument,
                format("{} on a deferred tensor (see cadre::defer_init): {}", name(), what));
  }

  void look_at_argument(size_t index) {
    const bool written = wrap::is_written(schema_.arguments()[index]);
    map_tensors_in(stack_[first_ + index], [&](const at::Tensor& tensor) {
      const DeferredStorage* const storage = Tape::storage_of(tensor);
      const bool is_real = tensor.defined() && storage == nullptr;
      inputs_.push_back({tensor, index, storage != nullptr});
      has_deferred_ = has_deferred_ || storage != nullptr;
      has_real_ = has_real_ || is_real;
      if (written && is_real) writes_real_ = true;
      if (storage != nullptr) {
        tapes_.push_back(storage->tape);
        if (written) written_.push_back(tensor);
      }
      return tensor;
    });
  }

  int device_argument() const {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      if (schema_.arguments()[i].name() == "device") return static_cast<int>(i);
    }
    return -1;
  }

  bool is_recorded() const {
    if (has_deferred_) return true;
    // clone() of a tensor with values is recorded, so that torch::nn::Cloneable::clone() inside of
    // defer_init() makes a deferred copy of a module.
    if (scope_ && schema_.name() == "aten::clone" && inputs_[0].tensor.is_cpu()) return true;
    if (!scope_ || has_real_ || device_argument() < 0) return false;
    const c10::IValue& device = stack_[first_ + static_cast<size_t>(device_argument())];
    return device.isNone() || device.toDevice().is_cpu() || device.toDevice().is_meta();
  }

  void check_call() {
    tape_ = scope_;
    for (const auto& tape : tapes_) tape_ = Tape::join(tape_, Tape::joined(tape));
    if (at::autocast::is_autocast_enabled(at::kCPU)) {
      refuse(
          "autocast is enabled, and may choose another dtype when the operation is run later. "
          "Disable it while the module is constructed");
    }
    for (const Input& input : inputs_) {
      if (!input.tensor.defined()) continue;
      if (!input.is_deferred && !input.tensor.is_cpu()) {
        refuse(
            format("another argument is on {} and its values cannot be recorded; make it inside "
                   "defer_init(), or on the CPU",
                   input.tensor.device().str()));
      }
      if (input.tensor.layout() != at::kStrided) {
        refuse(
            "an argument is not dense, and operations on such tensors cannot be recorded. Call the "
            "operation after cadre::materialize()");
      }
      if (input.tensor.is_conj() || input.tensor.is_neg()) {
        refuse("an argument is a lazy conjugate or negative; call resolve_conj() or resolve_neg()");
      }
    }
    for (size_t i = first_; i < stack_.size(); ++i) {
      if (stack_[i].isStorage() || stack_[i].isStream() || stack_[i].isPyObject()) {
        refuse(
            "the operation takes a storage or a stream, which cannot be recorded. Call "
            "the operation after cadre::materialize()");
      }
    }
  }

  // Returns a copy of the arguments in which each tensor is replaced by map(tensor), and the device
  // argument, if any, by `device`.
  std::vector<c10::IValue> with_tensors(
      const std::vector<c10::IValue>& arguments, at::DeviceType device,
      const std::function<at::Tensor(const at::Tensor&)>& map) const {
    std::vector<c10::IValue> mapped;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (static_cast<int>(i) == device_argument()) {
        mapped.push_back(on_device(arguments[i], device));
      } else {
        mapped.push_back(map_tensors_in(arguments[i], map));
      }
    }
    return mapped;
  }

  c10::IValue on_device(const c10::IValue& asked, at::DeviceType device) const {
    if (asked.isNone()) return has_deferred_ ? asked : c10::IValue(at::Device(device));
    if (!asked.toDevice().is_cpu() && !asked.toDevice().is_meta()) {
      refuse(format(
          "the operation would create a tensor on {0}. Leave it out, and pass the device to "
          "FullyShardedDataParallel (options.device) or to cadre::materialize(module, device)",
          asked.toDevice().str()));
    }
    return at::Device(device);
  }

  // Runs the operation on meta tensors, to find out the results' sizes and dtypes. Returns false if
  // the operation has no implementation for meta tensors, or throws: the caller then runs it on
  // values, where it throws the same error as in plain construction. But if an operation that
  // writes to a deferred tensor throws (because the tensor is a leaf that requires grad, for
  // example), throws at once.
  bool run_on_meta(const std::vector<c10::IValue>& arguments) {
    twins_.clear();
    std::vector<c10::IValue> stack =
        with_tensors(arguments, at::kMeta, [&](const at::Tensor& tensor) {
          if (!tensor.defined() || Tape::storage_of(tensor) != nullptr) return tensor;
          twins_.push_back(meta_like(tensor));
          return twins_.back();
        });
    try {
      const Unguarded unguarded(inputs_);
      handle_.callBoxed(&stack);
    } catch (const c10::NotImplementedError&) {
      return false;
    } catch (const c10::Error&) {
      if (!written_.empty()) throw;
      return false;
    }
    results_ = std::move(stack);
    return true;
  }

  // Runs the operation on values, after computing those of the deferred arguments. If the operation
  // writes to a tensor from outside, its results have values, unless they share memory with a
  // deferred argument; otherwise they become meta tensors.
  void run_on_values(const std::vector<c10::IValue>& arguments) {
    const auto values = values_of_inputs();
    size_t next = 0;
    std::vector<c10::IValue> stack =
        with_tensors(arguments, at::kCPU, [&](const at::Tensor&) { return values[next++]; });
    run_unrecorded(handle_, stack);
    if (!results_.empty()) return;  // run_on_meta() has made the results
    std::unordered_map<const void*, at::Tensor> origins;
    for (size_t i = 0; i < values.size(); ++i) {
      if (inputs_[i].is_deferred) origins.emplace(key_of(values[i]), inputs_[i].tensor);
    }
    for (c10::IValue& result : stack) {
      result = map_tensors_in(result,
                              [&](const at::Tensor& tensor) { return result_of(tensor, origins); });
    }
    results_ = std::move(stack);
    if (writes_real_) replace_stack();
  }

  at::Tensor result_of(const at::Tensor& tensor,
                       const std::unordered_map<const void*, at::Tensor>& origins) const {
    if (!tensor.defined()) return tensor;
    const auto origin = origins.find(key_of(tensor));
    if (origin != origins.end()) {
      const c10::impl::ExcludeDispatchKeyGuard unrecorded(c10::DispatchKey::DeferredInit);
      return origin->second.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    }
    return writes_real_ ? tensor : meta_like(tensor);
  }

  std::vector<at::Tensor> values_of_inputs() {
    std::vector<at::Tensor> values;
    std::vector<StoragePlace> places;
    std::vector<size_t> indices;
    for (const Input& input : inputs_) {
      values.push_back(input.tensor);
      if (!input.is_deferred) continue;
      const StoragePlace place = Tape::place_of(input.tensor);
      if (is_scratch(input)) {
        values.back() = tensor_at(
            allocate_storage(input.tensor.storage().unsafeGetStorageImpl()->nbytes()), place);
        continue;
      }
      take_bytes_of(input.tensor);
      places.push_back(place);
      indices.push_back(values.size() - 1);
    }
    if (places.empty()) return values;
    const std::vector<at::Tensor> replayed = replay(*tape_, places);
    for (size_t i = 0; i < replayed.size(); ++i) values[indices[i]] = replayed[i];
    return values;
  }

  bool is_scratch(const Input& input) const {
    return is_random_like(schema_) || (input.argument == 0 && is_fill(schema_));
  }

  static void take_bytes_of(const at::Tensor& tensor) {
    const DeferredStorage* const storage = Tape::storage_of(tensor);
    if (storage->writable) Tape::take_bytes(*storage->writable);
  }

  static at::Generator state_of_generator(const std::vector<c10::IValue>& arguments) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    for (const c10::IValue& argument : arguments) {
      if (argument.isGenerator()) generator = argument.toGenerator();
    }
    const std::lock_guard<std::mutex> lock(generator.mutex());
    return generator.clone();
  }

  // Must be called before the operation runs, because the operation may change the sizes of its
  // arguments.
  std::shared_ptr<RecordedOperation> make_operation(const std::vector<c10::IValue>& arguments) {
    auto operation = std::make_shared<RecordedOperation>(RecordedOperation{.handle = handle_});
    for (const Input& input : inputs_) {
      operation->inputs.push_back(input.is_deferred
                                      ? std::optional<StoragePlace>(Tape::place_of(input.tensor))
                                      : std::nullopt);
    }
    for (const at::Tensor& tensor : written_) {
      RecordedOperation::Write write{.storage = Tape::storage_of(tensor)->id};
      const size_t num_bytes = tensor.storage().unsafeGetStorageImpl()->nbytes();
      if (is_fill(schema_) && tensor.is_non_overlapping_and_dense() &&
          tensor.nbytes() == num_bytes && !reads_written()) {
        write.whole_bytes = num_bytes;
      }
      operation->writes.push_back(write);
    }
    operation->arguments = arguments;
    return operation;
  }

  // Returns whether the operation also reads the storage that it writes, as x.copy_(x.t()) does.
  bool reads_written() const {
    return std::ranges::count_if(inputs_, [&](const Input& input) {
             return input.is_deferred &&
                    Tape::storage_of(input.tensor) == Tape::storage_of(written_[0]);
           }) > 1;
  }

  void record(std::shared_ptr<RecordedOperation> operation) {
    bool creates = false;
    std::vector<at::Tensor> created;
    for (c10::IValue& result : results_) {
      map_tensors_in(result, [&](const at::Tensor& tensor) {
        const bool is_new =
            tensor.defined() && tensor.is_meta() && Tape::storage_of(tensor) == nullptr;
        if (is_new) check_result(tensor);
        creates = creates || is_new;
        created.push_back(is_new ? tensor : at::Tensor());
        return tensor;
      });
    }
    const bool has_effect = creates || !written_.empty();
    if (has_effect) check_recordable();
    if (has_effect) finish_operation(*operation, created);
    for (const at::Tensor& tensor : created) {
      if (!tensor.defined()) continue;
      const bool may_be_written = operation->arguments.size() > 0 && is_small_empty(tensor);
      Tape::adopt(tensor, tape_, may_be_written ? operation : nullptr);
    }
    for (const c10::IValue& result : results_) {
      map_tensors_in(result, [&](const at::Tensor& tensor) {
        if (Tape::storage_of(tensor) != nullptr) Tape::adopt(tensor, tape_, nullptr);
        return tensor;
      });
    }
    for (const at::Tensor& tensor : created) {
      operation->created.push_back(
          tensor.defined() ? std::optional<StoragePlace>(Tape::place_of(tensor)) : std::nullopt);
    }
    if (has_effect) tape_->add(std::move(operation));
    replace_stack();
  }

  void check_result(const at::Tensor& tensor) const {
    if (tensor.layout() != at::kStrided || !tensor.has_storage()) {
      refuse(
          "the result is not dense, which cannot be recorded. Call the operation after "
          "cadre::materialize()");
    }
    for (const at::Tensor& twin : twins_) {
      if (key_of(twin) != key_of(tensor)) continue;
      refuse(
          "the result shares memory with a tensor from outside of defer_init(); copy that tensor "
          "first, with clone()");
    }
  }

  void check_recordable() const {
    if (tape_->is_closed()) {
      refuse(
          "a tensor of the same module has been materialized, and nothing is recorded any more. "
          "Change the module before a part of it is materialized, or materialize all of it first. "
          "A tensor that is not registered as a parameter or buffer is never materialized: use "
          "register_buffer()");
    }
    if (scope_ || schema_.name() == "aten::to" || schema_.name() == "aten::_to_copy") return;
    const bool is_forward = std::ranges::any_of(results_, [](const c10::IValue& result) {
      return result.isTensor() && result.toTensor().requires_grad() && !result.toTensor().is_leaf();
    });
    if (!is_forward) return;
    refuse(
        "a forward with grad needs values. Call cadre::materialize(module), or wrap the module "
        "in FullyShardedDataParallel or DistributedDataParallel, before it is used; change "
        "parameters under torch::NoGradGuard");
  }

  bool is_small_empty(const at::Tensor& tensor) const {
    return schema_.name() == "aten::empty" && scope_ != nullptr && tensor.is_contiguous() &&
           tensor.nbytes() <= kMaxWritableBytes && tensor.nbytes() > 0;
  }

  // Stores in `operation` what is needed to run it again: copies of the tensors with values that it
  // reads, and the dtype if it was the default dtype, which may change until then.
  void finish_operation(RecordedOperation& operation, const std::vector<at::Tensor>& created) {
    for (const Input& input : inputs_) {
      if (input.is_deferred) take_bytes_of(input.tensor);
    }
    operation.arguments = with_tensors(operation.arguments, at::kCPU, [](const at::Tensor& tensor) {
      if (!tensor.defined() || Tape::storage_of(tensor) != nullptr) return at::Tensor();
      return copy_of(tensor);
    });
    const std::vector<c10::Argument>& arguments = schema_.arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() != "dtype" || !operation.arguments[i].isNone()) continue;
      if (!has_deferred_ && created.size() == 1 && created[0].defined()) {
        operation.arguments[i] = created[0].scalar_type();
      }
    }
    if (operation.generator) take_generator_argument(operation);
  }

  // Replaces a random operation without a generator argument, such as randn(), by its overload that
  // takes a generator, if there is one.
  void take_generator_argument(RecordedOperation& operation) const {
    if (std::ranges::any_of(schema_.arguments(), is_generator)) return;
    const std::string& overload = schema_.overload_name();
    const auto found = c10::Dispatcher::singleton().findSchema(
        {schema_.name(), overload.empty() ? "generator" : overload + "_generator"});
    if (!found) return;
    const std::vector<c10::Argument>& others = found->schema().arguments();
    const auto place = std::ranges::find_if(others, is_generator);
    if (place == others.end() || others.size() != schema_.arguments().size() + 1) return;
    const auto index = place - others.begin();
    operation.handle = *found;
    operation.arguments.insert(operation.arguments.begin() + index, c10::IValue());
  }

  void replace_stack() {
    stack_.erase(stack_.begin() + first(), stack_.end());
    std::ranges::move(results_, std::back_inserter(stack_));
    results_.clear();
  }

  const c10::OperatorHandle& handle_;
  const c10::FunctionSchema& schema_;
  std::vector<c10::IValue>& stack_;
  const size_t first_;
  const std::shared_ptr<Tape> scope_;
  std::shared_ptr<Tape> tape_;
  std::vector<Input> inputs_;
  std::vector<std::shared_ptr<Tape>> tapes_;
  std::vector<at::Tensor> written_;  // the deferred tensors that the operation writes
  std::vector<at::Tensor> twins_;
  std::vector<c10::IValue> results_;
  bool has_deferred_ = false;
  bool has_real_ = false;
  bool writes_real_ = false;
};

void record_operation(const c10::OperatorHandle& handle, std::vector<c10::IValue>* stack) {
  const c10::impl::ExcludeDispatchKeyGuard unrecorded(c10::DispatchKey::DeferredInit);
  Recorder(handle, *stack).run();
}

}  // namespace

void install_recorder() {
  // The recorder stays registered until the process ends, because deferred tensors outlive the
  // scope in which they were made.
  static const torch::Library fallback = [] {
    torch::Library library(torch::Library::IMPL, "_", c10::DispatchKey::DeferredInit, __FILE__,
                           __LINE__);
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&record_operation>());
    return library;
  }();
}

std::shared_ptr<Tape>& tape_of_scope() {
  // The variable is thread-local, because the dispatcher calls the recorder without a context
  // argument. A DeferredScope sets it, and resets it in its destructor on the same thread.
  static thread_local std::shared_ptr<Tape> tape;
  return tape;
}

}  // namespace cadre
