#include "cadre/parallel/deferred/materialize.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/deferred/replay.h"
#include "cadre/parallel/deferred/tape.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/hooks/replica_check.h"

namespace cadre {

namespace {

// Deferred tensors of one tape, and their places in storages.
struct Deferred {
  std::vector<at::Tensor> tensors;
  std::vector<StoragePlace> places;

  void add(const at::Tensor& tensor) {
    tensors.push_back(tensor);
    places.push_back(Tape::place_of(tensor));
  }
};
using DeferredByTape = std::map<std::shared_ptr<Tape>, Deferred>;

bool is_on_meta(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_meta();
}

DeferredByTape deferred_among(std::string_view caller, std::span<const NamedTensor> tensors) {
  check_materializable(caller, tensors);
  DeferredByTape by_tape;
  for (const NamedTensor& named : tensors) {
    const at::Tensor& tensor = named.tensor;
    if (!is_on_meta(tensor)) continue;
    const DeferredStorage* const storage = Tape::storage_of(tensor);
    Deferred& deferred = by_tape[Tape::joined(storage->tape)];
    deferred.add(tensor);
    // The base of a view must get values, too, because a later operation in place on the view also
    // changes its base.
    if (!tensor.is_view()) continue;
    const at::Tensor base(tensor._base());
    if (Tape::storage_of(base) != nullptr) deferred.add(base);
  }
  return by_tape;
}

// Gives the tensor the memory, sizes and strides of `values`. Its autograd state does not change.
void give_values(const at::Tensor& tensor, const at::Tensor& values) {
  // The tensor has values already: it is in the list twice, for example as the base of a view.
  if (!tensor.is_meta()) return;
  tensor.unsafeGetTensorImpl()->shallow_copy_from(values.getIntrusivePtr());
  // Makes autograd drop a gradient accumulator that it has made for the meta device.
  tensor.set_data(values);
}

// Returns uninitialized tensors with the places of the deferred tensors, in new storages.
std::vector<at::Tensor> uninitialized(const Deferred& deferred) {
  std::map<StorageId, c10::Storage> storages;
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < deferred.places.size(); ++i) {
    const StoragePlace& place = deferred.places[i];
    const size_t num_bytes = deferred.tensors[i].storage().unsafeGetStorageImpl()->nbytes();
    auto found = storages.find(place.storage);
    if (found == storages.end()) {
      found = storages.emplace(place.storage, allocate_storage(num_bytes)).first;
    }
    tensors.push_back(tensor_at(found->second, place));
  }
  return tensors;
}

template <typename MakeValues>
void materialize_with(std::string_view caller, std::span<const NamedTensor> tensors,
                      const MakeValues& make_values) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard unrecorded(c10::DispatchKey::DeferredInit);
  // All values are computed before a tensor is changed, so that all tensors stay deferred if an
  // operation throws.
  const DeferredByTape by_tape = deferred_among(caller, tensors);
  std::vector<std::pair<const Deferred*, std::vector<at::Tensor>>> made;
  for (const auto& [tape, deferred] : by_tape) {
    tape->end_direct_writes();
    tape->close();
    made.emplace_back(&deferred, make_values(*tape, deferred));
  }
  for (const auto& [deferred, values] : made) {
    for (size_t i = 0; i < values.size(); ++i) give_values(deferred->tensors[i], values[i]);
  }
}

}  // namespace

void check_materializable(std::string_view caller, std::span<const NamedTensor> tensors) {
  for (const NamedTensor& named : tensors) {
    if (!is_on_meta(named.tensor) || Tape::storage_of(named.tensor) != nullptr) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        format("{}: \"{}\" is on the meta device, but was not made by defer_init(), so its values "
               "are not known. Construct the module inside cadre::defer_init(), without a device",
               caller, named.name));
  }
}

void materialize_tensors(std::string_view caller, std::span<const NamedTensor> tensors) {
  materialize_with(caller, tensors, [](const Tape& tape, const Deferred& deferred) {
    return replay(tape, deferred.places);
  });
}

void materialize_from(std::string_view caller, std::span<const NamedTensor> tensors, Rank root,
                      const wrap::LocatedGroup& group) {
  // Only the root runs the operations. If one throws there, all ranks throw its error.
  check_on_all_ranks(group.process_group(), "cadre::materialize", [&] {
    if (group.rank() == root) return materialize_tensors(caller, tensors);
    materialize_with(caller, tensors,
                     [](const Tape&, const Deferred& deferred) { return uninitialized(deferred); });
  });
  wrap::broadcast_tensors(tensors, root, group);
}

void move_tensors(std::span<const NamedTensor> tensors, c10::Device device) {
  struct Moved {
    c10::Storage from;  // keeps the address, by which it is found, in use
    at::Tensor bytes;
  };
  const at::NoGradGuard no_grad;
  std::map<const c10::StorageImpl*, Moved> moved;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.device() == device) continue;
    const c10::Storage& storage = tensor.storage();
    Moved& to = moved[storage.unsafeGetStorageImpl()];
    if (!to.bytes.defined()) {
      const auto num_bytes = static_cast<int64_t>(storage.nbytes());
      const at::TensorOptions bytes = at::TensorOptions().dtype(at::kByte);
      to.from = storage;
      to.bytes = at::empty({0}, bytes.device(tensor.device()))
                     .set_(storage, /*storage_offset=*/0, {num_bytes}, {1})
                     .to(device);
    }
    tensor.set_data(
        at::empty({0}, tensor.options().device(device).requires_grad(false))
            .set_(to.bytes.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides()));
  }
}

}  // namespace cadre
