// The operations that deferred tensors have gone through, in order.
//
// A tensor is recorded as a place in a storage: libtorch makes several tensors of one storage
// without an operation (set_data(), variable_data()), so a tensor's identity says nothing. An
// operation is recorded if it creates a storage or writes to one; a view is nothing but a place.
//
// Threads: one at a time. Blocking: never.
// Lifetime: every deferred storage keeps its tape; the tape keeps no storage. Errors: none.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace cadre {

using StorageId = uint64_t;

// The place of a tensor in a deferred storage.
struct Place {
  StorageId storage = 0;
  at::ScalarType dtype = at::kFloat;
  int64_t offset = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

struct RecordedOperation {
  struct Write {
    StorageId storage = 0;
    // The size of the storage, if the operation gives every byte a value that does not depend on
    // the old one; else nullopt.
    std::optional<size_t> whole_bytes = {};
  };

  uint64_t sequence = 0;
  c10::OperatorHandle handle;
  // The arguments, in which deferred tensors are undefined.
  std::vector<c10::IValue> arguments;
  // Has one entry for each tensor argument, in order; nullopt if that tensor is not deferred.
  std::vector<std::optional<Place>> inputs;
  // Has one entry for each tensor result, in order; nullopt unless the operation creates its
  // storage.
  std::vector<std::optional<Place>> created;
  std::vector<Write> writes;
  // The state of the generator before the operation; nullopt if the operation draws nothing.
  std::optional<at::Generator> generator = {};
  // The bytes that the program has written to a created storage before the next operation.
  struct Bytes {
    size_t size = 0;
    std::vector<std::byte> content = {};  // is empty if all bytes are zeros
  };
  std::optional<Bytes> bytes = {};
};

class Tape;

// Memory of a small tensor made by empty(), to which the program may write directly, as
// torch::tensor({...}) does, until an operation uses the tensor.
struct WritableBytes {
  std::vector<std::byte> memory;
  std::shared_ptr<RecordedOperation> created_by;
  c10::StorageImpl* storage = nullptr;  // null when the storage has been destroyed
};

// The state of a deferred storage.
struct DeferredStorage {
  std::shared_ptr<Tape> tape;
  StorageId id = 0;
  std::shared_ptr<WritableBytes> writable;
};

class Tape {
 public:
  // Returns the tape with which this one has been joined, or else this one.
  static std::shared_ptr<Tape> joined(std::shared_ptr<Tape> tape);
  // Joins the two tapes into one.
  static std::shared_ptr<Tape> join(const std::shared_ptr<Tape>& a, const std::shared_ptr<Tape>& b);

  // Makes the tensor a deferred one. created_by: the operation that made it, if the program may
  // write to its memory directly; else null.
  static void adopt(const at::Tensor& tensor, const std::shared_ptr<Tape>& tape,
                    const std::shared_ptr<RecordedOperation>& created_by);
  // Returns null for a tensor that is not deferred.
  static DeferredStorage* storage_of(const at::Tensor& tensor);
  static Place place_of(const at::Tensor& tensor);
  // Sets whether access to the memory of a deferred tensor throws. Memory that may be written never
  // throws.
  static void guard_memory(const at::Tensor& tensor, bool is_guarded);

  void add(std::shared_ptr<RecordedOperation> operation);
  const std::vector<std::shared_ptr<RecordedOperation>>& operations() const { return operations_; }

  // These functions end the direct writes: the bytes that were written until now are recorded. See
  // DeferredScope::finish().
  static void take_bytes(WritableBytes& writable);
  void end_direct_writes();

  // A closed tape records no more operations, because a tensor has been materialized.
  bool is_closed() const { return is_closed_; }
  void close() { is_closed_ = true; }

 private:
  std::vector<std::shared_ptr<RecordedOperation>> operations_;
  std::vector<std::shared_ptr<WritableBytes>> writable_;
  std::shared_ptr<Tape> joined_with_;
  bool is_closed_ = false;
};

// Returns the value with each of its tensors replaced; undefined ones are passed to `map`, too.
c10::IValue map_tensors_in(const c10::IValue& value,
                           const std::function<at::Tensor(const at::Tensor&)>& map);

}  // namespace cadre
