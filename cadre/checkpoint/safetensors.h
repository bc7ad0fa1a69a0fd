// Tensors in files that any safetensors reader understands: written durably, read by mapping.
//
// Threads: one at a time for a file; different files from any. Blocking: for the time of the disk.
// Lifetime: a tensor that was read owns its memory. Errors: as Status or by exception, as declared:
// kUnavailable for the disk, kCorruption for a file that is not valid, kInvalidArgument for a
// tensor that the format cannot hold or a name that the file does not have. Source: the safetensors
// format, docs/formats/safetensors.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/base/export.h"
#include "cadre/os/files/read_only_file.h"
#include "cadre/wire/safetensors_header.h"

namespace cadre {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// The format's name of a dtype, "F32", and the reverse; nullopt for one that the other side lacks.
std::optional<std::string_view> safetensors_dtype(at::ScalarType type);
std::optional<at::ScalarType> scalar_type_of(std::string_view safetensors_dtype);

// Dense CPU tensors of any shape and strides, with distinct names. Written in full and synced, but
// not atomic: write to a temporary name, or into a folder that is renamed when complete.
CADRE_EXPORT Status write_safetensors(const std::string& path, const NamedTensors& tensors,
                                      const std::map<std::string, std::string>& metadata = {});

class CADRE_EXPORT SafetensorsFile {
 public:
  // Checks the whole header before anything is read.
  static SafetensorsFile open(const std::string& path);

  // In the order of the file.
  std::vector<std::string> names() const;
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  // A copy.
  at::Tensor read(const std::string& name) const;
  NamedTensors read_all() const;
  // Null for a name that the file does not have.
  const SafetensorsEntry* find(const std::string& name) const;
  // The elements of a tensor of this file, in the mapping of the file: valid as long as this.
  ConstBytes bytes(const SafetensorsEntry& entry) const;

 private:
  SafetensorsFile(std::string path, os::ReadOnlyFile file, SafetensorsHeader header);
  at::Tensor read(const SafetensorsEntry& entry) const;

  std::string path_;
  os::ReadOnlyFile file_;
  SafetensorsHeader header_;
  std::map<std::string, size_t, std::less<>> by_name_;  // index of header_.tensors
};

}  // namespace cadre
