#include "cadre/wrap/replica_check.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/base/fnv1a.h"
#include "cadre/base/format.h"
#include "cadre/wrap/shard_mark.h"

namespace cadre::wrap {

namespace {

constexpr int64_t kBroadcastChunkBytes = int64_t{64} << 20;
// Tensors of at least this size are broadcast in place, without a copy.
constexpr size_t kLargeTensorBytes = size_t{1} << 20;

// One line for each tensor: what kind, its name, then what must agree.
std::string describe(const ReplicaTensors& tensors) {
  std::string text;
  const auto add = [&text](std::string_view kind, const NamedTensor& named) {
    const at::Tensor& tensor = named.tensor;
    const ShardMark* const mark = shard_mark_of(tensor);
    text += format("{} \"{}\"\t{} {}{}{}{}\n", kind, named.name,
                   c10::toString(tensor.scalar_type()), list_of(tensor.sizes()),
                   tensor.is_contiguous() ? "" : " with strides " + list_of(tensor.strides()),
                   tensor.requires_grad() ? " that requires grad" : "",
                   mark == nullptr ? "" : format(", shard {} ({})", mark->rank, mark->owner));
  };
  for (const NamedTensor& named : tensors.parameters) add("parameter", named);
  for (const NamedTensor& named : tensors.buffers) add("buffer", named);
  return text;
}

bool has_shards(std::span<const NamedTensor> tensors) {
  return std::ranges::any_of(
      tensors, [](const NamedTensor& named) { return shard_mark_of(named.tensor) != nullptr; });
}

uint64_t hash_of(std::string_view text) {
  Fnv1a hash;
  hash.add(text);
  return hash.value();
}

std::string broadcast_text(const std::string& own, int64_t size, Rank root,
                           const LocatedGroup& group) {
  const at::Tensor bytes = at::empty({size}, at::kByte);
  if (group.rank() == root) std::memcpy(bytes.mutable_data_ptr(), own.data(), own.size());
  group.broadcast(bytes, root);
  return std::string(static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(size));
}

std::string_view take_line(std::string_view& text) {
  const size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return line;
}

// "parameter "fc.weight" is Float (4, 3) on rank 0 but Float (4, 5) on rank 2".
std::string first_difference(std::string_view zero, std::string_view other, int other_rank) {
  while (true) {
    const std::string_view a = take_line(zero);
    const std::string_view b = take_line(other);
    if (a == b) continue;
    const std::string_view a_name = a.substr(0, a.find('\t'));
    const std::string_view b_name = b.substr(0, b.find('\t'));
    if (a_name == b_name) {
      return format("{} is {} on rank 0 but {} on rank {}", a_name, a.substr(a_name.size() + 1),
                    b.substr(b_name.size() + 1), other_rank);
    }
    return format("rank 0 has {} where rank {} has {}", a.empty() ? "nothing more" : a_name,
                  other_rank, b.empty() ? "nothing more" : b_name);
  }
}

}  // namespace

uint64_t check_replicas_match(std::string_view wrapper, const ReplicaTensors& tensors,
                              const LocatedGroup& group) {
  const uint64_t number = group.process_group().communicator().num_collectives();
  const std::string own = describe(tensors);
  const at::Tensor mine = at::empty({2}, at::kLong);
  mine.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(hash_of(own));
  mine.mutable_data_ptr<int64_t>()[1] = static_cast<int64_t>(own.size());
  const at::Tensor gathered = at::empty({2 * group.world_size()}, at::kLong);
  group.all_gather(gathered, mine);
  const int64_t* all = gathered.const_data_ptr<int64_t>();
  int differing = 1;
  while (differing < group.world_size() && all[2 * differing] == all[0] &&
         all[2 * differing + 1] == all[1]) {
    ++differing;
  }
  // The ranks compare the numbers of operations, so the others have the same number.
  if (differing >= group.world_size()) return number;
  const std::string zero = broadcast_text(own, all[1], 0, group);
  const std::string other = broadcast_text(own, all[2 * differing + 1], differing, group);
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: the models differ: {}. Build the same model on all ranks{}", wrapper,
                     first_difference(zero, other, differing),
                     has_shards(tensors.parameters)
                         ? ", in a group of ranks that hold the same shards of its parameters"
                         : ""));
}

namespace {

bool is_sent_in_place(const at::Tensor& tensor) {
  return tensor.is_contiguous() && tensor.nbytes() >= kLargeTensorBytes;
}

void broadcast_packed(std::span<const NamedTensor> tensors, Rank root, const LocatedGroup& group) {
  const bool is_root = group.rank() == root;
  size_t first = 0;
  while (first < tensors.size()) {
    int64_t num_bytes = static_cast<int64_t>(tensors[first].tensor.nbytes());
    size_t end = first + 1;
    while (end < tensors.size() &&
           num_bytes + static_cast<int64_t>(tensors[end].tensor.nbytes()) <= kBroadcastChunkBytes) {
      num_bytes += static_cast<int64_t>(tensors[end++].tensor.nbytes());
    }
    const at::Tensor packed = at::empty({num_bytes}, at::kByte);
    std::byte* at_byte = static_cast<std::byte*>(packed.mutable_data_ptr());
    const auto walk = [&](auto&& visit) {
      std::byte* position = at_byte;
      for (size_t i = first; i < end; ++i) {
        const at::Tensor tensor = tensors[i].tensor.detach();
        visit(tensor, position);
        position += tensor.nbytes();
      }
    };
    if (is_root) {
      walk([](const at::Tensor& tensor, std::byte* position) {
        const at::Tensor contiguous = tensor.contiguous();
        std::memcpy(position, contiguous.const_data_ptr(), contiguous.nbytes());
      });
    }
    group.broadcast(packed, root);
    if (!is_root) {
      // Written below autograd: a buffer that an earlier forward saved keeps its version, since its
      // backward does not read the running values.
      walk([](const at::Tensor& tensor, const std::byte* position) {
        if (tensor.is_contiguous()) {
          std::memcpy(tensor.mutable_data_ptr(), position, tensor.nbytes());
          return;
        }
        const at::Tensor values = at::empty(tensor.sizes(), tensor.options());
        std::memcpy(values.mutable_data_ptr(), position, values.nbytes());
        tensor.copy_(values);
      });
    }
    first = end;
  }
}

}  // namespace

void broadcast_tensors(std::span<const NamedTensor> tensors, Rank root, const LocatedGroup& group) {
  const at::NoGradGuard no_grad;
  std::vector<NamedTensor> packed;
  for (const NamedTensor& named : tensors) {
    if (is_sent_in_place(named.tensor)) {
      group.broadcast(named.tensor.detach().view(-1).view(at::kByte), root);
    } else {
      packed.push_back(named);
    }
  }
  broadcast_packed(packed, root, group);
}

}  // namespace cadre::wrap
