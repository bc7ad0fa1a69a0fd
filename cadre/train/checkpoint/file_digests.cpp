#include "cadre/train/checkpoint/file_digests.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <system_error>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/durable_file.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/files/native_file_system.h"
#include "cadre/core/os/files/versioned_file.h"
#include "cadre/core/wire/blake2b.h"

namespace cadre {
namespace {

constexpr size_t kMaxBytes = size_t{16} << 20;
constexpr std::string_view kSeparator = "  ";
constexpr std::string_view kHexDigits = "0123456789abcdef";

std::string path_in(const std::string& folder, std::string_view name) {
  return cadre::format("{}/{}", folder, name);
}

// Maps the name of each file to its digest.
using Digests = std::map<std::string, std::string, std::less<>>;

// Returns nullopt for a text that differs from the format of write_digests().
std::optional<Digests> parse_digests(std::string_view text) {
  Digests digests;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) return std::nullopt;
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    const std::string_view digest = line.substr(0, wire::kBlake2bHexDigits);
    const std::string_view rest = line.substr(digest.size());
    if (digest.size() != wire::kBlake2bHexDigits ||
        digest.find_first_not_of(kHexDigits) != std::string_view::npos ||
        !rest.starts_with(kSeparator) || rest.size() == kSeparator.size()) {
      return std::nullopt;
    }
    digests.emplace(rest.substr(kSeparator.size()), digest);
  }
  return digests;
}

Error corruption(const std::string& path, const std::string& what) {
  return Error(ErrorCode::kCorruption, cadre::format("{}: {}", path, what));
}

}  // namespace

Error corruption_of_cut_file(const Error& error) {
  if (error.code() != ErrorCode::kInvalidArgument) return error;
  return Error(ErrorCode::kCorruption, error.message());
}

Result<std::string> digest_of(const std::string& path) {
  std::error_code failure;
  if (!std::filesystem::exists(path, failure)) {
    return Error(ErrorCode::kCorruption, cadre::format("{} is missing", path));
  }
  const auto file = os::VersionedFile::open(path);
  if (!file.ok()) return file.error();
  os::FilePieces pieces(*file);
  auto digest = wire::blake2b_hex([&pieces] { return pieces.next(); });
  if (!digest.ok()) return corruption_of_cut_file(digest.error());
  return digest;
}

Status write_digests(const std::string& folder, std::span<const std::string_view> names) {
  std::vector<FileDigest> digests;
  for (const std::string_view name : names) {
    auto digest = digest_of(path_in(folder, name));
    if (!digest.ok()) return digest.error();
    digests.push_back({.name = std::string(name), .digest = std::move(digest).value()});
  }
  os::NativeFileSystem files;
  return write_digest_list(files, folder, digests);
}

Status write_digest_list(os::FileSystem& files, const std::string& folder,
                         std::span<const FileDigest> digests) {
  std::string text;
  for (const auto& [name, digest] : digests) {
    text += cadre::format("{}{}{}\n", digest, kSeparator, name);
  }
  const std::array<ConstBytes, 1> pieces = {std::as_bytes(std::span(text))};
  return os::write_file(files, path_in(folder, kDigestsName), pieces);
}

Status check_digests(const std::string& folder, std::span<const std::string_view> names) {
  const std::string list = path_in(folder, kDigestsName);
  const auto text = os::read_file(list, kMaxBytes);
  if (!text.ok()) return text.error();
  const auto digests = parse_digests(*text);
  if (!digests)
    return corruption(list, "a line is not a digest and a file name; the file is damaged");
  for (const std::string_view name : names) {
    const auto expected = digests->find(name);
    if (expected == digests->end()) {
      return corruption(list, cadre::format("it has no digest of {}; the file is damaged", name));
    }
    const auto actual = digest_of(path_in(folder, name));
    if (!actual.ok()) return actual.error();
    if (*actual != expected->second) {
      return corruption(
          path_in(folder, name),
          cadre::format("its bytes do not match its digest in {}: one of the two files is damaged, "
                        "or of another snapshot",
                        kDigestsName));
    }
  }
  return {};
}

}  // namespace cadre
