#include "cadre/parallel/pp/stage_records.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <span>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/parallel/pp/pipeline_agreement.h"
#include "cadre/wire/byte_codec.h"

namespace cadre::parallel {
namespace {

constexpr size_t kMaxNameBytes = 1 << 16;

// What a rank tells the others of a parameter that it holds.
struct Description {
  int32_t stage = 0;
  std::string name;
  std::vector<int64_t> sizes = {};
  at::ScalarType dtype = at::kFloat;
  // By axis of more ranks than one along which it is divided: the dim, or kFlat.
  std::vector<std::pair<std::string, int64_t>> axes = {};
};
constexpr int64_t kFlat = -1;

Description description_of(int stage, const ParameterShard& record) {
  Description text{.stage = stage,
                   .name = record.name,
                   .sizes = record.sizes,
                   .dtype = record.values.scalar_type()};
  for (size_t i = 0; i < record.placements.size(); ++i) {
    const MeshAxis& axis = record.mesh.axes()[i];
    const Shard* const shard = record.placements[i].shard();
    if (shard != nullptr) text.axes.emplace_back(axis.name, shard->dim);
    if (record.flat_axis == axis.name) text.axes.emplace_back(axis.name, kFlat);
  }
  return text;
}

void write(const Description& text, wire::ByteWriter& out) {
  out.integer(text.stage);
  out.text(text.name);
  out.integer(static_cast<uint32_t>(text.sizes.size()));
  for (const int64_t size : text.sizes) out.integer(size);
  out.integer(static_cast<int32_t>(text.dtype));
  out.integer(static_cast<uint32_t>(text.axes.size()));
  for (const auto& [axis, dim] : text.axes) {
    out.text(axis);
    out.integer(dim);
  }
}

Description read(wire::ByteReader& in) {
  Description text{.stage = in.integer<int32_t>(), .name = in.text(kMaxNameBytes)};
  for (auto count = in.integer<uint32_t>(); in.ok() && count > 0; --count) {
    text.sizes.push_back(in.integer<int64_t>());
  }
  text.dtype = static_cast<at::ScalarType>(in.integer<int32_t>());
  for (auto count = in.integer<uint32_t>(); in.ok() && count > 0; --count) {
    std::string axis = in.text(kMaxNameBytes);
    text.axes.emplace_back(std::move(axis), in.integer<int64_t>());
  }
  return text;
}

// By rank, what all ranks have written.
std::vector<std::vector<Description>> exchange(const ProcessGroup& group,
                                               const std::vector<Description>& own,
                                               const std::optional<Error>& refusal) {
  wire::ByteWriter out;
  out.integer(static_cast<uint32_t>(own.size()));
  for (const Description& text : own) write(text, out);
  const std::vector<std::byte> bytes = out.take();
  const std::vector<int64_t> size{static_cast<int64_t>(bytes.size())};
  int64_t longest = 0;
  const auto sizes = exchange_words(group, size, refusal, "parameters");
  for (const auto& words : sizes) longest = std::max(longest, words[0]);
  std::vector<int64_t> padded(static_cast<size_t>(longest + 7) / 8, 0);
  std::memcpy(padded.data(), bytes.data(), bytes.size());
  std::vector<std::vector<Description>> all;
  const auto contents = exchange_words(group, padded, std::nullopt, "parameters");
  for (size_t rank = 0; rank < contents.size(); ++rank) {
    const auto given = std::as_bytes(std::span(contents[rank]));
    wire::ByteReader in(given.first(static_cast<size_t>(sizes[rank][0])));
    std::vector<Description>& texts = all.emplace_back();
    for (auto count = in.integer<uint32_t>(); in.ok() && count > 0; --count) {
      texts.push_back(read(in));
    }
  }
  return all;
}

// `record`, on the axes of the pipeline, too.
ParameterShard along_pipeline(ParameterShard record, const DeviceMesh& pipeline) {
  const ParameterDivision whole{record.sizes, pipeline, {Replicate()}};
  record = on_joint_mesh(std::move(record), &whole);
  record.stage_axis = pipeline.axes()[0].name;
  return record;
}

// Each tensor of this rank's stages once, by stage.
std::vector<std::pair<int, ParameterShard>> own_records(const DeviceMesh& pipeline,
                                                        const std::vector<PipelineStage>& stages,
                                                        const ShardedStages* sharded) {
  std::vector<std::pair<int, ParameterShard>> records;
  std::set<const void*> seen;
  for (const PipelineStage& stage : stages) {
    std::vector<ParameterShard> of_shards;
    if (sharded != nullptr) of_shards = sharded->parameter_shards(stage.stage());
    for (const NamedTensor& parameter : stage.parameters()) {
      if (!seen.insert(parameter.tensor.unsafeGetTensorImpl()).second) continue;
      const auto found = std::ranges::find_if(of_shards, [&](const ParameterShard& shard) {
        return shard.parameter.is_same(parameter.tensor);
      });
      const ParameterShard whole{.name = parameter.name,
                                 .sizes = parameter.tensor.sizes().vec(),
                                 .mesh = pipeline,
                                 .placements = {Replicate()},
                                 .flat_axis = {},
                                 .range = {.begin = 0, .end = parameter.tensor.numel()},
                                 .values = parameter.tensor,
                                 .parameter = parameter.tensor};
      records.emplace_back(
          stage.stage(),
          found != of_shards.end()
              ? along_pipeline(std::move(*found), pipeline)
              : along_pipeline(on_joint_mesh(whole, division_of(parameter).get()), pipeline));
    }
  }
  return records;
}

// Of a parameter that another rank holds.
ParameterShard empty_record(const Description& text, const DeviceMesh& pipeline) {
  const at::Tensor nothing = at::empty({0}, text.dtype);
  ParameterShard record{.name = text.name,
                        .sizes = text.sizes,
                        .mesh = pipeline,
                        .placements = {Replicate()},
                        .flat_axis = {},
                        .range = {.begin = 0, .end = 0},
                        .values = nothing,
                        .parameter = nothing};
  for (const auto& [axis, dim] : text.axes) {
    ParameterDivision division{text.sizes, pipeline.whole()[axis], {Replicate()}};
    if (dim == kFlat) {
      record.flat_axis = axis;
    } else {
      division.placements = {Shard(dim)};
    }
    record = on_joint_mesh(std::move(record), &division);
  }
  record.stage_axis = pipeline.axes()[0].name;
  return record;
}

}  // namespace

StageRecords::StageRecords(const ProcessGroup& group, std::optional<DeviceMesh> mesh,
                           const std::vector<PipelineStage>& stages, const ShardedStages* sharded) {
  if (!mesh) mesh = DeviceMesh(group, {{"pp", group.world_size()}});
  std::vector<std::pair<int, ParameterShard>> own;
  std::vector<Description> texts;
  std::optional<Error> refusal;
  try {
    own = own_records(*mesh, stages, sharded);
    for (const auto& [stage, record] : own) texts.push_back(description_of(stage, record));
  } catch (const Error& error) {
    refusal = error.with_context(
        "cadre::Pipeline: its axis and those that divide its parameters must come from one mesh of "
        "all ranks, as mesh[\"pp\"] and mesh[\"tp\"]");
  }
  const auto all = exchange(group, texts, refusal);
  for (int rank = 0; rank < group.world_size(); ++rank) {
    for (size_t i = 0; i < all[rank].size(); ++i) {
      const Description& text = all[rank][i];
      holders_.resize(std::max(holders_.size(), static_cast<size_t>(text.stage) + 1), -1);
      holders_[static_cast<size_t>(text.stage)] = rank;
      const bool is_held = rank == group.rank();
      entries_.push_back({.stage = text.stage,
                          .name = text.name,
                          .record = is_held ? own[i].second : empty_record(text, *mesh),
                          .is_held = is_held});
    }
  }
  std::ranges::stable_sort(entries_, {}, &Entry::stage);
}

StageRecords::Entry* StageRecords::find(const StageParameter& parameter) {
  const auto found = std::ranges::find_if(entries_, [&](const Entry& entry) {
    return entry.stage == parameter.stage && entry.name == parameter.name;
  });
  return found == entries_.end() ? nullptr : &*found;
}

void StageRecords::tie(const std::vector<StageParameter>& parameters) {
  Entry* const first = find(parameters.at(0));
  if (first == nullptr) return;  // of a stage with a tensor that an earlier stage of its rank has
  std::set<int> holders = {holders_[static_cast<size_t>(first->stage)]};
  std::vector<const Entry*> repeated;
  for (const StageParameter& parameter : std::span(parameters).subspan(1)) {
    Entry* const other = find(parameter);
    if (other == nullptr || other == first) continue;
    other->record.is_copy = true;
    if (!holders.insert(holders_[static_cast<size_t>(other->stage)]).second) continue;
    if (other->is_held) {
      const std::string name = first->record.name;
      first->record = other->record;
      first->record.name = name;
      first->is_held = true;
    }
    repeated.push_back(other);
  }
  std::erase_if(entries_, [&](const Entry& entry) {
    return std::ranges::find(repeated, &entry) != repeated.end();
  });
}

std::vector<ParameterShard> StageRecords::all() const {
  std::vector<ParameterShard> records;
  for (const Entry& entry : entries_) records.push_back(entry.record);
  return records;
}

std::vector<at::Tensor> StageRecords::values() const {
  std::vector<at::Tensor> held;
  for (const Entry& entry : entries_) {
    if (entry.is_held) held.push_back(entry.record.values);
  }
  return held;
}

}  // namespace cadre::parallel
