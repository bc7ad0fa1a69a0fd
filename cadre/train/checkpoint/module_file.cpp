#include "cadre/train/checkpoint/module_file.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <map>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/durable_file.h"
#include "cadre/core/os/files/native_file_system.h"
#include "cadre/tensor/hooks/shard_mark.h"
#include "cadre/train/checkpoint/on_file_system.h"
#include "cadre/train/checkpoint/planning/shared_memory.h"
#include "cadre/train/checkpoint/safetensors.h"

namespace cadre {

std::vector<NamedTensor> named_state(const torch::nn::Module& module) {
  std::vector<NamedTensor> state;
  for (const auto& item : module.named_parameters()) state.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) state.emplace_back(item.key(), item.value());
  return state;
}

namespace {

void refuse_shards(const std::vector<NamedTensor>& state, std::string_view call) {
  for (const auto& [name, tensor] : state) {
    wrap::refuse_shard_as_whole(
        name, tensor, call,
        "A file of one module holds whole parameters: use save_sharded() and load_sharded() with "
        "cadre::parts_of(records, module)");
  }
}

}  // namespace

void save(const torch::nn::Module& module, const std::string& path) {
  os::NativeFileSystem files;
  save(module, files, path);
}

void save(const torch::nn::Module& module, os::FileSystem& files, const std::string& path) {
  const std::vector<NamedTensor> state = named_state(module);
  refuse_shards(state, "save");
  const std::string temporary = files.create_beside(path).value_or_throw();
  Status saved = write_safetensors(files, temporary, state, {{"format", "pt"}});
  if (saved.ok()) saved = os::rename_path(files, temporary, path);
  if (!saved.ok()) (void)os::remove_all(files, temporary);
  saved.value_or_throw();
}

void load(torch::nn::Module& module, const std::string& path) {
  const std::vector<NamedTensor> state = named_state(module);
  refuse_shards(state, "load");
  const SafetensorsFile file = SafetensorsFile::open(path);
  std::vector<NamedTensor> read = file.read_all();
  file.check_unwritten();
  std::map<std::string, at::Tensor> by_name;
  for (auto& [name, tensor] : read) by_name.emplace(std::move(name), std::move(tensor));
  // If the module has one tensor under two names (tied weights), the file may have only one of
  // them.
  std::set<const void*> in_file;
  for (const auto& [name, tensor] : state) {
    if (by_name.contains(name)) in_file.insert(tensor.unsafeGetTensorImpl());
  }
  // Each pair is the target and the source of one copy.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  std::vector<PlannedWrite> writes;
  for (const auto& [name, tensor] : state) {
    const auto found = by_name.find(name);
    if (found == by_name.end()) {
      if (in_file.contains(tensor.unsafeGetTensorImpl())) continue;
      const bool is_of_other_model = in_file.empty() && !by_name.empty();
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("{} has no tensor '{}', which the model needs{}", path, name,
                                is_of_other_model
                                    ? saved_by_another_model(by_name.size(), by_name.begin()->first)
                                    : std::string()));
    }
    if (found->second.sizes() != tensor.sizes() ||
        found->second.scalar_type() != tensor.scalar_type()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          cadre::format("{}: tensor '{}' is {} {}, but the model has {} {}", path, name,
                        c10::toString(found->second.scalar_type()), c10::str(found->second.sizes()),
                        c10::toString(tensor.scalar_type()), c10::str(tensor.sizes())));
    }
    copies.emplace_back(tensor, found->second);
    writes.push_back({.name = name, .target = tensor, .values = [&found_values = found->second] {
                        return found_values.contiguous().view({-1});
                      }});
  }
  if (by_name.size() != copies.size()) {
    for (const auto& [name, tensor] : state) by_name.erase(name);
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("{} has a tensor '{}', which the model does not", path,
                              by_name.begin()->first));
  }
  try {
    check_shared_memory(writes);
  } catch (const Error& error) {
    throw error.with_context(path);
  }
  const at::NoGradGuard no_grad;
  for (const auto& [to, from] : copies) to.copy_(from);
}

}  // namespace cadre
