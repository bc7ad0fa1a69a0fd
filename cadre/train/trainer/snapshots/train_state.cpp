#include "cadre/train/trainer/snapshots/train_state.h"

#include <ATen/ops/empty.h>

#include <array>
#include <charconv>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/durable_file.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/wire/hex.h"
#include "cadre/train/checkpoint/file_digests.h"
#include "cadre/train/checkpoint/safetensors.h"
#include "cadre/train/checkpoint/snapshot_folder.h"
#include "cadre/train/checkpoint/snapshot_reader.h"

namespace cadre::train {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kFormatOfWholeFiles = 3;
constexpr int kFormatInParts = 4;
constexpr int kOldestFormat = 1;
constexpr size_t kMaxStateBytes = size_t{64} << 20;
// The files with digests. state.json is among them, so its digest covers all of its fields.
constexpr std::array<std::string_view, 3> kFiles = {kModelFile, kOptimizerFile, "state.json"};

at::Tensor from_hex(const std::string& text) {
  const at::Tensor bytes = at::empty({static_cast<int64_t>(text.size() / 2)}, at::kByte);
  auto* out = bytes.mutable_data_ptr<uint8_t>();
  for (size_t i = 0; i + 1 < text.size(); i += 2, ++out) {
    const char* pair = text.data() + i;
    if (std::from_chars(pair, pair + 2, *out, 16).ptr != pair + 2) {
      throw Error(ErrorCode::kCorruption, "a generator's state is not a hexadecimal number");
    }
  }
  return bytes;
}

std::string hex_of(const at::Tensor& bytes) {
  return wire::to_hex(
      {static_cast<const std::byte*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())});
}

Json to_json(const TrainState& state, int format) {
  Json json = {{"format", format},
               {"step", state.step},
               {"loader", {{"epoch", state.loader.epoch}, {"samples", state.loader.samples}}},
               {"data",
                {{"size", state.data.size},
                 {"fingerprint", cadre::format("{:016x}", state.data.fingerprint)}}},
               {"bucket_layout", state.bucket_layout},
               {"generators", Json::array()},
               {"config", state.config}};
  for (const at::Tensor& generator : state.generators) {
    json["generators"].push_back(hex_of(generator));
  }
  if (!state.device_type.empty()) {
    Json generators = Json::array();
    for (const at::Tensor& generator : state.device_generators) {
      generators.push_back(hex_of(generator));
    }
    json["device"] = {{"type", state.device_type}, {"generators", std::move(generators)}};
  }
  if (state.best_held_out_loss) json["best_held_out_loss"] = *state.best_held_out_loss;
  return json;
}

bool is_in_parts(const std::string& folder) {
  return std::filesystem::exists(cadre::format("{}/{}", folder, kSnapshotManifestName));
}

// Compares the step with the name of the folder. A folder that was copied to a name without a step
// is accepted.
void check_step(const TrainState& state, const std::string& folder) {
  const auto named = SnapshotFolder::step_of_folder(folder);
  if (!named || *named == state.step) return;
  throw Error(ErrorCode::kCorruption,
              cadre::format("its step is {}, but its folder is named {}", state.step,
                            std::filesystem::path(folder).filename().string()));
}

TrainState from_json(const Json& json) {
  const int format = json.at("format").get<int>();
  TrainState state = {.format = format};
  state.step = json.at("step").get<int64_t>();
  state.loader.epoch = json.at("loader").at("epoch").get<int64_t>();
  state.loader.samples = json.at("loader").at("samples").get<int64_t>();
  // Format 1 has only text as data.
  const Json& data = json.at(format == 1 ? "text" : "data");
  state.data.size = data.at(format == 1 ? "num_tokens" : "size").get<int64_t>();
  state.data.fingerprint = std::stoull(data.at("fingerprint").get<std::string>(), nullptr, 16);
  // Earlier versions wrote null for a loss that was NaN, because JSON has no NaN.
  if (json.contains("best_held_out_loss") && !json.at("best_held_out_loss").is_null()) {
    state.best_held_out_loss = json.at("best_held_out_loss").get<double>();
  }
  state.bucket_layout = json.at("bucket_layout").get<std::string>();
  for (const Json& generator : json.at("generators")) {
    state.generators.push_back(from_hex(generator.get<std::string>()));
  }
  if (json.contains("device")) {
    state.device_type = json.at("device").at("type").get<std::string>();
    for (const Json& generator : json.at("device").at("generators")) {
      state.device_generators.push_back(from_hex(generator.get<std::string>()));
    }
  }
  state.config = json.at("config").get<std::string>();
  return state;
}

void check_format(const Json& json, int oldest, int newest) {
  const int format = json.at("format").get<int>();
  if (oldest <= format && format <= newest) return;
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("it has format {}; this program reads formats {} to {} of this file",
                            format, oldest, newest));
}

// Calls `parse`. If it throws because the text of the file is invalid, throws kCorruption with the
// path.
template <typename Parse>
auto parsed(const std::string& path, const Parse& parse) {
  try {
    return parse();
  } catch (const Error& error) {
    throw error.with_context(path);
  } catch (const std::exception& error) {
    // nlohmann::json and std::stoull throw if a field is missing or has another type.
    throw Error(ErrorCode::kCorruption, cadre::format("{}: {}", path, error.what()));
  }
}

TrainState state_in_manifest(const SnapshotReader& reader) {
  const std::string path = cadre::format("{}/{}", reader.path(), kSnapshotManifestName);
  return parsed(path, [&] {
    const Json extra = Json::parse(reader.manifest().extra);
    if (!extra.contains("format")) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the trainer did not write this snapshot, so it has no position in the data to "
                  "resume from; use it as model.weights instead");
    }
    check_format(extra, kFormatInParts, kFormatInParts);
    TrainState state = from_json(extra);
    check_step(state, reader.path());
    return state;
  });
}

}  // namespace

Status write_train_state(const std::string& folder, const TrainState& state,
                         const torch::nn::Module& model,
                         std::span<const ParameterState> optimizer) {
  const auto path_of = [&](std::string_view file) { return cadre::format("{}/{}", folder, file); };
  CADRE_RETURN_IF_ERROR(
      write_safetensors(path_of(kModelFile), named_state(model), {{"format", "pt"}}));
  CADRE_RETURN_IF_ERROR(write_safetensors(path_of(kOptimizerFile), named_states(optimizer)));
  const std::string text = to_json(state, kFormatOfWholeFiles).dump(2) + "\n";
  const std::array<ConstBytes, 1> pieces = {std::as_bytes(std::span(text))};
  CADRE_RETURN_IF_ERROR(os::write_file(folder + "/state.json", pieces));
  return write_digests(folder, kFiles);
}

std::vector<NamedTensor> named_states(std::span<const ParameterState> states) {
  std::vector<NamedTensor> named;
  for (const ParameterState& state : states) {
    for (const auto* tensors : {&state.tensors, &state.scalars}) {
      for (const auto& [key, tensor] : *tensors) {
        named.emplace_back(cadre::format("{}.{}", state.parameter, key), tensor);
      }
    }
  }
  return named;
}

std::vector<ParameterState> states_by_parameter(const std::vector<NamedTensor>& named) {
  std::vector<ParameterState> states;
  std::map<std::string, size_t> places;
  for (const auto& [name, tensor] : named) {
    const size_t dot = name.rfind('.');
    const std::string parameter = name.substr(0, dot);
    const auto [place, is_new] = places.emplace(parameter, states.size());
    if (is_new) states.push_back({.parameter = parameter});
    ParameterState& state = states[place->second];
    (tensor.dim() == 0 ? state.scalars : state.tensors).emplace_back(name.substr(dot + 1), tensor);
  }
  return states;
}

std::string state_text(const TrainState& state) {
  return to_json(state, kFormatInParts).dump();
}

TrainState read_train_state(const std::string& folder) {
  const std::string digests_path = cadre::format("{}/{}", folder, kDigestsName);
  const bool has_digests = std::filesystem::exists(digests_path);
  if (is_in_parts(folder)) {
    if (!has_digests) throw Error(ErrorCode::kCorruption, digests_path + " is missing");
    return state_in_manifest(SnapshotReader::open(folder));
  }
  if (has_digests) check_digests(folder, kFiles).value_or_throw();
  const std::string path = folder + "/state.json";
  if (!std::filesystem::exists(path)) {
    throw Error(ErrorCode::kCorruption, path + " is missing");
  }
  const std::string text = os::read_file(path, kMaxStateBytes).value_or_throw();
  TrainState state = parsed(path, [&] {
    const Json json = Json::parse(text);
    check_format(json, kOldestFormat, kFormatOfWholeFiles);
    TrainState read = from_json(json);
    check_step(read, folder);
    return read;
  });
  if (!has_digests && state.format >= kFirstFormatWithDigests) {
    throw Error(ErrorCode::kCorruption, digests_path + " is missing");
  }
  return state;
}

std::optional<double> best_loss_in(const std::string& folder) {
  if (is_in_parts(folder))
    return state_in_manifest(SnapshotReader::open(folder)).best_held_out_loss;
  const std::string path = folder + "/state.json";
  const std::string text = os::read_file(path, kMaxStateBytes).value_or_throw();
  return parsed(path, [&] { return from_json(Json::parse(text)).best_held_out_loss; });
}

void check_snapshot(const std::string& folder) {
  (void)read_train_state(folder);
  if (is_in_parts(folder)) SnapshotReader::open(folder).check_all_digests();
}

}  // namespace cadre::train
