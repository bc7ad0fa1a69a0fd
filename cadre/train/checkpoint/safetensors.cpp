#include "cadre/train/checkpoint/safetensors.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <span>
#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/core/os/files/durable_file.h"
#include "cadre/core/os/files/native_file_system.h"
#include "cadre/core/wire/blake2b.h"
#include "cadre/train/checkpoint/file_digests.h"

namespace cadre {
namespace {

struct DTypeName {
  at::ScalarType type;
  std::string_view name;
};
constexpr std::array<DTypeName, 14> kDTypeNames = {{{at::kBool, "BOOL"},
                                                    {at::kByte, "U8"},
                                                    {at::kChar, "I8"},
                                                    {at::kShort, "I16"},
                                                    {at::kUInt16, "U16"},
                                                    {at::kHalf, "F16"},
                                                    {at::kBFloat16, "BF16"},
                                                    {at::kInt, "I32"},
                                                    {at::kUInt32, "U32"},
                                                    {at::kFloat, "F32"},
                                                    {at::kDouble, "F64"},
                                                    {at::kLong, "I64"},
                                                    {at::kUInt64, "U64"},
                                                    {at::kComplexFloat, "C64"}}};

ConstBytes bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// The content of a file: its header, and the bytes of each tensor.
struct Content {
  std::string header;
  // Maps names to contiguous copies, which keep the bytes in memory until they are written.
  std::map<std::string_view, at::Tensor> contiguous;
  std::vector<ConstBytes> pieces;
};

Status check_writable(const std::vector<NamedTensor>& tensors) {
  std::set<std::string_view> names;
  for (const auto& [name, tensor] : tensors) {
    if (!names.insert(name).second) {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("safetensors: two tensors are named '{}'", name));
    }
    if (const auto problem = problem_of_name(name)) {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("safetensors: the name '{}' {}", name, *problem));
    }
    const bool is_plain = tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta();
    if (!is_plain || !safetensors_dtype(tensor.scalar_type())) {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("safetensors: '{}' is {}; expected a dense tensor of a dtype "
                                 "that the format has{}",
                                 name, tensor.defined() ? tensor.toString() : "undefined",
                                 tensor.defined() && tensor.is_meta()
                                     ? "; call cadre::materialize() for a module of defer_init()"
                                     : ""));
    }
  }
  return {};
}

Status lay_out(const std::vector<NamedTensor>& tensors,
               const std::map<std::string, std::string>& metadata, Content& content) {
  CADRE_RETURN_IF_ERROR(check_writable(tensors));
  std::vector<wire::SafetensorsEntry> entries;
  for (const auto& [name, tensor] : tensors) {
    // If a tensor is lazily conjugated or negated, its memory does not have its values yet. A copy
    // from a device waits for the work on the caller's stream.
    content.contiguous.emplace(name, tensor.resolve_conj().resolve_neg().contiguous().to(at::kCPU));
    entries.push_back({.name = name,
                       .dtype = std::string(*safetensors_dtype(tensor.scalar_type())),
                       .shape = tensor.sizes().vec()});
  }
  const wire::SafetensorsHeader header = wire::lay_out_safetensors(std::move(entries), metadata);
  content.header = wire::encode_safetensors_header(header);
  content.pieces = {std::as_bytes(std::span(content.header))};
  for (const wire::SafetensorsEntry& entry : header.tensors) {
    content.pieces.push_back(bytes_of(content.contiguous.at(entry.name)));
  }
  return {};
}

void read_or_throw(const os::VersionedFile& file, size_t offset, Bytes out) {
  const Status status = file.read_at(offset, out);
  if (!status.ok()) throw corruption_of_cut_file(status.error());
}

// Returns the first 8 bytes (the header's length) and, if that length is plausible, the header.
std::vector<std::byte> read_prefix(const os::VersionedFile& file) {
  const uint64_t num_bytes = file.version().num_bytes;
  std::vector<std::byte> prefix(std::min<uint64_t>(wire::kSafetensorsLengthBytes, num_bytes));
  read_or_throw(file, 0, prefix);
  const uint64_t length = wire::safetensors_header_bytes(prefix);
  if (length == 0 || length > wire::kMaxSafetensorsHeaderBytes) return prefix;
  prefix.resize(std::min<uint64_t>(prefix.size() + length, num_bytes));
  read_or_throw(file, 0, prefix);
  return prefix;
}

// Returns whether torch::save() wrote the file: it writes zip archives.
bool is_zip_archive(ConstBytes bytes) {
  constexpr std::string_view kMagic = "PK\x03\x04";
  return bytes.size() >= kMagic.size() &&
         std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) == 0;
}

}  // namespace

std::optional<std::string_view> safetensors_dtype(at::ScalarType type) {
  const auto found = std::ranges::find(kDTypeNames, type, &DTypeName::type);
  if (found == kDTypeNames.end()) return std::nullopt;
  return found->name;
}

std::optional<at::ScalarType> scalar_type_of(std::string_view safetensors_dtype) {
  const auto found = std::ranges::find(kDTypeNames, safetensors_dtype, &DTypeName::name);
  if (found == kDTypeNames.end()) return std::nullopt;
  return found->type;
}

std::optional<std::string_view> problem_of_name(std::string_view name) {
  if (!is_utf8(name)) return "is no UTF-8 text";
  if (name == wire::kSafetensorsMetadataKey) return "is reserved by the safetensors format";
  return std::nullopt;
}

Result<WrittenFile> write_and_digest_safetensors(
    os::FileSystem& files, const std::string& path, const std::vector<NamedTensor>& tensors,
    const std::map<std::string, std::string>& metadata) {
  Content content;
  CADRE_RETURN_IF_ERROR(lay_out(tensors, metadata, content));
  CADRE_RETURN_IF_ERROR(os::write_file(files, path, content.pieces));
  auto digest = wire::blake2b_hex(content.pieces);
  if (!digest.ok()) return digest.error();
  WrittenFile written{.bytes = 0, .digest = std::move(digest).value()};
  for (const ConstBytes piece : content.pieces) written.bytes += piece.size();
  return written;
}

Status write_safetensors(os::FileSystem& files, const std::string& path,
                         const std::vector<NamedTensor>& tensors,
                         const std::map<std::string, std::string>& metadata) {
  Content content;
  CADRE_RETURN_IF_ERROR(lay_out(tensors, metadata, content));
  return os::write_file(files, path, content.pieces);
}

Status write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                         const std::map<std::string, std::string>& metadata) {
  os::NativeFileSystem files;
  return write_safetensors(files, path, tensors, metadata);
}

SafetensorsFile::SafetensorsFile(os::VersionedFile file, wire::SafetensorsHeader header)
    : file_(std::move(file)), header_(std::move(header)) {
  for (size_t i = 0; i < header_.tensors.size(); ++i) by_name_.emplace(header_.tensors[i].name, i);
}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  os::VersionedFile file = os::VersionedFile::open(path).value_or_throw();
  const std::vector<std::byte> prefix = read_prefix(file);
  Result<wire::SafetensorsHeader> header =
      wire::parse_safetensors_header(prefix, file.version().num_bytes);
  if (!header.ok()) {
    if (is_zip_archive(prefix)) {
      throw Error(
          ErrorCode::kCorruption,
          cadre::format("{} is no safetensors file: torch::save() wrote it, so read it with "
                        "torch::load() and write it with cadre::save()",
                        path));
    }
    throw header.error().with_context(path + " is no safetensors file, or is damaged");
  }
  return SafetensorsFile(std::move(file), std::move(header).value());
}

void SafetensorsFile::check_unwritten() const {
  check_same(file_.current_version().value_or_throw());
}

void SafetensorsFile::check_unchanged() const {
  check_same(os::file_version(file_.path()).value_or_throw());
}

void SafetensorsFile::check_same(const os::FileVersion& now) const {
  if (now == file_.version()) return;
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("{} {} while it was read; load it again once nothing writes it",
                            file_.path(), os::change_text(file_.version(), now)));
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const wire::SafetensorsEntry& entry : header_.tensors) names.push_back(entry.name);
  return names;
}

at::Tensor SafetensorsFile::read(const std::string& name) const {
  const wire::SafetensorsEntry* entry = find(name);
  if (entry == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("{} has no tensor '{}'", file_.path(), name));
  }
  return read(*entry);
}

const wire::SafetensorsEntry* SafetensorsFile::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &header_.tensors[found->second];
}

void SafetensorsFile::read_bytes(const wire::SafetensorsEntry& entry, size_t offset,
                                 Bytes out) const {
  read_or_throw(file_, header_.data_offset + entry.begin + offset, out);
}

std::vector<NamedTensor> SafetensorsFile::read_all() const {
  std::vector<NamedTensor> tensors;
  for (const wire::SafetensorsEntry& entry : header_.tensors) {
    tensors.emplace_back(entry.name, read(entry));
  }
  return tensors;
}

at::Tensor SafetensorsFile::read(const wire::SafetensorsEntry& entry) const {
  const auto dtype = scalar_type_of(entry.dtype);
  if (!dtype) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("{}: tensor '{}' has dtype {}, which this library cannot hold",
                              file_.path(), entry.name, entry.dtype));
  }
  const at::Tensor tensor = at::empty(entry.shape, *dtype);
  // The check of the header has compared the tensor's byte range with its dtype and shape, so
  // `tensor` has exactly as many bytes as the range.
  read_bytes(entry, 0, {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()});
  return tensor;
}

std::string saved_by_another_model(size_t num_tensors, std::string_view name) {
  return cadre::format(
      "; its {} tensors have other names, such as '{}', so another model has saved it. Load it "
      "into "
      "a model with these names, or pass the path of what this model has saved",
      num_tensors, name);
}

}  // namespace cadre
