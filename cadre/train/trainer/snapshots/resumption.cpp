#include "cadre/train/trainer/snapshots/resumption.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/rmsprop.h>

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/train/checkpoint/file_digests.h"
#include "cadre/train/checkpoint/optimizer_state.h"
#include "cadre/train/checkpoint/safetensors.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/snapshot_folder.h"
#include "cadre/train/trainer/config/common_error.h"
#include "cadre/train/trainer/config/config_file.h"
#include "cadre/train/trainer/snapshots/resume_check.h"
#include "cadre/train/trainer/strategy/device_support.h"

namespace cadre::train {
namespace {

// The largest size of the file that identifies a snapshot.
constexpr size_t kMaxIdentityBytes = size_t{64} << 20;

std::vector<std::string> compare_configs(const std::string& before, const Config& now) {
  std::optional<Config> parsed;
  try {
    parsed = parse_config(before, "the snapshot's configuration");
  } catch (const Error& error) {
    return {
        cadre::format("warning: {}; changes since the snapshot are not known", error.message())};
  }
  return check_resumed_config(*parsed, now);
}

void check_data(const std::string& snapshot, const DataIdentity& then, const Task& task) {
  const DataIdentity now = task.data_identity();
  if (then == now) return;
  const std::string difference =
      then.size == now.size
          ? cadre::format("the same number of {}, but with other content", task.item_name())
          : cadre::format("{} {} in the snapshot, {} now", then.size, task.item_name(), now.size);
  throw Error(
      ErrorCode::kInvalidArgument,
      cadre::format("{} was trained on other data: {}; restore the data, or start at step 0 "
                    "with run.resume=none",
                    snapshot, difference));
}

bool is_intact(const std::string& snapshot) {
  try {
    check_snapshot(snapshot);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Returns what the user can do if the snapshot is damaged.
std::string remedy_for(const std::string& snapshot) {
  const SnapshotFolder run(std::filesystem::path(snapshot).parent_path().string());
  std::vector<int64_t> steps = run.steps();
  std::ranges::reverse(steps);
  for (const int64_t step : steps) {
    const std::string other = run.path_of(step);
    if (other != snapshot && is_intact(other)) {
      return cadre::format("another snapshot is intact: run.resume={}", other);
    }
  }
  return "no other snapshot is intact: start at step 0 with run.resume=none";
}

// Adds a remedy only if the snapshot is damaged. After other errors the snapshot is intact: it can
// be used with other settings, or when its files can be read again.
Error with_remedy(const Error& error, const std::string& snapshot) {
  if (error.code() != ErrorCode::kCorruption) return error;
  return Error(error.code(), cadre::format("{}; {}", error.message(), remedy_for(snapshot)));
}

// Adds the step counts that snapshots of earlier versions lack for RMSprop and Adadelta. They were
// not saved, because the updates of these optimizers do not depend on them.
void add_missing_steps(std::vector<ParameterState>& states, int64_t step,
                       const torch::optim::Optimizer& optimizer) {
  const bool has_unused_steps = dynamic_cast<const torch::optim::RMSprop*>(&optimizer) != nullptr ||
                                dynamic_cast<const Adadelta*>(&optimizer) != nullptr;
  if (!has_unused_steps) return;
  for (ParameterState& state : states) {
    if (state.scalars.empty())
      state.scalars.emplace_back("step", at::scalar_tensor(step, at::kLong));
  }
}

// Returns the states in a file of whole optimizer states as tensors of this rank. A state is
// sharded in the same way as its parameter.
SnapshotParts states_in(const std::string& path, const std::vector<SnapshotTensor>& parameters) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  SnapshotParts states;
  for (const std::string& name : file.names()) {
    const std::vector<int64_t>& shape = file.find(name)->shape;
    const auto parameter =
        std::ranges::find(parameters, name.substr(0, name.rfind('.')), &SnapshotTensor::name);
    if (parameter == parameters.end() || (shape.empty() && !parameter->sizes.empty())) {
      // The shape is not that of the parameter: the state is one number for the whole parameter.
      // Otherwise the optimizer will throw an error that names it.
      const at::ScalarType dtype = scalar_type_of(file.find(name)->dtype).value_or(at::kFloat);
      states.parameters.push_back(whole_tensor(name, at::empty(shape, dtype)));
      continue;
    }
    SnapshotTensor& state = states.parameters.emplace_back(*parameter);
    state.name = name;
    state.values = at::empty(parameter->values.sizes(), parameter->values.scalar_type());
  }
  return states;
}

}  // namespace

Resumption::Resumption(std::string snapshot, TrainState state, std::vector<std::string> remarks)
    : snapshot_(std::move(snapshot)), state_(std::move(state)), remarks_(std::move(remarks)) {}

Resumption Resumption::open(const std::string& snapshot, const Config& now, const Task& task) {
  try {
    TrainState state = read_train_state(snapshot);
    check_data(snapshot, state.data, task);
    if (!state.bucket_layout.empty()) BucketLayout::parse(state.bucket_layout);
    std::vector<std::string> remarks = compare_configs(state.config, now);
    if (state.format < kFirstFormatWithDigests) {
      remarks.push_back(
          cadre::format("warning: {} has format {}, which has no digests, so damage to its "
                        "files cannot be detected",
                        snapshot, state.format));
    }
    return Resumption(snapshot, std::move(state), std::move(remarks));
  } catch (const Error& error) {
    throw with_remedy(error, snapshot);
  }
}

std::string Resumption::identity() const {
  const std::string listed = cadre::format("{}/{}", snapshot_, kDigestsName);
  const bool has_digests = std::filesystem::exists(listed);
  const std::string path = has_digests ? listed : snapshot_ + "/state.json";
  const std::string text = os::read_file(path, kMaxIdentityBytes).value_or_throw();
  return cadre::format("that of step {} with the digest {:016x}", state_.step, fnv1a(text));
}

std::optional<BucketLayout> Resumption::bucket_layout() const {
  if (state_.bucket_layout.empty()) return std::nullopt;
  return BucketLayout::parse(state_.bucket_layout);
}

// If the run had fewer ranks when the snapshot was written, the additional ranks have no saved
// state, and keep their present one.
void Resumption::restore_generator(const std::vector<at::Tensor>& states, Rank rank,
                                   const c10::Device& device) const {
  const auto index = static_cast<size_t>(rank.value);
  if (index >= states.size()) return;
  const at::Tensor& state = states[index];
  at::Generator generator = at::globalContext().defaultGenerator(device);
  if (state.numel() != generator.get_state().numel()) {
    throw_wrong_generator(cadre::format("a generator's state has {} bytes instead of {}",
                                        state.numel(), generator.get_state().numel()));
  }
  try {
    generator.set_state(state);
  } catch (const c10::Error& error) {
    throw_wrong_generator(cadre::format("the state of a random generator cannot be loaded: {}",
                                        error.what_without_backtrace()));
  }
}

void Resumption::restore_generators(Rank rank, const c10::Device& device) {
  restore_generator(state_.generators, rank, at::kCPU);
  if (device.is_cpu()) return;
  const std::string type = type_name(device);
  if (state_.device_type == type) {
    restore_generator(state_.device_generators, rank, device);
  } else {
    remarks_.push_back(
        cadre::format("the snapshot was written by a run on {}, so random numbers of {} begin anew",
                      state_.device_type.empty() ? "the CPU" : state_.device_type, type));
  }
}

// If the digests match, the bytes are those that were written, so another version of libtorch wrote
// them.
void Resumption::throw_wrong_generator(const std::string& problem) const {
  if (state_.format < kFirstFormatWithDigests) {
    throw with_remedy(Error(ErrorCode::kCorruption, cadre::format("{}: {}", snapshot_, problem)),
                      snapshot_);
  }
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("{}: {}: it was written with another version of libtorch; resume with "
                            "that one, or start at step 0 with run.resume=none",
                            snapshot_, problem));
}

void Resumption::restore(Strategy& strategy, const ProcessGroup& world) const {
  try {
    const SnapshotParts parts = strategy.parts();
    std::vector<ParameterState> states = load(parts, world);
    strategy.parts_were_filled();
    add_missing_steps(states, state_.step, strategy.local_optimizer());
    load_state_dict(strategy.local_optimizer(), parts.parameters, states,
                    {.allow_none = state_.step == 0});
  } catch (const Error& error) {
    if (is_group_failure(error)) throw;
    if (error.code() != ErrorCode::kInvalidArgument) {
      throw CommonError(with_remedy(error, snapshot_));
    }
    throw CommonError(
        Error(error.code(), cadre::format("{}; restore [model] and [optimizer] as they were when "
                                          "the snapshot was written, or start at step 0 with "
                                          "run.resume=none",
                                          error.message())));
  }
}

// Fills the model and returns this rank's optimizer state.
std::vector<ParameterState> Resumption::load(const SnapshotParts& parts,
                                             const ProcessGroup& world) const {
  if (state_.format >= kFirstFormatInParts) return load_sharded(snapshot_, parts, world).optimizer;
  const std::string model_path = cadre::format("{}/{}", snapshot_, kModelFile);
  const std::string optimizer_path = cadre::format("{}/{}", snapshot_, kOptimizerFile);
  SnapshotParts states;
  on_all_ranks(world, [&] {
    for (const std::string& path : {model_path, optimizer_path}) {
      if (!std::filesystem::exists(path)) {
        throw Error(ErrorCode::kCorruption, path + " is missing");
      }
    }
    states = states_in(optimizer_path, parts.parameters);
  });
  // The digests of all files were already compared when the state was read.
  const LoadOptions options = {.with_optimizer = false, .with_digests = false};
  load_sharded(model_path, parts, world, options);
  load_sharded(optimizer_path, states, world, options);
  std::vector<NamedTensor> named;
  for (const SnapshotTensor& state : states.parameters)
    named.emplace_back(state.name, state.values);
  return states_by_parameter(named);
}

}  // namespace cadre::train
