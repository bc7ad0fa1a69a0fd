#include "cadre/parallel/deferred/tape.h"

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <string>
#include <utility>

#include "cadre/core/base/error.h"

namespace cadre {

namespace {

constexpr const char* kNoValues =
    "This tensor was made inside cadre::defer_init() and has no values yet, so its memory cannot "
    "be accessed. Use operations on tensors, which are recorded; or fill a table through pointers "
    "or accessors before defer_init(), and copy it into a tensor with copy_(); or call "
    "cadre::materialize(module) first";

// Gives access to the protected dispatch keys of a tensor. With the key DeferredInit the dispatcher
// calls the recorder for every operation on the tensor, also outside of defer_init().
struct WithKeys : c10::TensorImpl {
  static c10::DispatchKeySet& of(c10::TensorImpl& impl) { return impl.*(&WithKeys::key_set_); }
};

void delete_storage(void* context) {
  const std::unique_ptr<DeferredStorage> owned(static_cast<DeferredStorage*>(context));
  if (owned->writable) owned->writable->storage = nullptr;
}

// Returns a number that is larger than all numbers before. Operations and storages of all tapes and
// threads share this counter, so that operations keep their order when tapes are joined.
uint64_t next_number() {
  static std::atomic<uint64_t> number{0};
  return ++number;
}

RecordedOperation::Bytes bytes_in(const std::vector<std::byte>& memory) {
  const bool is_zero = std::ranges::all_of(memory, [](std::byte b) { return b == std::byte{0}; });
  return {.size = memory.size(), .content = is_zero ? std::vector<std::byte>() : memory};
}

c10::StorageImpl* storage_impl_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

}  // namespace

std::shared_ptr<Tape> Tape::joined(std::shared_ptr<Tape> tape) {
  while (tape && tape->joined_with_) tape = tape->joined_with_;
  return tape;
}

std::shared_ptr<Tape> Tape::join(const std::shared_ptr<Tape>& a, const std::shared_ptr<Tape>& b) {
  if (!a || !b || a == b) return a ? a : b;
  std::vector<std::shared_ptr<RecordedOperation>> both;
  std::ranges::merge(
      a->operations_, b->operations_, std::back_inserter(both),
      [](const auto& first, const auto& second) { return first->sequence < second->sequence; });
  a->operations_ = std::move(both);
  std::ranges::move(b->writable_, std::back_inserter(a->writable_));
  a->is_closed_ = a->is_closed_ || b->is_closed_;
  b->operations_.clear();
  b->writable_.clear();
  b->joined_with_ = a;
  return a;
}

void Tape::adopt(const at::Tensor& tensor, const std::shared_ptr<Tape>& tape,
                 const std::shared_ptr<RecordedOperation>& created_by) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  WithKeys::of(impl) = impl.key_set().add(c10::DispatchKey::DeferredInit);
  if (storage_of(tensor) != nullptr) return;
  c10::StorageImpl* const storage = storage_impl_of(tensor);
  auto kept = std::make_unique<DeferredStorage>();
  kept->tape = tape;
  kept->id = next_number();
  void* memory = nullptr;
  if (created_by) {
    kept->writable = std::make_shared<WritableBytes>();
    kept->writable->memory.resize(storage->nbytes());
    kept->writable->created_by = created_by;
    kept->writable->storage = storage;
    memory = kept->writable->memory.data();
    tape->writable_.push_back(kept->writable);
  }
  storage->set_data_ptr_noswap(
      at::DataPtr(memory, kept.release(), &delete_storage, at::Device(at::kMeta)));
  if (!created_by) {
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(kNoValues));
  }
}

DeferredStorage* Tape::storage_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_meta() || !tensor.has_storage()) return nullptr;
  return storage_impl_of(tensor)->_mutable_data_ptr_no_checks().cast_context<DeferredStorage>(
      &delete_storage);
}

void Tape::guard_memory(const at::Tensor& tensor, bool is_guarded) {
  const DeferredStorage* const deferred = storage_of(tensor);
  const bool is_writable = deferred->writable && !deferred->writable->created_by->bytes;
  c10::StorageImpl* const storage = storage_impl_of(tensor);
  if (is_guarded && !is_writable) {
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(kNoValues));
  } else {
    storage->clear_data_ptr_access_error_msg_();
  }
}

StoragePlace Tape::place_of(const at::Tensor& tensor) {
  return {.storage = storage_of(tensor)->id,
          .dtype = tensor.scalar_type(),
          .offset = tensor.storage_offset(),
          .sizes = tensor.sizes().vec(),
          .strides = tensor.strides().vec()};
}

void Tape::add(std::shared_ptr<RecordedOperation> operation) {
  operation->sequence = next_number();
  operations_.push_back(std::move(operation));
}

void Tape::take_bytes(WritableBytes& writable) {
  std::optional<RecordedOperation::Bytes>& bytes = writable.created_by->bytes;
  if (bytes) return;
  bytes = bytes_in(writable.memory);
  if (writable.storage != nullptr) {
    writable.storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(kNoValues));
  }
}

void Tape::end_direct_writes() {
  const auto writable = std::exchange(writable_, {});
  for (const auto& each : writable) take_bytes(*each);
  for (const auto& each : writable) {
    const bool is_changed = each->created_by->bytes->content != bytes_in(each->memory).content;
    // This frees the memory. A pointer to it that the program still has becomes invalid.
    if (each->storage != nullptr) {
      each->storage->_mutable_data_ptr_no_checks()
          .cast_context<DeferredStorage>(&delete_storage)
          ->writable.reset();
    }
    if (!is_changed) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "defer_init(): the memory of a small tensor made by empty() was written to through "
                "a pointer or an accessor after an operation on the tensor, and such a write is "
                "not recorded. Write before the tensor is used in operations, or make the tensor "
                "before defer_init()");
  }
}

c10::IValue map_tensors_in(const c10::IValue& value,
                           const std::function<at::Tensor(const at::Tensor&)>& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) mapped.push_back(map(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      mapped.push_back(tensor ? std::optional<at::Tensor>(map(*tensor)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

}  // namespace cadre
