#include "cadre/tensor/hooks/replica_check.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/hooks/device_check.h"
#include "cadre/tensor/hooks/shard_mark.h"
#include "cadre/tensor/hooks/tensor_version.h"

namespace cadre::wrap {

namespace {

constexpr int64_t kBroadcastChunkBytes = int64_t{64} << 20;
// Tensors of at least this size are broadcast one by one. Smaller ones are packed together.
constexpr size_t kLargeTensorBytes = size_t{1} << 20;

// Returns the type of the device that has the tensor's values; "" for the CPU. Ranks may construct
// a module on the CPU or on the meta device.
std::string place_text(const at::Tensor& tensor) {
  if (tensor.is_cpu() || tensor.is_meta()) return "";
  return format(" on {}", c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true));
}

// Returns for each tensor the properties that must be equal on all ranks.
std::vector<AgreedField> fields_of(const ReplicaTensors& tensors) {
  std::vector<AgreedField> fields;
  const auto add = [&fields](std::string_view kind, const NamedTensor& named) {
    const at::Tensor& tensor = named.tensor;
    const ShardMark* const mark = shard_mark_of(tensor);
    fields.push_back(
        {format("{} \"{}\"", kind, named.name),
         format("{} {}{}{}{}{}", c10::toString(tensor.scalar_type()), list_of(tensor.sizes()),
                place_text(tensor),
                tensor.is_contiguous() ? "" : " with strides " + list_of(tensor.strides()),
                tensor.requires_grad() ? " that requires grad" : "",
                mark == nullptr ? "" : format(", shard {} ({})", mark->rank, mark->owner))});
  };
  for (const NamedTensor& named : tensors.parameters) add("parameter", named);
  for (const NamedTensor& named : tensors.buffers) add("buffer", named);
  return fields;
}

bool has_shards(std::span<const NamedTensor> tensors) {
  return std::ranges::any_of(
      tensors, [](const NamedTensor& named) { return shard_mark_of(named.tensor) != nullptr; });
}

}  // namespace

void check_replicas_match(const char* wrapper, const ReplicaTensors& tensors,
                          const LocatedGroup& group) {
  check_equal_on_all_ranks(
      group.process_group(), wrapper, [&] { return fields_of(tensors); },
      has_shards(tensors.parameters)
          ? "build the same model on all ranks, in a group of ranks that "
            "hold the same shards of its parameters"
          : "build the same model on all ranks");
}

namespace {

bool is_sent_in_place(const at::Tensor& tensor) {
  return tensor.is_contiguous() && tensor.nbytes() >= kLargeTensorBytes;
}

// A tensor without elements has a null pointer, which memcmp() and memcpy() do not accept even for
// 0 bytes, and std::equal() and std::copy_n() do.
bool has_bytes(const at::Tensor& tensor, const void* bytes) {
  const at::Tensor contiguous = tensor.contiguous();
  const auto* const own = static_cast<const char*>(contiguous.const_data_ptr());
  return std::equal(own, own + contiguous.nbytes(), static_cast<const char*>(bytes));
}

// Writes `bytes`, the elements in their logical order, to the tensor.
void write_bytes(const at::Tensor& tensor, const std::byte* bytes) {
  if (tensor.is_contiguous()) {
    std::copy_n(bytes, tensor.nbytes(), static_cast<std::byte*>(tensor.mutable_data_ptr()));
    return;
  }
  const at::Tensor values = at::empty(tensor.sizes(), tensor.options());
  std::copy_n(bytes, values.nbytes(), static_cast<std::byte*>(values.mutable_data_ptr()));
  tensor.variable_data().copy_(values);  // does not increment the tensor's version counter
}

// Writes the values that the root has sent. Marks a tensor as changed for autograd if
// moves_version(its index) says so.
class ReceivedValues {
 public:
  ReceivedValues(std::span<const NamedTensor> tensors,
                 const std::function<bool(size_t)>& moves_version)
      : tensors_(tensors), moves_version_(moves_version) {}

  void write(size_t place, const std::byte* bytes) const {
    const at::Tensor& tensor = tensors_[place].tensor;
    if (has_bytes(tensor, bytes)) return;
    const bool moves = moves_version_(place);
    write_bytes(tensor.detach(), bytes);
    if (moves) move_version(tensor);
  }

 private:
  std::span<const NamedTensor> tensors_;
  const std::function<bool(size_t)>& moves_version_;
};

// Packs small tensors into messages of limited size and broadcasts these. `places`: the indices of
// the small tensors.
void broadcast_packed(std::span<const NamedTensor> tensors, std::span<const size_t> places,
                      Rank root, const LocatedGroup& group, const ReceivedValues& received) {
  const auto bytes_of = [&](size_t i) {
    return static_cast<int64_t>(tensors[places[i]].tensor.nbytes());
  };
  size_t first = 0;
  while (first < places.size()) {
    int64_t num_bytes = bytes_of(first);
    size_t end = first + 1;
    while (end < places.size() && num_bytes + bytes_of(end) <= kBroadcastChunkBytes) {
      num_bytes += bytes_of(end++);
    }
    const at::Tensor packed = at::empty({num_bytes}, at::kByte);
    const auto walk = [&](auto&& visit) {
      std::byte* position = static_cast<std::byte*>(packed.mutable_data_ptr());
      for (size_t i = first; i < end; ++i) {
        visit(places[i], position);
        position += bytes_of(i);
      }
    };
    const bool is_root = group.rank() == root;
    if (is_root) {
      walk([&](size_t place, std::byte* position) {
        const at::Tensor contiguous = tensors[place].tensor.detach().contiguous();
        std::copy_n(static_cast<const std::byte*>(contiguous.const_data_ptr()), contiguous.nbytes(),
                    position);
      });
    }
    group.broadcast(packed, root);
    if (!is_root) {
      walk([&](size_t place, const std::byte* position) { received.write(place, position); });
    }
    first = end;
  }
}

// A tensor that is broadcast alone. With `apart` it is received into a temporary buffer first, so
// that a tensor whose values are already equal is not written.
struct LargeTensor {
  size_t place;
  bool apart;
};

void broadcast_large(std::span<const NamedTensor> tensors, const LargeTensor& large, Rank root,
                     const LocatedGroup& group, const ReceivedValues& received) {
  const at::Tensor bytes = tensors[large.place].tensor.detach().view(-1).view(at::kByte);
  if (!large.apart || group.rank() == root) {
    group.broadcast(bytes, root);
    return;
  }
  const at::Tensor apart = at::empty_like(bytes);
  group.broadcast(apart, root);
  received.write(large.place, static_cast<const std::byte*>(apart.const_data_ptr()));
}

at::Tensor as_bytes(const at::Tensor& contiguous) {
  return contiguous.detach().view(-1).view(at::kByte);
}

// What a rank does whose device has no memory for a broadcast. An agreement costs an exchange, so
// only constructors make it; a broadcast in a step needs the memory that one before it has freed.
enum class MissingMemory { kThrowsOnAllRanks, kThrowsHere };

// Packs the tensors on a device, those at `places`, into messages of limited size, and broadcasts
// these. The host reads no values, because it would have to wait for the device; so a tensor is
// written, and counts as changed, also if its values are equal.
void broadcast_on_device(std::span<const NamedTensor> tensors, std::span<const size_t> places,
                         Rank root, const LocatedGroup& group,
                         const std::function<bool(size_t)>& moves_version, MissingMemory missing) {
  const auto tensor_at = [&](size_t i) -> const at::Tensor& { return tensors[places[i]].tensor; };
  const bool is_root = group.rank() == root;
  size_t first = 0;
  while (first < places.size()) {
    size_t end = first;
    int64_t num_bytes = 0;
    do {
      num_bytes += static_cast<int64_t>(tensor_at(end++).nbytes());
    } while (end < places.size() &&
             num_bytes + static_cast<int64_t>(tensor_at(end).nbytes()) <= kBroadcastChunkBytes);
    const c10::Device device = tensor_at(first).device();
    at::Tensor packed;
    std::vector<at::Tensor> received;
    const auto allocate = [&] {
      std::vector<at::Tensor> parts;
      for (size_t i = first; i < end; ++i) {
        const at::Tensor& tensor = tensor_at(i);
        if (is_root) {
          parts.push_back(as_bytes(tensor.detach().contiguous()));
        } else {
          received.push_back(at::empty(tensor.sizes(), tensor.options().requires_grad(false)));
        }
      }
      packed = is_root ? at::cat(parts)
                       : at::empty({num_bytes}, at::TensorOptions(at::kByte).device(device));
    };
    if (missing == MissingMemory::kThrowsOnAllRanks) {
      make_on_all_ranks(group.process_group(), "a broadcast to devices", device, allocate);
    } else {
      allocate();
    }
    group.broadcast(packed, root);
    int64_t offset = 0;
    for (size_t i = 0; i < received.size(); ++i) {
      const at::Tensor& tensor = tensor_at(first + i);
      const auto size = static_cast<int64_t>(tensor.nbytes());
      as_bytes(received[i]).copy_(packed.narrow(0, offset, size));
      tensor.variable_data().copy_(received[i]);  // does not increment the version counter
      if (moves_version(places[first + i])) move_version(tensor);
      offset += size;
    }
    first = end;
  }
}

// The indices of tensors by the way in which they are broadcast, which is equal on all ranks.
// Tensors of the CPU come first, because the program may say in one of them what the others are.
struct Ways {
  explicit Ways(std::span<const NamedTensor> tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& tensor = tensors[i].tensor;
      (!tensor.is_cpu() ? on_device : is_sent_in_place(tensor) ? large : packed).push_back(i);
    }
  }

  std::vector<size_t> packed;
  std::vector<size_t> large;
  std::vector<size_t> on_device;
};

uint64_t digest_of(const at::Tensor& tensor) {
  const at::Tensor contiguous = tensor.detach().to(at::kCPU).contiguous();
  const auto* bytes = static_cast<const std::byte*>(contiguous.const_data_ptr());
  Fnv1a digest;
  size_t begin = 0;
  for (; begin + sizeof(uint64_t) <= contiguous.nbytes(); begin += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + begin, sizeof(word));
    digest.add(word);
    digest.add(word >> 32);  // multiplication alone would hide differences in high bits
  }
  for (; begin < contiguous.nbytes(); ++begin) digest.add(static_cast<uint64_t>(bytes[begin]));
  return digest.value();
}

}  // namespace

void broadcast_tensors(std::span<const NamedTensor> tensors, Rank root, const LocatedGroup& group,
                       const std::function<bool(size_t)>& moves_version) {
  const at::NoGradGuard no_grad;
  const ReceivedValues received(tensors, moves_version);
  const Ways ways(tensors);
  broadcast_packed(tensors, ways.packed, root, group, received);
  for (const size_t place : ways.large) {
    broadcast_large(tensors, {.place = place, .apart = moves_version(place)}, root, group,
                    received);
  }
  broadcast_on_device(tensors, ways.on_device, root, group, moves_version,
                      MissingMemory::kThrowsHere);
}

void broadcast_tensors(std::span<const NamedTensor> tensors, Rank root, const LocatedGroup& group) {
  const at::NoGradGuard no_grad;
  const std::function<bool(size_t)> always = [](size_t) { return true; };
  const ReceivedValues received(tensors, always);
  const Ways ways(tensors);
  for (const size_t place : ways.large) {
    broadcast_large(tensors, {.place = place, .apart = false}, root, group, received);
    if (group.rank() != root) move_version(tensors[place].tensor);
  }
  broadcast_packed(tensors, ways.packed, root, group, received);
  broadcast_on_device(tensors, ways.on_device, root, group, always,
                      MissingMemory::kThrowsOnAllRanks);
}

std::optional<UnlikeTensor> first_unlike(std::span<const at::Tensor> tensors,
                                         const LocatedGroup& group) {
  if (tensors.empty()) return std::nullopt;
  const auto count = static_cast<int64_t>(tensors.size());
  const at::Tensor own = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    own.mutable_data_ptr<int64_t>()[i] =
        static_cast<int64_t>(digest_of(tensors[static_cast<size_t>(i)]));
  }
  const at::Tensor gathered = at::empty({count * group.world_size()}, at::kLong);
  group.all_gather(gathered, own);
  const int64_t* const all = gathered.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    for (int rank = 1; rank < group.world_size(); ++rank) {
      if (all[rank * count + i] == all[i]) continue;
      return UnlikeTensor{.place = static_cast<size_t>(i), .rank = rank};
    }
  }
  return std::nullopt;
}

}  // namespace cadre::wrap
