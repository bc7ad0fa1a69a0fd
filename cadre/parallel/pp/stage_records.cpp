#include "cadre/parallel/pp/stage_records.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/parallel/pp/pipeline_agreement.h"
#include "cadre/parallel/shard/division/parameter_division.h"
#include "cadre/tensor/mesh/whole_axes.h"

namespace cadre::parallel {
namespace {

constexpr size_t kMaxNameBytes = 1 << 16;

// An axis along which a parameter is divided.
struct AxisDivision {
  std::string name;
  // The names of this axis in the mesh of all ranks; several names if the axis was flattened from
  // several.
  std::vector<std::string> whole_axes = {};
  int64_t dim = 0;  // the divided dimension, or kFlat
};
constexpr int64_t kFlat = -1;

// Describes one parameter to the other ranks.
struct Description {
  // All names of the tensor, in the order of the rank's stages.
  std::vector<StageParameter> names = {};
  std::vector<int64_t> sizes = {};
  at::ScalarType dtype = at::kFloat;
  bool is_on_device = false;
  std::vector<AxisDivision> axes = {};
};

Description description_of(std::vector<StageParameter> names, const ParameterShard& record) {
  Description text{.names = std::move(names),
                   .sizes = record.sizes,
                   .dtype = record.values.scalar_type(),
                   .is_on_device = !record.values.is_cpu()};
  for (size_t i = 0; i < record.placements.size(); ++i) {
    const std::string& axis = record.mesh.axes()[i].name;
    const Shard* const shard = record.placements[i].shard();
    if (shard == nullptr && record.flat_axis != axis) continue;
    text.axes.push_back({.name = axis,
                         .whole_axes = mesh::whole_axes_of(record.mesh, axis),
                         .dim = shard != nullptr ? shard->dim : kFlat});
  }
  return text;
}

// Returns a text such as "Double (4, 4), divided along tp in dim 0". The shards that the pipeline
// itself makes (kFlat) are omitted.
std::string form_of(const Description& text) {
  std::string form = format("{} {}", c10::toString(text.dtype), list_of(text.sizes));
  for (const AxisDivision& axis : text.axes) {
    if (axis.dim != kFlat) form += format(", divided along {} in dim {}", axis.name, axis.dim);
  }
  return form;
}

void write_count(size_t count, wire::ByteWriter& out) {
  out.integer(static_cast<uint32_t>(count));
}

void write(const Description& text, wire::ByteWriter& out) {
  write_count(text.names.size(), out);
  for (const auto& [stage, name] : text.names) {
    out.integer(static_cast<int32_t>(stage));
    out.text(name);
  }
  write_count(text.sizes.size(), out);
  for (const int64_t size : text.sizes) out.integer(size);
  out.integer(static_cast<int32_t>(text.dtype));
  out.integer(static_cast<int32_t>(text.is_on_device));
  write_count(text.axes.size(), out);
  for (const AxisDivision& axis : text.axes) {
    out.text(axis.name);
    write_count(axis.whole_axes.size(), out);
    for (const std::string& name : axis.whole_axes) out.text(name);
    out.integer(axis.dim);
  }
}

// Reads a count that write_count() has written, and calls `item` that many times.
void read_each(wire::ByteReader& in, const std::function<void()>& item) {
  for (auto count = in.integer<uint32_t>(); in.ok() && count > 0; --count) item();
}

Description read(wire::ByteReader& in) {
  Description text;
  read_each(in, [&] {
    const auto stage = in.integer<int32_t>();
    text.names.push_back({stage, in.text(kMaxNameBytes)});
  });
  read_each(in, [&] { text.sizes.push_back(in.integer<int64_t>()); });
  text.dtype = static_cast<at::ScalarType>(in.integer<int32_t>());
  text.is_on_device = in.integer<int32_t>() != 0;
  read_each(in, [&] {
    AxisDivision axis{.name = in.text(kMaxNameBytes)};
    read_each(in, [&] { axis.whole_axes.push_back(in.text(kMaxNameBytes)); });
    axis.dim = in.integer<int64_t>();
    text.axes.push_back(std::move(axis));
  });
  return text;
}

// Exchanges the descriptions of all ranks' parameters and returns them by rank. If the stages of
// one rank are invalid, all ranks throw.
std::vector<std::vector<Description>> exchange(
    const ProcessGroup& group, const std::function<std::vector<Description>()>& make_own) {
  const std::vector<std::string> contents = gather_texts(group, kPipelineCall, [&] {
    const std::vector<Description> own = make_own();
    wire::ByteWriter out;
    out.integer(static_cast<uint32_t>(own.size()));
    for (const Description& text : own) write(text, out);
    return std::string(wire::as_text(out.bytes()));
  });
  std::vector<std::vector<Description>> all;
  for (const std::string& content : contents) {
    wire::ByteReader in(wire::as_bytes(content));
    std::vector<Description>& texts = all.emplace_back();
    for (auto count = in.integer<uint32_t>(); in.ok() && count > 0; --count) {
      texts.push_back(read(in));
    }
  }
  return all;
}

// Returns `record` with its mesh extended by the axis of the pipeline.
ParameterShard along_pipeline(ParameterShard record, const DeviceMesh& pipeline) {
  const shard::ParameterDivision whole{record.sizes, pipeline, {Replicate()}};
  record = shard::on_joint_mesh(std::move(record), &whole);
  record.stage_axis = pipeline.axes()[0].name;
  return record;
}

// A rank whose group has no device keeps its records on the CPU.
c10::Device own_device(const DeviceMesh& pipeline) {
  const std::string& axis = pipeline.axes()[0].name;
  return pipeline.group(axis).device().value_or(c10::Device(at::kCPU));
}

struct OwnRecord {
  std::vector<StageParameter> names;
  ParameterShard record;
};

// Returns one record for each tensor of this rank's stages, with all names of the tensor.
std::vector<OwnRecord> own_records(const DeviceMesh& pipeline,
                                   const std::vector<PipelineStage>& stages,
                                   const StageRecords::Form& form) {
  std::vector<OwnRecord> records;
  std::map<const void*, size_t> known;  // the index in `records`
  const DeviceMesh& own_mesh = form.shards ? *form.shards : pipeline;
  for (const PipelineStage& stage : stages) {
    std::vector<ParameterShard> of_shards;
    if (form.sharded != nullptr) of_shards = form.sharded->parameter_shards(stage.stage());
    for (const NamedTensor& parameter : stage.parameters()) {
      const StageParameter name{stage.stage(), parameter.name};
      const auto [place, is_new] =
          known.emplace(parameter.tensor.unsafeGetTensorImpl(), records.size());
      if (!is_new) {
        records[place->second].names.push_back(name);
        continue;
      }
      const auto found = std::ranges::find_if(of_shards, [&](const ParameterShard& shard) {
        return shard.parameter.is_same(parameter.tensor);
      });
      const ParameterShard whole{.name = parameter.name,
                                 .sizes = parameter.tensor.sizes().vec(),
                                 .mesh = own_mesh,
                                 .placements = {own_mesh.axes().size(), Replicate()},
                                 .flat_axis = {},
                                 .range = {.begin = 0, .end = parameter.tensor.numel()},
                                 .values = parameter.tensor,
                                 .parameter = parameter.tensor};
      records.push_back(
          {{name},
           found != of_shards.end()
               ? along_pipeline(std::move(*found), pipeline)
               : along_pipeline(shard::on_joint_mesh(whole, shard::division_of(parameter).get()),
                                pipeline)});
    }
  }
  return records;
}

// Returns the ParameterShard of a parameter that only another rank has; its range is empty. If the
// holder has the parameter on a device, the record is on this rank's device, because all ranks must
// contribute to a gather from memory of the same kind.
ParameterShard empty_record(const Description& text, const DeviceMesh& pipeline) {
  const c10::Device device = text.is_on_device ? own_device(pipeline) : c10::Device(at::kCPU);
  const at::Tensor nothing = at::empty({0}, at::TensorOptions(text.dtype).device(device));
  ParameterShard record{.name = text.names.at(0).name,
                        .sizes = text.sizes,
                        .mesh = pipeline,
                        .placements = {Replicate()},
                        .flat_axis = {},
                        .range = {.begin = 0, .end = 0},
                        .values = nothing,
                        .parameter = nothing};
  for (const AxisDivision& axis : text.axes) {
    shard::ParameterDivision division{
        text.sizes, mesh::axis_over(pipeline, axis.whole_axes, axis.name), {Replicate()}};
    if (axis.dim == kFlat) {
      record.flat_axis = axis.name;
    } else {
      division.placements = {Shard(axis.dim)};
    }
    record = shard::on_joint_mesh(std::move(record), &division);
  }
  record.stage_axis = pipeline.axes()[0].name;
  return record;
}

}  // namespace

StageRecords::StageRecords(const ProcessGroup& group, const DeviceMesh& mesh,
                           const std::vector<PipelineStage>& stages, const Form& form) {
  std::vector<OwnRecord> own;
  const auto all = exchange(group, [&] {
    try {
      std::vector<Description> texts;
      own = own_records(mesh, stages, form);
      for (const auto& [names, record] : own) texts.push_back(description_of(names, record));
      return texts;
    } catch (const Error& error) {
      throw error.with_context(
          "cadre::Pipeline: its axis and those that divide its parameters must come from one mesh "
          "of all ranks, as mesh[\"pp\"] and mesh[\"tp\"]");
    }
  });
  for (int rank = 0; rank < group.world_size(); ++rank) {
    for (size_t i = 0; i < all[rank].size(); ++i) {
      const Description& text = all[rank][i];
      const bool is_held = rank == group.rank();
      entries_.push_back({.stage = text.names.at(0).stage,
                          .names = text.names,
                          .form = form_of(text),
                          .record = is_held ? own[i].record : empty_record(text, mesh),
                          .holder = rank,
                          .is_held = is_held});
    }
  }
  std::ranges::stable_sort(entries_, {}, &Entry::stage);
}

size_t StageRecords::find(const StageParameter& parameter) const {
  const auto found = std::ranges::find_if(
      entries_, [&](const Entry& entry) { return std::ranges::count(entry.names, parameter) > 0; });
  return static_cast<size_t>(found - entries_.begin());
}

std::optional<std::string> StageRecords::difference(
    const std::vector<StageParameter>& parameters) const {
  const size_t first = find(parameters.at(0));
  for (const StageParameter& parameter : parameters) {
    const size_t other = find(parameter);
    if (first == entries_.size() || other == entries_.size()) continue;
    if (entries_[other].form == entries_[first].form) continue;
    return format("\"{}\" of stage {} is {}, but \"{}\" of stage {} is {}", parameters[0].name,
                  parameters[0].stage, entries_[first].form, parameter.name, parameter.stage,
                  entries_[other].form);
  }
  return std::nullopt;
}

void StageRecords::tie(const std::vector<StageParameter>& parameters) {
  Entry& first = entries_.at(find(parameters.at(0)));
  std::set<int> holders = {first.holder};
  std::vector<const Entry*> repeated;
  for (const StageParameter& parameter : std::span(parameters).subspan(1)) {
    Entry& other = entries_.at(find(parameter));
    if (&other == &first) continue;
    other.record.is_copy = true;
    other.record.name = first.record.name;
    if (!holders.insert(other.holder).second) continue;
    if (other.is_held) {
      first.record = other.record;
      first.is_held = true;
    }
    repeated.push_back(&other);
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
