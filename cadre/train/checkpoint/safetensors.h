// Reads and writes safetensors files. A written file is synced to the disk. Reads copy into memory
// instead of mapping the file: if another process truncated a mapped file, reading it would end
// this process with SIGBUS.
//
// Threads: one at a time for a file; different files from any. Blocking: reads and writes a disk.
// Lifetime: a tensor that was read owns its memory. Errors: a Status or an exception, as declared:
// kUnavailable for errors of the disk, kCorruption for an invalid file, kInvalidArgument for a
// tensor that the format does not support or a name that is not in the file. Source: the
// safetensors format, docs/formats/safetensors.md.
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

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/os/file_system.h"
#include "cadre/core/os/files/versioned_file.h"
#include "cadre/core/wire/safetensors_header.h"
#include "cadre/train/checkpoint/module_file.h"

namespace cadre {

// Convert a dtype to its name in the format, for example "F32", and back. Return nullopt for a
// dtype that the other side does not have.
std::optional<std::string_view> safetensors_dtype(at::ScalarType type);
CADRE_EXPORT std::optional<at::ScalarType> scalar_type_of(std::string_view safetensors_dtype);

// Returns why a tensor in a file cannot have this name, for example "is no UTF-8 text"; nullopt if
// the name is valid.
std::optional<std::string_view> problem_of_name(std::string_view name);

// Writes dense tensors of any device, shape and strides, with distinct names. The file has no trace
// of the device. The file is written in full and synced, but not atomically: write to a temporary
// name, or into a folder that is renamed when complete.
CADRE_EXPORT Status write_safetensors(const std::string& path,
                                      const std::vector<NamedTensor>& tensors,
                                      const std::map<std::string, std::string>& metadata = {});

// Overload for a given file system.
Status write_safetensors(os::FileSystem& files, const std::string& path,
                         const std::vector<NamedTensor>& tensors,
                         const std::map<std::string, std::string>& metadata);

struct WrittenFile {
  uint64_t bytes = 0;
  std::string digest;  // the digest of the written bytes, as of wire::blake2b_hex()
};
Result<WrittenFile> write_and_digest_safetensors(
    os::FileSystem& files, const std::string& path, const std::vector<NamedTensor>& tensors,
    const std::map<std::string, std::string>& metadata);

class CADRE_EXPORT SafetensorsFile {
 public:
  // Opens the file and checks its whole header before any tensor is read.
  static SafetensorsFile open(const std::string& path);

  // check_unwritten() and check_unchanged() throw kInvalidArgument if another process changed the
  // file, because the tensors that were read may then be a mixture of both contents.
  // check_unwritten() throws if the open file was written to; check_unchanged() also throws if the
  // path now leads to another file, because other ranks may have read that one.
  void check_unwritten() const;
  void check_unchanged() const;

  // Returns the names, in the order of the file.
  std::vector<std::string> names() const;
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  // Returns a copy of the tensor.
  at::Tensor read(const std::string& name) const;
  std::vector<NamedTensor> read_all() const;
  // Returns null if the file has no tensor of this name.
  const wire::SafetensorsEntry* find(const std::string& name) const;
  // Fills `out` with the tensor's bytes, beginning at byte `offset` of the tensor. Throws
  // kCorruption if the file was cut short after it was opened.
  void read_bytes(const wire::SafetensorsEntry& entry, size_t offset, Bytes out) const;

 private:
  SafetensorsFile(os::VersionedFile file, wire::SafetensorsHeader header);
  at::Tensor read(const wire::SafetensorsEntry& entry) const;
  void check_same(const os::FileVersion& now) const;

  os::VersionedFile file_;
  wire::SafetensorsHeader header_;
  // Maps each name to its index in header_.tensors.
  std::map<std::string, size_t, std::less<>> by_name_;
};

// Returns the last part of the error message for a file or snapshot that has num_tensors tensors,
// among them `name`, but none of the tensors of the model.
std::string saved_by_another_model(size_t num_tensors, std::string_view name);

}  // namespace cadre
