#include "cadre/parallel/deferred/replay.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/deferred/operation_facts.h"

namespace cadre {

namespace {

using Operations = std::vector<std::shared_ptr<RecordedOperation>>;

// An operation to run.
struct Step {
  const RecordedOperation* operation;
  // Storages that the operation overwrites completely without reading them. They are allocated just
  // before it runs.
  std::vector<RecordedOperation::Write> allocated = {};
};

// Returns the operations on which the values at `places` depend (a backward slice). Goes through
// the operations from the last to the first, selects each one that writes to a needed storage, and
// adds the storages that it reads to the needed ones.
std::vector<Step> slice(const Operations& operations, const std::vector<StoragePlace>& places) {
  std::unordered_set<StorageId> needed;
  for (const StoragePlace& place : places) needed.insert(place.storage);
  std::vector<Step> steps;
  for (size_t i = operations.size(); i-- > 0 && !needed.empty();) {
    const RecordedOperation& operation = *operations[i];
    const bool is_needed =
        std::ranges::any_of(
            operation.created,
            [&](const auto& place) { return place && needed.contains(place->storage); }) ||
        std::ranges::any_of(operation.writes,
                            [&](const auto& write) { return needed.contains(write.storage); });
    if (!is_needed) continue;
    Step step{.operation = &operation};
    for (const auto& place : operation.created) {
      if (place) needed.erase(place->storage);
    }
    std::unordered_set<StorageId> read;
    for (const auto& place : operation.inputs) {
      if (place) read.insert(place->storage);
    }
    for (const RecordedOperation::Write& write : operation.writes) {
      if (!write.whole_bytes) continue;
      read.erase(write.storage);
      needed.erase(write.storage);
      step.allocated.push_back(write);
    }
    needed.merge(read);
    steps.push_back(std::move(step));
  }
  std::ranges::reverse(steps);
  return steps;
}

// Sets the default generator to another state while this object exists.
class DefaultGeneratorState {
 public:
  explicit DefaultGeneratorState(const at::Generator& state)
      : lock_(mutex()), saved_(at::detail::getDefaultCPUGenerator().clone()) {
    set(state);
  }
  ~DefaultGeneratorState() { set(saved_); }
  DefaultGeneratorState(const DefaultGeneratorState&) = delete;
  DefaultGeneratorState& operator=(const DefaultGeneratorState&) = delete;

 private:
  // One mutex for the process, because libtorch has one default generator in a process.
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static void set(const at::Generator& state) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state.get_state());
  }

  std::unique_lock<std::mutex> lock_;
  at::Generator saved_;
};

class Replay {
 public:
  explicit Replay(std::vector<Step> steps) : steps_(std::move(steps)) {}

  std::vector<at::Tensor> run(const std::vector<StoragePlace>& places) {
    for (const StoragePlace& place : places) last_use_[place.storage] = steps_.size();
    for (size_t i = steps_.size(); i-- > 0;) {
      for_each_storage(*steps_[i].operation, [&](StorageId id) { last_use_.try_emplace(id, i); });
    }
    for (size_t i = 0; i < steps_.size(); ++i) {
      run_step(steps_[i]);
      for_each_storage(*steps_[i].operation, [&](StorageId id) {
        if (last_use_.at(id) == i) storages_.erase(id);
      });
    }
    std::vector<at::Tensor> tensors;
    for (const StoragePlace& place : places) {
      tensors.push_back(tensor_at(storages_.at(place.storage), place));
    }
    return tensors;
  }

 private:
  template <typename Visit>
  static void for_each_storage(const RecordedOperation& operation, const Visit& visit) {
    for (const auto& place : operation.inputs) {
      if (place) visit(place->storage);
    }
    for (const auto& place : operation.created) {
      if (place) visit(place->storage);
    }
  }

  void run_step(const Step& step) {
    const RecordedOperation& operation = *step.operation;
    for (const RecordedOperation::Write& write : step.allocated) {
      storages_.insert_or_assign(write.storage, allocate_storage(*write.whole_bytes));
    }
    if (operation.bytes) {
      storages_.insert_or_assign(operation.created.at(0)->storage, storage_with(*operation.bytes));
      return;
    }
    std::vector<c10::IValue> stack = arguments_of(operation);
    if (operation.generator && !takes_generator(operation.handle.schema())) {
      const DefaultGeneratorState state(*operation.generator);
      run_unrecorded(operation.handle, stack);
    } else {
      run_unrecorded(operation.handle, stack);
    }
    keep_created(operation, stack);
  }

  static c10::Storage storage_with(const RecordedOperation::Bytes& bytes) {
    c10::Storage storage = allocate_storage(bytes.size);
    if (bytes.content.empty()) {
      // The pointer is null if the size is 0, which memset() does not accept.
      std::fill_n(static_cast<std::byte*>(storage.mutable_data()), bytes.size, std::byte());
    } else {
      std::memcpy(storage.mutable_data(), bytes.content.data(), bytes.size);
    }
    return storage;
  }

  static bool takes_generator(const c10::FunctionSchema& schema) {
    return std::ranges::any_of(schema.arguments(), is_generator);
  }

  std::vector<c10::IValue> arguments_of(const RecordedOperation& operation) {
    std::vector<c10::IValue> stack;
    size_t next = 0;
    used_.clear();
    const auto value_of = [&](const at::Tensor& recorded) {
      const std::optional<StoragePlace>& place = operation.inputs.at(next++);
      if (!place) return recorded;
      const c10::Storage& storage = storages_.at(place->storage);
      used_.insert(storage.unsafeGetStorageImpl());
      return tensor_at(storage, *place);
    };
    const c10::FunctionSchema& schema = operation.handle.schema();
    for (size_t i = 0; i < operation.arguments.size(); ++i) {
      if (operation.generator && is_generator(schema.arguments()[i])) {
        stack.emplace_back(operation.generator->clone());
      } else {
        stack.push_back(map_tensors_in(operation.arguments[i], value_of));
      }
    }
    return stack;
  }

  void keep_created(const RecordedOperation& operation, const std::vector<c10::IValue>& results) {
    size_t next = 0;
    for (const c10::IValue& result : results) {
      map_tensors_in(result, [&](const at::Tensor& tensor) {
        if (next >= operation.created.size()) refuse_result(operation, "more results");
        const std::optional<StoragePlace>& place = operation.created[next++];
        if (place) keep(operation, *place, tensor);
        return tensor;
      });
    }
  }

  void keep(const RecordedOperation& operation, const StoragePlace& place,
            const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.scalar_type() != place.dtype ||
        tensor.sizes() != at::IntArrayRef(place.sizes)) {
      refuse_result(operation, "results of another shape or dtype");
    }
    if (tensor.storage_offset() != place.offset || !has_strides(tensor, place.strides)) {
      refuse_result(operation, "results with other strides");
    }
    // The recorded operation created a new storage, but libtorch may return an argument itself
    // here, for example if a conversion has nothing to do. A copy is made then.
    const bool is_shared = used_.contains(tensor.storage().unsafeGetStorageImpl());
    storages_.insert_or_assign(place.storage,
                               is_shared ? tensor.clone().storage() : tensor.storage());
  }

  // Returns whether the tensor has these strides. The stride of a dim of size 1 is ignored.
  static bool has_strides(const at::Tensor& tensor, const std::vector<int64_t>& strides) {
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      if (tensor.size(dim) != 1 && tensor.stride(dim) != strides[static_cast<size_t>(dim)]) {
        return false;
      }
    }
    return true;
  }

  [[noreturn]] static void refuse_result(const RecordedOperation& operation,
                                         const std::string& what) {
    throw Error(ErrorCode::kInvalidArgument,
                format("materialize(): {} gives {} on the CPU than when it was recorded on the "
                       "meta device, so the values of deferred tensors would be wrong. Construct "
                       "this module without defer_init()",
                       c10::toString(operation.handle.operator_name()), what));
  }

  std::vector<Step> steps_;
  std::unordered_map<StorageId, size_t> last_use_;
  std::unordered_map<StorageId, c10::Storage> storages_;
  // The storages of the current operation's arguments.
  std::unordered_set<const c10::StorageImpl*> used_;
};

}  // namespace

c10::Storage allocate_storage(size_t num_bytes) {
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  return {c10::Storage::use_byte_size_t(), static_cast<int64_t>(num_bytes), allocator,
          /*resizable=*/true};
}

at::Tensor tensor_at(const c10::Storage& storage, const StoragePlace& place) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(place.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(place.sizes, place.strides, place.offset);
  return tensor;
}

void run_unrecorded(const c10::OperatorHandle& handle, std::vector<c10::IValue>& stack) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard unrecorded(c10::DispatchKey::DeferredInit);
  handle.callBoxed(&stack);
}

std::vector<at::Tensor> replay(const Tape& tape, const std::vector<StoragePlace>& places) {
  return Replay(slice(tape.operations(), places)).run(places);
}

}  // namespace cadre
