#include "cadre/train/checkpoint/sharded_load.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/shard_fence.h"
#include "cadre/tensor/group/caught_error.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/train/checkpoint/planning/digest_shares.h"
#include "cadre/train/checkpoint/planning/shared_memory.h"
#include "cadre/train/checkpoint/rank_agreement.h"
#include "cadre/train/checkpoint/snapshot_reader.h"

namespace cadre {
namespace {

// Returns the flat buffers in the order of the parameters, which is equal on all ranks.
std::vector<std::shared_ptr<shard::FlatParameters>> flats_of(const SnapshotParts& parts) {
  std::vector<std::shared_ptr<shard::FlatParameters>> flats;
  for (const SnapshotTensor& tensor : parts.parameters) {
    const auto& flat = shard::FlatParameters::of(tensor.memory);
    if (flat && std::ranges::find(flats, flat) == flats.end()) flats.push_back(flat);
  }
  return flats;
}

// One step of the load: reads one tensor of the snapshot into one tensor of this rank.
struct Read {
  const ManifestTensor* source = nullptr;
  std::vector<Box> boxes;
  at::Tensor target;
};

std::vector<Box> boxes_read(const SnapshotTensor& tensor) {
  std::vector<Box> boxes;
  std::ranges::copy_if(tensor.boxes, std::back_inserter(boxes),
                       [](const Box& box) { return box.numel() > 0; });
  return boxes;
}

const char* is_or_are(size_t count) {
  return count == 1 ? "is" : "are";
}

class Loader {
 public:
  Loader(const std::string& path, const SnapshotParts& parts)
      : reader_(SnapshotReader::open(path)), parts_(parts) {}

  const SnapshotReader& reader() const { return reader_; }

  // Makes all checks except the comparison with digests and the search for targets that share
  // memory.
  void prepare(const LoadOptions& options) {
    check_names();
    for (const auto* tensors : {&parts_.parameters, &parts_.buffers}) {
      for (const SnapshotTensor& tensor : *tensors) plan(tensor);
    }
    if (options.with_optimizer) plan_states();
    for (const Read& read : reads_) reader_.prepare(*read.source, read.boxes);
  }

  // REQUIRES: prepare(). Checks only tensors of the model: those may share memory, while the
  // tensors of the optimizer's states are new.
  void check_targets_apart() const {
    std::vector<PlannedWrite> writes;
    for (const Read& read : reads_) {
      if (!read.source->state.empty()) continue;
      writes.push_back({.name = read.source->name, .target = read.target, .values = [this, &read] {
                          const at::Tensor flat =
                              at::empty({read.target.numel()}, read.target.scalar_type());
                          reader_.read(*read.source, read.boxes, flat);
                          return flat;
                        }});
    }
    check_shared_memory(writes);
  }

  LoadedSnapshot load() {
    const at::NoGradGuard no_grad;
    std::vector<std::shared_ptr<shard::ShardFence>> fences;
    for (const auto& flat : flats_of(parts_)) {
      if (!flat->keeps_full()) fences.push_back(flat->fence());
    }
    shard::FencedUpdate update(fences);
    for (const Read& read : reads_) {
      const bool is_flat = read.target.is_contiguous() && read.target.is_cpu();
      const at::Tensor flat = is_flat ? read.target.detach().view({-1})
                                      : at::empty({read.target.numel()}, read.target.scalar_type());
      reader_.read(*read.source, read.boxes, flat);
      if (!is_flat) read.target.copy_(flat.view(read.target.sizes()));
    }
    update.finish();
    return {.step = reader_.manifest().step,
            .optimizer = std::move(states_),
            .extra = reader_.manifest().extra,
            .strategy = reader_.manifest().strategy};
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorCode::kInvalidArgument, cadre::format("{} {}", reader_.path(), what));
  }

  // Checks that the model and the snapshot have the same tensors.
  void check_names() const {
    std::set<std::string> missing;
    std::set<std::string> names;
    for (const auto* tensors : {&parts_.parameters, &parts_.buffers}) {
      for (const SnapshotTensor& tensor : *tensors) {
        names.insert(tensor.name);
        if (!reader_.model().contains(tensor.name)) missing.insert(tensor.name);
      }
    }
    if (!missing.empty()) {
      const bool is_of_other_model = missing.size() == names.size() && !reader_.model().empty();
      refuse(cadre::format(
          "has no tensor '{}', which the model needs ({} {} missing){}", *missing.begin(),
          missing.size(), is_or_are(missing.size()),
          is_of_other_model
              ? saved_by_another_model(reader_.model().size(), reader_.model().begin()->first)
              : std::string()));
    }
    // All tensors of the model have been found, so the snapshot's other tensors are unexpected.
    const size_t num_unexpected = reader_.model().size() - names.size();
    for (const auto& [name, tensor] : reader_.model()) {
      if (!names.contains(name)) {
        refuse(cadre::format("has a tensor '{}', which the model does not ({} of {} {} unexpected)",
                             name, num_unexpected, reader_.model().size(),
                             is_or_are(num_unexpected)));
      }
    }
  }

  void plan(const SnapshotTensor& tensor) {
    const ManifestTensor& source = *reader_.model().at(tensor.name);
    const auto dtype = scalar_type_of(source.dtype);
    if (source.shape != tensor.sizes || dtype != tensor.values.scalar_type()) {
      refuse(cadre::format("has tensor '{}' as {} {}, but the model has {} {}", tensor.name,
                           source.dtype, list_of(source.shape),
                           safetensors_dtype(tensor.values.scalar_type()).value_or("another dtype"),
                           list_of(tensor.sizes)));
    }
    std::vector<Box> boxes = boxes_read(tensor);
    int64_t numel = 0;
    for (const Box& box : boxes) numel += box.numel();
    if (tensor.values.numel() != numel || tensor.values.is_meta()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          cadre::format("'{}' has {} elements on this rank, but its boxes have {}; expected "
                        "a tensor with memory of as many",
                        tensor.name, tensor.values.numel(), numel));
    }
    if (at::has_internal_overlap(tensor.values) == at::MemOverlap::Yes) {
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("elements of '{}' share memory, as after expand(), and cannot be "
                                "loaded one by one; replace it by its clone()",
                                tensor.name));
    }
    reads_.push_back({&source, std::move(boxes), tensor.values});
  }

  void plan_states() {
    const SnapshotEntries entries = entries_of(parts_.parameters);
    for (const auto& [name, states] : reader_.optimizer()) {
      auto entry = entries.find({name, 0});
      if (entry == entries.end()) {
        refuse(cadre::format("has an optimizer's state of '{}', which is no parameter of the model",
                             name));
      }
      for (; entry != entries.end() && entry->first.first == name; ++entry) {
        ParameterState loaded{.parameter = name, .entry = entry->first.second};
        for (const ManifestTensor* state : states) plan_state(*state, *entry->second, loaded);
        states_.push_back(std::move(loaded));
      }
    }
  }

  void plan_state(const ManifestTensor& source, const SnapshotTensor& parameter,
                  ParameterState& loaded) {
    const auto dtype = scalar_type_of(source.dtype);
    const std::vector<int64_t> expected =
        source.is_scalar ? std::vector<int64_t>() : parameter.sizes;
    if (!dtype || source.shape != expected) {
      refuse(cadre::format("has '{}' as {} {}; the parameter is {}", name_in_files(source),
                           source.dtype, list_of(source.shape), list_of(parameter.sizes)));
    }
    // The tensor is made outside of inference mode, because a tensor that is made in that mode
    // cannot be changed in place outside of it.
    const c10::InferenceMode mode(false);
    const at::Tensor target =
        at::empty(source.is_scalar ? at::IntArrayRef() : parameter.values.sizes(), *dtype);
    (source.is_scalar ? loaded.scalars : loaded.tensors).emplace_back(source.state, target);
    reads_.push_back(
        {&source, source.is_scalar ? std::vector<Box>{Box{}} : boxes_read(parameter), target});
  }

  SnapshotReader reader_;
  const SnapshotParts& parts_;
  std::vector<Read> reads_;
  std::vector<ParameterState> states_;
};

// Runs `run`. Converts an exception to an Error, so that the other ranks can be sent it in place of
// the result.
template <typename Run>
Result<std::string> outcome_of(const Run& run) {
  try {
    return run();
  } catch (...) {
    return caught_error();
  }
}

// All ranks exchange the outcome of their reads before any rank gathers parameters or returns.
// Otherwise ranks would wait in the gather for a rank whose read failed, or would continue with
// other values than that rank.
LoadedSnapshot load_and_gather(Loader& loader,
                               const std::vector<std::shared_ptr<shard::FlatParameters>>& flats,
                               const RankAgreement& ranks) {
  LoadedSnapshot loaded;
  const auto read = [&] {
    loaded = loader.load();
    loader.reader().check_unchanged();
    return std::string();
  };
  ranks.gather(outcome_of(read)).value_or_throw();
  if (!flats.empty()) shard::gather_changed(flats);
  return loaded;
}

[[noreturn]] void throw_other_snapshot(const std::string& path, size_t rank) {
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("load {}: rank {} reads another snapshot than rank 0", path, rank));
}

// Returns the options that must be equal on all ranks, one character for each.
std::string text_of(const LoadOptions& options) {
  return {options.with_optimizer ? 'o' : '-', options.with_digests ? 'd' : '-'};
}

// Checks that all ranks have the same options and the same snapshot.
void check_equal(const std::string& path, const std::vector<FileView>& views) {
  for (size_t rank = 1; rank < views.size(); ++rank) {
    if (views[rank].options != views[0].options) {
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("load {}: with_optimizer or with_digests of the options is not the "
                                "same on all ranks: rank {} differs from rank 0",
                                path, rank));
    }
    if (views[rank].fingerprint != views[0].fingerprint) throw_other_snapshot(path, rank);
  }
}

// Compares the files that are assigned to this rank with their digests, and returns an empty text.
// A snapshot in a single safetensors file has no digest: if ranks see different files under its
// path, the ranks that are assigned the file return a digest of its content instead.
std::string check_share(const SnapshotReader& reader, const std::vector<FileView>& views,
                        size_t rank) {
  std::vector<uint64_t> num_bytes;
  for (const ManifestFile& file : reader.manifest().files) num_bytes.push_back(file.bytes);
  const std::vector<std::vector<size_t>> shares = share_digests(views, num_bytes);
  if (reader.has_digests()) {
    reader.check_digests(shares[rank]);
    return "";
  }
  const bool is_one_file = std::ranges::all_of(
      views, [&](const FileView& view) { return view.sight == views[0].sight; });
  return is_one_file || shares[rank].empty() ? "" : reader.content_digest(shares[rank].front());
}

LoadedSnapshot load_on(const std::string& path, const SnapshotParts& parts,
                       const RankAgreement& ranks, const LoadOptions& options) {
  std::optional<Loader> loader;
  const auto prepare = [&] {
    loader.emplace(path, parts);
    loader->prepare(options);
    const SnapshotReader& reader = loader->reader();
    return encode_file_view({.options = text_of(options),
                             .fingerprint = reader.fingerprint(),
                             .sight = options.with_digests ? reader.sight() : "",
                             .files = reader.open_files()});
  };
  const std::vector<std::string> texts = ranks.gather(outcome_of(prepare)).value_or_throw();
  std::vector<FileView> views;
  for (const std::string& text : texts) views.push_back(decode_file_view(text).value_or_throw());
  check_equal(path, views);
  const auto check_content = [&] {
    std::string digest;
    if (options.with_digests) {
      digest = check_share(loader->reader(), views, static_cast<size_t>(ranks.rank()));
    }
    loader->check_targets_apart();
    return digest;
  };
  const std::vector<std::string> digests = ranks.gather(outcome_of(check_content)).value_or_throw();
  std::string first;
  for (size_t rank = 0; rank < digests.size(); ++rank) {
    if (first.empty()) first = digests[rank];
    if (!digests[rank].empty() && digests[rank] != first) throw_other_snapshot(path, rank);
  }
  return load_and_gather(*loader, flats_of(parts), ranks);
}

}  // namespace

LoadedSnapshot load_sharded(const std::string& path, const SnapshotParts& parts,
                            const ProcessGroup& group, const LoadOptions& options) {
  return load_on(path, parts, RankAgreement(group, options.timeout), options);
}

LoadedSnapshot load_sharded(const std::string& path, const SnapshotParts& parts,
                            const LoadOptions& options) {
  return load_on(path, parts, RankAgreement(), options);
}

}  // namespace cadre
