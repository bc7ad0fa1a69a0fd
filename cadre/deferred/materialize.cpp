#include "cadre/deferred/materialize.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/deferred/replay.h"
#include "cadre/deferred/tape.h"
#include "cadre/wrap/replica_check.h"

namespace cadre {

namespace {

// Deferred tensors and where they are, by tape.
struct Deferred {
  std::vector<at::Tensor> tensors;
  std::vector<Place> places;

  void add(const at::Tensor& tensor) {
    tensors.push_back(tensor);
    places.push_back(Tape::place_of(tensor));
  }
};
using DeferredByTape = std::map<std::shared_ptr<Tape>, Deferred>;

DeferredByTape deferred_among(std::string_view caller, std::span<const NamedTensor> tensors) {
  DeferredByTape by_tape;
  for (const NamedTensor& named : tensors) {
    const at::Tensor& tensor = named.tensor;
    if (!tensor.defined() || !tensor.is_meta()) continue;
    const DeferredStorage* const storage = Tape::storage_of(tensor);
    if (storage == nullptr) {
      throw Error(ErrorCode::kInvalidArgument,
                  format("{}: \"{}\" is on the meta device, and nothing says which values it shall "
                         "have. Construct the module inside cadre::defer_init(), without a device",
                         caller, named.name));
    }
    Deferred& deferred = by_tape[Tape::joined(storage->tape)];
    deferred.add(tensor);
    // What an operation in place on the view would reach.
    if (!tensor.is_view()) continue;
    const at::Tensor base(tensor._base());
    if (Tape::storage_of(base) != nullptr) deferred.add(base);
  }
  return by_tape;
}

// The tensor becomes `values`, but for what autograd knows about it.
void give_values(const at::Tensor& tensor, const at::Tensor& values) {
  if (!tensor.is_meta()) return;  // given already, as the base of a view or under another name
  tensor.unsafeGetTensorImpl()->shallow_copy_from(values.getIntrusivePtr());
  // Drops an accumulator of gradients that was made for the meta device.
  tensor.set_data(values);
}

// In each storage, memory without values.
std::vector<at::Tensor> uninitialized(const Deferred& deferred) {
  std::map<StorageId, c10::Storage> storages;
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < deferred.places.size(); ++i) {
    const Place& place = deferred.places[i];
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
  for (auto& [tape, deferred] : deferred_among(caller, tensors)) {
    tape->end_direct_writes();
    tape->close();
    const std::vector<at::Tensor> values = make_values(*tape, deferred);
    for (size_t i = 0; i < values.size(); ++i) give_values(deferred.tensors[i], values[i]);
  }
}

}  // namespace

void materialize_tensors(std::string_view caller, std::span<const NamedTensor> tensors) {
  materialize_with(caller, tensors, [](const Tape& tape, const Deferred& deferred) {
    return replay(tape, deferred.places);
  });
}

void materialize_from(std::string_view caller, std::span<const NamedTensor> tensors, Rank root,
                      const wrap::LocatedGroup& group) {
  if (group.rank() == root) {
    materialize_tensors(caller, tensors);
  } else {
    materialize_with(caller, tensors,
                     [](const Tape&, const Deferred& deferred) { return uninitialized(deferred); });
  }
  wrap::broadcast_tensors(tensors, root, group);
}

}  // namespace cadre
