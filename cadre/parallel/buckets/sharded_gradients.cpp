#include "cadre/parallel/buckets/sharded_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/buckets/handed_out_memory.h"
#include "cadre/parallel/shard/shard_fence.h"
#include "cadre/tensor/device/stream_point.h"
#include "cadre/tensor/group/file_memory.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/hooks/device_check.h"

namespace cadre {

namespace {

constexpr size_t kNoBucket = static_cast<size_t>(-1);

}  // namespace

ShardedGradients::ShardedGradients(std::vector<NamedTensor> parameters,
                                   std::span<const std::shared_ptr<shard::FlatParameters>> units,
                                   Groups groups, Options options)
    : GradientStorage(std::move(parameters)),
      groups_(std::move(groups)),
      options_(std::move(options)),
      device_(parameters_.empty() ? at::Device(at::kCPU) : parameters_.front().tensor.device()),
      slots_(parameters_.size(), Slot{.bucket = kNoBucket, .place = 0, .leaf = {}, .gradient = {}}),
      is_ready_(parameters_.size(), false),
      unsettled_(parameters_.size()),
      refused_(parameters_, {.place = where(), .remedy = options_.remedy},
               {.on_cleared =
                    [this](size_t parameter) { slots_[parameter].leaf.mutable_grad().reset(); },
                .on_arrival = [this](size_t parameter) { begin_arrival(parameter); }}),
      unreduced_(parameters_, where(),
                 {.leaf = [this](size_t parameter) { return slots_[parameter].leaf; },
                  .memory =
                      [this](size_t parameter) {
                        leave_held_memory(slots_[parameter]);
                        return slots_[parameter].gradient;
                      },
                  .is_refused = [this](size_t parameter) { return refused_.is_refused(parameter); },
                  .refuses_changed_values = options_.refuses_changed_values,
                  .on_cleared =
                      [this] {
                        if (options_.on_cleared) options_.on_cleared();
                      }}) {
  first_late_unit_ = units.size() - std::min(options_.num_late_units, units.size());
  make_buckets(units);
  num_late_buckets_ = static_cast<size_t>(std::ranges::count_if(
      buckets_, [this](const Bucket& bucket) { return bucket.unit >= first_late_unit_; }));
  if (options_.layout) follow(*options_.layout);
  is_learned_ = options_.layout.has_value();
  allocate();
  unreduced_.review_all(std::nullopt);  // treats existing gradients as accumulated
  for (size_t i = 0; i < slots_.size(); ++i) {
    places_.emplace(slots_[i].leaf.unsafeGetTensorImpl(), i);
  }
  for (const Bucket& bucket : buckets_) {
    bucket.flat->fence()->set_gradient_check([this](const at::Tensor& values) {
      const auto found = places_.find(values.unsafeGetTensorImpl());
      if (found != places_.end()) unreduced_.check_complete(found->second);
    });
  }
}

ShardedGradients::~ShardedGradients() {
  for (const Bucket& bucket : buckets_) bucket.flat->fence()->set_gradient_check(nullptr);
}

std::string ShardedGradients::where() const {
  return format("{}, {}", options_.wrapper, groups_.all.rank_text());
}

void ShardedGradients::make_buckets(std::span<const std::shared_ptr<shard::FlatParameters>> units) {
  std::unordered_map<const c10::TensorImpl*, size_t> index_of;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    index_of.emplace(parameters_[i].tensor.unsafeGetTensorImpl(), i);
  }
  for (size_t unit = 0; unit < units.size(); ++unit) {
    const std::vector<NamedTensor>& members = units[unit]->parameters();
    Bucket bucket{
        .unit = unit, .flat = units[unit], .dtype = {}, .parameters = {}, .gradients = {}};
    for (size_t place = 0; place < members.size(); ++place) {
      const auto found = index_of.find(members[place].tensor.unsafeGetTensorImpl());
      if (found == index_of.end()) continue;
      bucket.parameters.push_back(found->second);
      slots_[found->second] = {.bucket = buckets_.size(),
                               .place = place,
                               .leaf = units[unit]->values(place),
                               .gradient = {}};
    }
    if (bucket.parameters.empty()) continue;
    bucket.dtype =
        options_.reduce_dtype.value_or(parameters_[bucket.parameters[0]].tensor.scalar_type());
    buckets_.push_back(std::move(bucket));
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (slots_[i].bucket != kNoBucket) continue;
    throw Error(ErrorCode::kInternal,
                format("{}: trained parameter {} of {} belongs to no unit; please report this bug",
                       where(), i, parameters_.size()));
  }
  std::vector<size_t> order(buckets_.size());
  for (size_t b = 0; b < order.size(); ++b) order[b] = b;
  arrange(order);
}

void ShardedGradients::arrange(const std::vector<size_t>& order) {
  std::vector<Bucket> arranged;
  BucketLayout layout;
  for (const size_t from : order) {
    arranged.push_back(std::move(buckets_[from]));
    const Bucket& bucket = arranged.back();
    BucketLayout::Bucket listed{.dtype = sizes_of({&parameters_[bucket.parameters[0]], 1})[0].dtype,
                                .parameters = {}};
    for (const size_t parameter : bucket.parameters) {
      listed.parameters.push_back(static_cast<int64_t>(parameter));
      slots_[parameter].bucket = arranged.size() - 1;
    }
    layout.buckets.push_back(std::move(listed));
  }
  buckets_ = std::move(arranged);
  set_layout(std::move(layout));
}

void ShardedGradients::follow(const BucketLayout& wanted) {
  check_layout_fits(wanted, sizes_of(parameters_));
  std::vector<size_t> order;
  for (const BucketLayout::Bucket& bucket : wanted.buckets) {
    const auto found = std::ranges::find(layout().buckets, bucket);
    if (found == layout().buckets.end()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          format("{}: bucket layout: bucket {} of {} in it does not have the parameters "
                 "of any sharded unit, so the layout belongs to other units or bucket sizes: pass "
                 "no layout, and the order is learned again",
                 where(), order.size(), wanted.buckets.size()));
    }
    order.push_back(static_cast<size_t>(found - layout().buckets.begin()));
  }
  arrange(order);
}

ShardedBucketSize ShardedGradients::size_of(const Bucket& bucket) {
  const shard::FlatLayout& flat = bucket.flat->layout();
  return {.numel = flat.numel(),
          .gradients = {.numel = flat.shard_numel(), .dtype = bucket.flat->shard().scalar_type()},
          .reduce_dtype = bucket.dtype};
}

void ShardedGradients::allocate() {
  wrap::make_on_all_ranks(groups_.all.process_group(), "the buckets of gradients", device_,
                          [this] { allocate_buckets(); });
  trailer_ = groups_.all.empty_flat(options_.trailer_numel, at::kFloat);
}

void ShardedGradients::allocate_buckets() {
  const at::NoGradGuard no_grad;
  std::vector<ShardedBucketSize> sizes;
  for (Bucket& bucket : buckets_) {
    sizes.push_back(size_of(bucket));
    const auto& [numel, dtype] = sizes.back().gradients;
    const std::shared_ptr<FileMemory> files = FileMemory::of(bucket.flat->shard());
    bucket.gradients = files ? files->zeros(numel, dtype)
                       : groups_.replicate
                           ? groups_.replicate->empty_flat(numel, dtype, device_)
                           : at::zeros({numel}, at::TensorOptions().dtype(dtype).device(device_));
    slice_gradients(bucket);
  }
  for (const auto& [numel, dtype] : reduction_buffers(sizes)) {
    buffers_[dtype].flats.push_back(groups_.shard.empty_flat(numel, dtype, device_));
  }
}

void ShardedGradients::slice_gradients(const Bucket& bucket) {
  const shard::FlatLayout& flat = bucket.flat->layout();
  const int rank = groups_.shard.rank();
  for (const size_t parameter : bucket.parameters) {
    Slot& slot = slots_[parameter];
    // variable_data() makes this tensor no view for autograd, because zero_grad() of optimizers
    // calls detach_(), which throws for views.
    slot.gradient =
        bucket.gradients
            .narrow(0, flat.offset_in_shard(slot.place, rank), flat.range(slot.place, rank).size())
            .variable_data();
  }
}

// Orders the buckets by the position of the gradient that becomes ready last in each, because a
// bucket can be reduced only then. Late units (Options::num_late_units) stay at the end.
void ShardedGradients::learn(std::span<const int64_t> order) {
  is_learned_ = true;
  std::vector<size_t> last(buckets_.size(), 0);
  for (size_t position = 0; position < order.size(); ++position) {
    size_t& of_bucket = last[bucket_of(static_cast<size_t>(order[position]))];
    of_bucket = std::max(of_bucket, position);
  }
  std::vector<size_t> by_readiness(buckets_.size());
  for (size_t b = 0; b < by_readiness.size(); ++b) by_readiness[b] = b;
  std::ranges::sort(by_readiness, {}, [&](size_t b) {
    return std::pair(buckets_[b].unit >= first_late_unit_, last[b]);
  });
  arrange(by_readiness);
}

void ShardedGradients::on_begin_pass() {
  refused_.remove();
  unreduced_.review_all(just_touched_);
  is_in_pass_ = true;
  if (options_.on_pass) options_.on_pass();
  is_trailer_launched_ = false;
  is_ready_.assign(parameters_.size(), false);
  std::ranges::fill(unsettled_, at::Tensor());
}

// Called before a backward adds to the parameter's gradient. Within a pass (one reduction of all
// gradients) nothing is reviewed, because a pass may consist of several backwards, as in a
// pipeline, whose gradients add up.
void ShardedGradients::begin_arrival(size_t parameter) {
  if (!is_in_pass_) unreduced_.review(parameter);
}

// Throws the error that review() has found. review() does not throw it itself: only an error that
// is thrown inside of a pass is reported to the other ranks.
void ShardedGradients::place(size_t parameter) {
  unreduced_.throw_if_changed();
  is_ready_[parameter] = true;
}

void ShardedGradients::end_pass() {
  is_in_pass_ = false;
  refused_.install();
}

void ShardedGradients::launch_next() {
  const at::NoGradGuard no_grad;
  Bucket& bucket = buckets_[num_launched_];
  bucket.flat->check_written();  // an error here is reported to all ranks
  const at::Tensor buffer = free_buffer(bucket).narrow(0, 0, bucket.flat->layout().numel());
  take(bucket, buffer);
  const at::Tensor output = output_for(bucket);
  ++num_launched_;
  running_.push_back(
      {.bucket = &bucket,
       .buffer = buffer.const_data_ptr(),
       .output = output,
       .end = groups_.shard.reduce_scatter_async(lent(output), buffer, combination_.op)});
  if (options_.on_unit_taken) options_.on_unit_taken(bucket.unit);
}

// Returns the buffer for the next reduction. The buffers are used alternately, so this waits until
// the last reduce_scatter that reads this buffer has ended.
const at::Tensor& ShardedGradients::free_buffer(const Bucket& bucket) {
  Buffers& buffers = buffers_.at(bucket.dtype);
  const at::Tensor& flat = buffers.flats[buffers.next];
  const auto reads_it = [&flat](const Reduction& reduction) {
    return !reduction.is_scattered && reduction.buffer == flat.const_data_ptr();
  };
  // Reductions are completed in the order of launches, so that all ranks start the all_reduces over
  // replicas in the same order.
  while (std::ranges::any_of(running_, reads_it)) {
    finish_scatter(*std::ranges::find(running_, false, &Reduction::is_scattered));
    if (!groups_.replicate) finish_oldest();
  }
  buffers.next = (buffers.next + 1) % buffers.flats.size();
  return flat;
}

// Moves this rank's gradients of the bucket into the buffer. Sets the rest of the buffer to zero:
// frozen parameters, parameters without a gradient, and padding.
void ShardedGradients::take(const Bucket& bucket, const at::Tensor& buffer) {
  const shard::FlatLayout& layout = bucket.flat->layout();
  int64_t end = 0;
  for (const size_t parameter : bucket.parameters) {
    const size_t place = slots_[parameter].place;
    const int64_t begin = layout.offset(place);
    if (begin > end) buffer.narrow(0, end, begin - end).zero_();
    end = begin + layout.numel(place);
    const at::Tensor target = buffer.narrow(0, begin, end - begin);
    at::Tensor& gradient = parameters_[parameter].tensor.mutable_grad();
    if (is_ready_[parameter] && gradient.defined()) {
      write_gradient(target.view(parameters_[parameter].tensor.sizes()), gradient,
                     combination_.factor);
      // Autograd may have computed the gradient on another stream than that of this reduction.
      device::hold_for_current_stream(gradient);
      gradient.reset();
      unreduced_.end(parameter);
    } else {
      target.zero_();
    }
  }
  if (end < layout.numel()) buffer.narrow(0, end, layout.numel() - end).zero_();
}

// Returns the tensor for the result of the reduction. It is the memory of the shards' gradients if
// these have no gradients yet and the dtype of the reduction is the same.
at::Tensor ShardedGradients::output_for(Bucket& bucket) {
  const bool has_gradients = std::ranges::any_of(bucket.parameters, [this](size_t parameter) {
    return slots_[parameter].leaf.grad().defined();
  });
  const ShardedBucketSize size = size_of(bucket);
  if (has_gradients || !size.is_reduced_in_place()) {
    return at::empty({size.output().numel},
                     at::TensorOptions().dtype(size.output().dtype).device(device_));
  }
  if (!is_whole(bucket)) {
    bucket.gradients = take_memory_back(bucket.gradients);
    slice_gradients(bucket);
  }
  return bucket.gradients;
}

// Returns whether the program holds the gradient of this slot, or a tensor that shares its memory.
bool ShardedGradients::is_held(const Slot& slot) const {
  const bool is_given = slot.leaf.grad().is_same(slot.gradient);
  if (slot.gradient.use_count() > (is_given ? 2 : 1)) return true;
  const Bucket& bucket = buckets_[slot.bucket];
  const c10::StorageImpl* const storage = bucket.gradients.storage().unsafeGetStorageImpl();
  if (slot.gradient.storage().unsafeGetStorageImpl() != storage) {
    return slot.gradient.storage().use_count() > 1;
  }
  const auto num_own = std::ranges::count_if(bucket.parameters, [&](size_t parameter) {
    return slots_[parameter].gradient.storage().unsafeGetStorageImpl() == storage;
  });
  return bucket.gradients.storage().use_count() > static_cast<size_t>(num_own) + 1;
}

// Returns whether the gradients of the bucket's shards all lie in Bucket::gradients, and the
// program holds none of them.
bool ShardedGradients::is_whole(const Bucket& bucket) const {
  return std::ranges::none_of(bucket.parameters, [&](size_t parameter) {
    const Slot& slot = slots_[parameter];
    return slot.gradient.storage().unsafeGetStorageImpl() !=
               bucket.gradients.storage().unsafeGetStorageImpl() ||
           is_held(slot);
  });
}

// Called before slot.gradient is written, when it is not the leaf's gradient. If the program still
// holds it as the gradient of an earlier step, slot.gradient gets other memory, so that the values
// that the program holds do not change.
void ShardedGradients::leave_held_memory(Slot& slot) {
  if (!is_held(slot)) return;
  const std::shared_ptr<FileMemory> files = FileMemory::of(slot.leaf);
  slot.gradient = files ? files->zeros(slot.gradient.numel(), slot.gradient.scalar_type())
                        : at::empty_like(slot.gradient);
}

// Waits for the reduce_scatter and starts the all_reduce over replicas. If the wait throws,
// is_scattered stays false, and abandon() starts the all_reduce instead: the ranks with the same
// shards wait for it, because their reduce_scatter may have succeeded.
void ShardedGradients::finish_scatter(Reduction& reduction) {
  std::exchange(reduction.end, nullptr)();
  reduction.is_scattered = true;
  if (!groups_.replicate) return;
  reduction.end = groups_.replicate->all_reduce_async(lent(reduction.output), combination_.op);
}

// Requires that is_scattered is true for the oldest reduction.
void ShardedGradients::finish_oldest() {
  const Reduction reduction = std::move(running_.front());
  running_.pop_front();
  if (reduction.end) reduction.end();
  add_to_gradients(reduction);
}

void ShardedGradients::add_to_gradients(const Reduction& reduction) {
  const shard::FlatLayout& layout = reduction.bucket->flat->layout();
  const int rank = groups_.shard.rank();
  for (const size_t parameter : reduction.bucket->parameters) {
    Slot& slot = slots_[parameter];
    const at::Tensor reduced =
        reduction.output.narrow(0, layout.offset_in_shard(slot.place, rank), slot.gradient.numel());
    if (is_ready_[parameter]) {
      add_to_gradient(slot, reduced);
    } else {
      unsettled_[parameter] = reduced;
    }
  }
}

void ShardedGradients::add_to_gradient(Slot& slot, const at::Tensor& reduced) {
  // The hook that allocated the result may have run on another stream.
  device::hold_for_current_stream(reduced);
  at::Tensor& gradient = slot.leaf.mutable_grad();
  if (gradient.defined()) {
    gradient.add_(reduced);
    return;
  }
  if (reduced.const_data_ptr() != slot.gradient.const_data_ptr()) {
    leave_held_memory(slot);
    slot.gradient.copy_(reduced);
  }
  gradient = slot.gradient;
}

void ShardedGradients::finish_early() {
  const at::NoGradGuard no_grad;
  for (Reduction& reduction : running_) {
    if (!reduction.is_scattered) finish_scatter(reduction);
  }
  while (!running_.empty()) finish_oldest();
}

void ShardedGradients::reduce_last() {
  is_trailer_launched_ = true;
  groups_.all.all_reduce(trailer_, combination_.op);
}

void ShardedGradients::settle_unused(size_t parameter, const Usage& usage) {
  const at::NoGradGuard no_grad;
  const at::Tensor reduced = std::exchange(unsettled_[parameter], at::Tensor());
  if (reduced.defined() && usage.used_by_some) add_to_gradient(slots_[parameter], reduced);
}

void ShardedGradients::abandon() {
  const at::NoGradGuard no_grad;
  is_in_pass_ = false;
  const size_t first = num_launched_;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (slots_[i].bucket >= first || unreduced_.is_arriving(i)) unreduced_.drop(i);
  }
  while (num_launched_ < buckets_.size()) {
    if (options_.on_abandoned_launch) options_.on_abandoned_launch(num_launched_);
    const Bucket& bucket = buckets_[num_launched_];
    const shard::FlatLayout& layout = bucket.flat->layout();
    // Any content of the buffer will do, because all ranks drop the result.
    const at::Tensor buffer = buffers_.at(bucket.dtype).flats[0].narrow(0, 0, layout.numel());
    const at::Tensor output =
        at::empty({layout.shard_numel()}, at::TensorOptions().dtype(bucket.dtype).device(device_));
    ++num_launched_;
    running_.push_back(
        {.bucket = &bucket,
         .buffer = nullptr,
         .output = output,
         .end = groups_.shard.reduce_scatter_async(output, buffer, combination_.op)});
  }
  if (options_.on_abandoned_launch) options_.on_abandoned_launch(buckets_.size());
  for (const Reduction& reduction : running_) {
    if (!groups_.replicate || reduction.is_scattered) continue;
    const at::Tensor scratch = at::zeros_like(reduction.output);
    abandoned_waits_.push_back(groups_.replicate->all_reduce_async(scratch, combination_.op));
  }
  if (!std::exchange(is_trailer_launched_, true)) {
    abandoned_waits_.push_back(groups_.all.all_reduce_async(trailer_, combination_.op));
  }
  if (!options_.on_unit_taken) return;
  for (size_t b = first; b < buckets_.size(); ++b) options_.on_unit_taken(buckets_[b].unit);
}

void ShardedGradients::settle_abandoned() {
  is_in_pass_ = false;  // a pass that has failed on all ranks ends here
  while (!running_.empty()) {
    const Reduction reduction = std::move(running_.front());
    running_.pop_front();
    if (reduction.end) reduction.end();
  }
  for (const auto& wait : std::exchange(abandoned_waits_, {})) wait();
}

void ShardedGradients::keep_local(size_t parameter) {
  unreduced_.throw_if_changed();
  unreduced_.keep(parameter);
}

// If the current backward has already added to a parameter, begin_arrival() has reviewed that
// parameter before, and on_begin_pass() will review the others. Otherwise all are reviewed now.
void ShardedGradients::forget_cleared(std::optional<size_t> just_touched) {
  just_touched_ = just_touched;
  if (!just_touched && !is_in_pass_) unreduced_.review_all(std::nullopt);
}

void ShardedGradients::zero_grad(bool set_to_none) {
  const at::NoGradGuard no_grad;
  refused_.discard();
  for (Slot& slot : slots_) {
    at::Tensor& gradient = slot.leaf.mutable_grad();
    if (!gradient.defined()) continue;
    if (set_to_none) {
      gradient.reset();
    } else {
      gradient.zero_();
    }
  }
}

}  // namespace cadre
