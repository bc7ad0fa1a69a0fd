// Stores the recorded operations on deferred tensors, in order.
//
// A tensor is recorded as a place in a storage and not by its identity, because libtorch makes
// further tensors of a storage without an operation (set_data(), variable_data()). An operation is
// recorded if it creates a storage or writes to one. A view needs no recorded operation: it is only
// another place.
//
// Threads: one at a time. Lifetime: each deferred storage keeps its tape alive; the tape keeps no
// storage alive.
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

// Describes where a tensor lies in a deferred storage.
struct StoragePlace {
  StorageId storage = 0;
  at::ScalarType dtype = at::kFloat;
  int64_t offset = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

struct RecordedOperation {
  struct Write {
    StorageId storage = 0;
    // The size of the storage if the operation overwrites all of it without reading it; else
    // nullopt.
    std::optional<size_t> whole_bytes = {};
  };

  uint64_t sequence = 0;
  c10::OperatorHandle handle;
  // The arguments; deferred tensors are replaced by undefined ones.
  std::vector<c10::IValue> arguments;
  // The place of each tensor argument, in order; nullopt if the tensor is not deferred.
  std::vector<std::optional<StoragePlace>> inputs;
  // The place of each tensor result, in order; nullopt unless the operation creates the storage of
  // that result.
  std::vector<std::optional<StoragePlace>> created;
  std::vector<Write> writes;
  // The state of the generator before the operation; nullopt if the operation draws no random
  // numbers.
  std::optional<at::Generator> generator = {};
  // The bytes that the program has written directly to the storage that the operation created,
  // before the next operation on it.
  struct Bytes {
    size_t size = 0;
    std::vector<std::byte> content = {};  // empty if all bytes are 0
  };
  std::optional<Bytes> bytes = {};
};

class Tape;

// The memory of a small tensor made by empty(). Until an operation uses the tensor, the program may
// write to this memory through a pointer, as torch::tensor({...}) does.
struct WritableBytes {
  std::vector<std::byte> memory;
  std::shared_ptr<RecordedOperation> created_by;
  c10::StorageImpl* storage = nullptr;  // null if the storage has been destroyed
};

// What is stored in the context of a deferred storage's DataPtr.
struct DeferredStorage {
  std::shared_ptr<Tape> tape;
  StorageId id = 0;
  std::shared_ptr<WritableBytes> writable;
};

class Tape {
 public:
  // Returns the tape into which `tape` has been joined; `tape` itself if it has not been joined.
  static std::shared_ptr<Tape> joined(std::shared_ptr<Tape> tape);
  // Joins two tapes into one, when an operation uses tensors of both.
  static std::shared_ptr<Tape> join(const std::shared_ptr<Tape>& a, const std::shared_ptr<Tape>& b);

  // Makes a meta tensor a deferred tensor of this tape. created_by: the operation that made it, if
  // the program may write directly to its memory; else null.
  static void adopt(const at::Tensor& tensor, const std::shared_ptr<Tape>& tape,
                    const std::shared_ptr<RecordedOperation>& created_by);
  // Returns the state of the tensor's storage; null for a tensor that is not deferred.
  static DeferredStorage* storage_of(const at::Tensor& tensor);
  static StoragePlace place_of(const at::Tensor& tensor);
  // Sets whether an access to the memory of a deferred tensor throws. If the program may still
  // write directly to the memory, an access never throws.
  static void guard_memory(const at::Tensor& tensor, bool is_guarded);

  void add(std::shared_ptr<RecordedOperation> operation);
  const std::vector<std::shared_ptr<RecordedOperation>>& operations() const { return operations_; }

  // Record the bytes that the program has written directly to memory until now, and forbid further
  // direct writes: take_bytes() for one storage, end_direct_writes() for all of this tape.
  static void take_bytes(WritableBytes& writable);
  void end_direct_writes();

  // A tape is closed when one of its tensors is materialized. It then records no more operations.
  bool is_closed() const { return is_closed_; }
  void close() { is_closed_ = true; }

 private:
  std::vector<std::shared_ptr<RecordedOperation>> operations_;
  std::vector<std::shared_ptr<WritableBytes>> writable_;
  std::shared_ptr<Tape> joined_with_;
  bool is_closed_ = false;
};

// Returns a copy of the value in which each tensor is replaced by map(tensor), also undefined
// tensors.
c10::IValue map_tensors_in(const c10::IValue& value,
                           const std::function<at::Tensor(const at::Tensor&)>& map);

}  // namespace cadre
