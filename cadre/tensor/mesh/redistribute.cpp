#include "cadre/tensor/mesh/redistribute.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <string>
#include <utility>

#include "cadre/tensor/group/operands/tensor_checks.h"
#include "cadre/tensor/mesh/layout.h"

namespace cadre {
namespace {

std::vector<int64_t> offsets_within(const Box& part, const Box& whole) {
  std::vector<int64_t> offsets;
  for (size_t dim = 0; dim < part.offsets.size(); ++dim) {
    offsets.push_back(part.offsets[dim] - whole.offsets[dim]);
  }
  return offsets;
}

// Returns a view of the box `part` inside `tensor`, which holds the elements of the box `whole`.
at::Tensor part_of(const at::Tensor& tensor, const Box& whole, const Box& part) {
  const std::vector<int64_t> offsets = offsets_within(part, whole);
  at::Tensor view = tensor;
  for (size_t dim = 0; dim < offsets.size(); ++dim) {
    view = view.narrow(static_cast<int64_t>(dim), offsets[dim], part.sizes[dim]);
  }
  return view;
}

// Returns the tensor with zeros appended along dimension 0 up to the length.
at::Tensor padded(const at::Tensor& tensor, int64_t length) {
  if (tensor.size(0) == length) return tensor.contiguous();
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[0] = length - tensor.size(0);
  return at::cat({tensor, at::zeros(sizes, tensor.options())});
}

// Runs one redistribution step by step. After each step tensor_ is this rank's part under the
// layout now_.
class Passage {
 public:
  Passage(const Redistribution& move, const at::Tensor& local)
      : mesh_(move.mesh),
        sizes_(move.sizes),
        now_(mesh_.shape(), move.from, sizes_.size()),
        target_(mesh_.shape(), move.to, sizes_.size()),
        tensor_(local) {}

  // Slicing comes first, because less data remains to be reduced then. Reductions come before
  // exchanges, because a reduce_scatter already leaves a shard, which needs no further exchange.
  at::Tensor run() {
    cut_replicated();
    reduce_partials();
    exchange();
    leave_operands();
    return tensor_;
  }

 private:
  struct Member {
    std::vector<int> coordinates;
    Box before;  // the box that the member holds before the exchange
    Box after;   // the box that it must hold after it
  };

  Box box(const PlacementLayout& layout) const {
    return layout.box_of(sizes_, mesh_.coordinates());
  }
  const ProcessGroup& group_of(std::span<const size_t> axes) const;
  const ProcessGroup& group_of(size_t axis) const { return group_of(std::span(&axis, 1)); }
  bool is_to_be_reduced(size_t axis) const {
    return now_.partial(axis) && now_.partial(axis) != target_.partial(axis);
  }

  void cut_replicated();
  void cut(size_t dim, size_t axis);
  void reduce_partials();
  void all_reduce(size_t axis);
  void reduce_scatter(size_t axis, size_t dim);
  void exchange();
  std::vector<Member> members_of(const std::vector<size_t>& axes) const;
  void all_gather(const std::vector<size_t>& axes, const std::vector<Member>& members,
                  int64_t longest);
  void all_to_all(const std::vector<size_t>& axes, const std::vector<Member>& members);
  void leave_operands();

  const DeviceMesh& mesh_;
  const std::vector<int64_t>& sizes_;
  PlacementLayout now_;
  const PlacementLayout target_;
  at::Tensor tensor_;
};

const ProcessGroup& Passage::group_of(std::span<const size_t> axes) const {
  if (axes.size() == 1) return mesh_.group(mesh_.axes()[axes.front()].name);
  std::vector<std::string> names;
  for (const size_t axis : axes) names.push_back(mesh_.axes()[axis].name);
  return mesh_.joint_group(names);
}

void Passage::cut(size_t dim, size_t axis) {
  const auto d = static_cast<int64_t>(dim);
  const Chunk chunk = chunk_of(tensor_.size(d), now_.axis_size(axis), mesh_.coordinates()[axis]);
  tensor_ = tensor_.narrow(d, chunk.begin, chunk.size);
  now_.add_shard(dim, axis);
}

void Passage::cut_replicated() {
  for (size_t dim = 0; dim < sizes_.size(); ++dim) {
    while (const auto axis = now_.next_shard(dim, target_)) {
      if (!now_.is_replicated(*axis)) break;
      cut(dim, *axis);
    }
  }
}

void Passage::reduce_partials() {
  for (size_t axis = 0; axis < mesh_.shape().size(); ++axis) {
    if (!is_to_be_reduced(axis)) continue;
    size_t dim = 0;
    const auto divides = [&](size_t d) {
      return std::ranges::find(target_.shards(d), axis) != target_.shards(d).end();
    };
    while (dim < sizes_.size() && !divides(dim)) ++dim;
    if (dim < sizes_.size()) {
      reduce_scatter(axis, dim);
      cut_replicated();
    } else {
      all_reduce(axis);
    }
  }
}

void Passage::all_reduce(size_t axis) {
  const ReduceOp op = *now_.partial(axis);
  now_.set_partial(axis, std::nullopt);
  if (now_.axis_size(axis) == 1 || tensor_.numel() == 0) return;
  tensor_ = tensor_.clone(at::MemoryFormat::Contiguous);
  group_of(axis).all_reduce(tensor_, {.op = op});
}

// All members of the group hold operands of the same box, so they take the same branch below and
// run the same collective.
void Passage::reduce_scatter(size_t axis, size_t dim) {
  const auto d = static_cast<int64_t>(dim);
  const int num_ranks = now_.axis_size(axis);
  const int64_t size = tensor_.size(d);
  const int64_t chunk = full_chunk(size, num_ranks);
  // An all_reduce moves as many elements as two reduce_scatters, but needs no padding, so it is
  // cheaper if there would be much padding.
  if (tensor_.numel() == 0 || chunk * num_ranks > 2 * size) {
    all_reduce(axis);
    cut(dim, axis);
    return;
  }
  const ReduceOp op = *now_.partial(axis);
  const at::Tensor input = padded(tensor_.movedim(d, 0), chunk * num_ranks).contiguous();
  std::vector<int64_t> part = input.sizes().vec();
  part[0] = chunk;
  const at::Tensor output = at::empty(part, input.options());
  group_of(axis).reduce_scatter(output, input, {.op = op});
  const Chunk mine = chunk_of(size, num_ranks, mesh_.coordinates()[axis]);
  tensor_ = output.narrow(0, 0, mine.size).movedim(0, d);
  now_.add_shard(dim, axis);
}

void Passage::exchange() {
  const std::vector<size_t> axes = now_.involved_axes(target_);
  if (axes.empty()) return;
  const std::vector<Member> members = members_of(axes);
  int64_t longest = 0;
  int64_t total = 0;
  for (const Member& member : members) {
    longest = std::max(longest, member.before.numel());
    total += member.before.numel();
  }
  const auto is_in_parts = [](const PlacementLayout& layout) {
    return [&layout](size_t axis) { return layout.is_sharded(axis); };
  };
  const bool all_need_all = std::ranges::all_of(axes, is_in_parts(now_)) &&
                            std::ranges::none_of(axes, is_in_parts(target_));
  const int64_t padding = longest * static_cast<int64_t>(members.size()) - total;
  if (total == 0) {
    tensor_ = at::empty(box(target_).sizes, tensor_.options());
  } else if (all_need_all && padding <= total / 8) {
    all_gather(axes, members, longest);
  } else {
    all_to_all(axes, members);
  }
}

// Returns the ranks of the group along these axes, each with its box before and after the exchange.
std::vector<Passage::Member> Passage::members_of(const std::vector<size_t>& axes) const {
  int count = 1;
  for (const size_t axis : axes) count *= now_.axis_size(axis);
  std::vector<Member> members;
  for (int rank = 0; rank < count; ++rank) {
    std::vector<int> coordinates = mesh_.coordinates();
    int rest = rank;
    for (size_t i = axes.size(); i-- > 0;) {
      coordinates[axes[i]] = rest % now_.axis_size(axes[i]);
      rest /= now_.axis_size(axes[i]);
    }
    const Box before = now_.box_of(sizes_, coordinates);
    const Box after = target_.box_of(sizes_, coordinates);
    members.push_back({std::move(coordinates), before, after});
  }
  return members;
}

void Passage::all_gather(const std::vector<size_t>& axes, const std::vector<Member>& members,
                         int64_t longest) {
  const auto count = static_cast<int64_t>(members.size());
  const at::Tensor parts = at::empty({count * longest}, tensor_.options());
  group_of(axes).all_gather(parts, padded(tensor_.reshape({-1}), longest));
  const Box whole = box(target_);
  // If dimension 0 was divided, only the last non-empty chunk may be shorter than the others. So
  // the gathered chunks already form the result without a copy.
  if (axes.size() == 1 && now_.shards(0).size() > target_.shards(0).size()) {
    tensor_ = parts.narrow(0, 0, whole.numel()).view(whole.sizes);
    return;
  }
  tensor_ = at::empty(whole.sizes, parts.options());
  for (int64_t rank = 0; rank < count; ++rank) {
    const Box& part = members[static_cast<size_t>(rank)].before;
    part_of(tensor_, whole, part)
        .copy_(parts.narrow(0, rank * longest, part.numel()).view(part.sizes));
  }
}

// Sends each rank the intersection of this rank's old box and that rank's new box. If several ranks
// hold an element because the tensor is replicated along an axis, a rank receives it from the one
// with its own coordinate along that axis.
void Passage::all_to_all(const std::vector<size_t>& axes, const std::vector<Member>& members) {
  const ProcessGroup& group = group_of(axes);
  const auto self = static_cast<size_t>(group.rank());
  const auto piece = [&](size_t source, size_t destination) {
    const Member& giver = members[source];
    const Member& taker = members[destination];
    const bool is_chosen = std::ranges::all_of(axes, [&](size_t axis) {
      return now_.is_sharded(axis) || giver.coordinates[axis] == taker.coordinates[axis];
    });
    Box part = intersection(giver.before, taker.after);
    if (!is_chosen) part.sizes.assign(part.sizes.size(), 0);
    return part;
  };
  const Box before = members[self].before;
  const Box after = members[self].after;
  AllToAllOptions options;
  std::vector<at::Tensor> sent = {at::empty({0}, tensor_.options())};
  int64_t num_received = 0;
  for (size_t rank = 0; rank < members.size(); ++rank) {
    const Box outgoing = piece(self, rank);
    const Box incoming = piece(rank, self);
    const bool is_self = rank == self;  // not sent, but copied below
    options.input_split_sizes.push_back(is_self ? 0 : outgoing.numel());
    options.output_split_sizes.push_back(is_self ? 0 : incoming.numel());
    num_received += options.output_split_sizes.back();
    if (options.input_split_sizes.back() > 0) {
      sent.push_back(part_of(tensor_, before, outgoing).reshape({-1}));
    }
  }
  const at::Tensor received = at::empty({num_received}, tensor_.options());
  group.all_to_all(received, at::cat(sent), options);
  const at::Tensor result = at::empty(after.sizes, tensor_.options());
  int64_t begin = 0;
  for (size_t rank = 0; rank < members.size(); ++rank) {
    const Box part = piece(rank, self);
    if (part.numel() == 0) continue;
    const at::Tensor place = part_of(result, after, part);
    if (rank == self) {
      place.copy_(part_of(tensor_, before, part));
      continue;
    }
    place.copy_(received.narrow(0, begin, part.numel()).view(part.sizes));
    begin += part.numel();
  }
  tensor_ = result;
}

// Makes the axes that are Partial in the target partial: replaces the value, which every rank
// holds, by operands whose reduction is that value.
void Passage::leave_operands() {
  for (size_t axis = 0; axis < mesh_.shape().size(); ++axis) {
    const std::optional<ReduceOp>& op = target_.partial(axis);
    // An axis that was already partial with the same reduction keeps its operands.
    if (!op || now_.partial(axis) == op || mesh_.coordinates()[axis] == 0) continue;
    if (*op == ReduceOp::kSum || *op == ReduceOp::kBxor) {
      tensor_ = at::zeros_like(tensor_, at::MemoryFormat::Contiguous);
    } else if (*op == ReduceOp::kProduct) {
      tensor_ = at::ones_like(tensor_, at::MemoryFormat::Contiguous);
    }  // min, max, avg, and, or: equal operands reduce to the operand
  }
}

}  // namespace

at::Tensor redistribute_values(const Redistribution& move, const at::Tensor& local) {
  const at::NoGradGuard no_grad;
  const at::Tensor before = with_values_in_memory(local.detach());
  const at::Tensor after = Passage(move, before).run();
  const bool holds_more = after.storage().nbytes() != after.nbytes();
  if (!after.is_contiguous() || holds_more || after.is_alias_of(local)) {
    return after.clone(at::MemoryFormat::Contiguous);
  }
  // `after` may be a view on some ranks only, and autograd throws at in-place changes of some
  // views. So the result is a new non-view tensor over the same storage.
  return at::empty({0}, after.options())
      .set_(after.storage(), after.storage_offset(), after.sizes(), after.strides());
}

}  // namespace cadre
