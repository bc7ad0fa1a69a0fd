#include "cadre/train/data/tokens/token_dataset.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <limits>
#include <system_error>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/files/versioned_file.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/tokens/token_file_header.h"
#include "cadre/train/data/content_hash.h"
#include "cadre/train/data/versioned_files.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kNumProbes = 16;
constexpr uint64_t kProbeBytes = 4096;

std::vector<std::string> token_files_of(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return {path};
  std::vector<std::string> paths;
  for (fs::directory_iterator entry(path, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    if (entry->path().extension() == ".bin") paths.push_back(entry->path().string());
  }
  if (error) {
    throw Error(ErrorCode::kUnavailable, cadre::format("list {}: {}", path, error.message()));
  }
  std::ranges::sort(paths);
  if (paths.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("TokenDataset: {} has no file whose name ends in .bin", path));
  }
  return paths;
}

// Returns the hash of the bytes at kNumProbes places of the file, from its begin to its end.
uint64_t probe(const os::VersionedFile& file) {
  const uint64_t num_bytes = file.version().num_bytes;
  const uint64_t count = std::min(num_bytes, kProbeBytes);
  std::vector<std::byte> bytes(static_cast<size_t>(count));
  ContentHash hash;
  for (uint64_t i = 0; i < kNumProbes; ++i) {
    const auto offset = static_cast<size_t>((num_bytes - count) / (kNumProbes - 1) * i);
    file.read_at(offset, bytes).value_or_throw();
    hash.add(wire::as_text(bytes));
  }
  return hash.value();
}

// Widens the tokens, which are little-endian integers, into `out`.
template <typename Token>
void widen(ConstBytes bytes, int64_t* out) {
  for (size_t i = 0; i < bytes.size() / sizeof(Token); ++i) {
    std::array<uint8_t, sizeof(Token)> token{};
    std::memcpy(token.data(), bytes.data() + i * sizeof(Token), sizeof(Token));
    // Compilers make one load of this, or one with the bytes swapped.
    uint64_t value = 0;
    for (size_t byte = 0; byte < sizeof(Token); ++byte)
      value |= uint64_t{token[byte]} << (8 * byte);
    out[i] = static_cast<int64_t>(value);
  }
}

}  // namespace

struct TokenDataset::Contents {
  struct File {
    std::string path;
    os::FileVersion version;
    int64_t num_tokens = 0;
    uint64_t first_byte = 0;  // where the tokens begin
    int bytes_per_token = 2;
    int64_t end_sample = 0;  // the number of samples of this file and the files before it
  };

  explicit Contents(const TokenDatasetOptions& chosen) : options(chosen) {}

  void add(const std::string& path);
  // Copies the length + 1 tokens of a sample.
  void read(int64_t sample, int64_t* out) const;

  TokenDatasetOptions options;
  std::vector<File> files;
  int64_t num_tokens = 0;
  Fnv1a hash;
  mutable VersionedFiles open_files;  // a cache, with a mutex of its own
};

void TokenDataset::Contents::add(const std::string& path) {
  const os::VersionedFile file = os::VersionedFile::open(path).value_or_throw();
  const uint64_t num_bytes = file.version().num_bytes;
  File added{.path = path, .version = file.version()};
  if (options.format == TokenFormat::kWithHeader) {
    std::vector<std::byte> begin(
        static_cast<size_t>(std::min<uint64_t>(num_bytes, wire::kTokenFileHeaderBytes)));
    file.read_at(0, begin).value_or_throw();
    const auto header = wire::parse_token_file_header(begin, num_bytes);
    if (!header.ok()) {
      throw Error(header.error().code(),
                  cadre::format("TokenDataset: {} {}", path, header.error().message()));
    }
    added.num_tokens = header->num_tokens;
    added.first_byte = wire::kTokenFileHeaderBytes;
    added.bytes_per_token = header->bytes_per_token;
  } else {
    added.bytes_per_token = options.format == TokenFormat::kPlainUint16 ? 2 : 4;
    const auto width = static_cast<uint64_t>(added.bytes_per_token);
    if (num_bytes % width != 0) {
      throw Error(ErrorCode::kCorruption,
                  cadre::format("TokenDataset: {} at byte {}: the file ends within a token; "
                                "expected a multiple of {} bytes",
                                path, num_bytes / width * width, width));
    }
    added.num_tokens = static_cast<int64_t>(num_bytes / width);
  }
  const int64_t before = files.empty() ? 0 : files.back().end_sample;
  added.end_sample = before + std::max<int64_t>(added.num_tokens - 1, 0) / options.length;
  num_tokens += added.num_tokens;
  hash.add(num_bytes);
  if (num_bytes > 0) hash.add(probe(file));
  files.push_back(std::move(added));
}

void TokenDataset::Contents::read(int64_t sample, int64_t* out) const {
  const auto found = std::ranges::upper_bound(files, sample, {}, &File::end_sample);
  const int64_t before = found == files.begin() ? 0 : std::prev(found)->end_sample;
  const auto width = static_cast<uint64_t>(found->bytes_per_token);
  const uint64_t offset =
      found->first_byte + static_cast<uint64_t>((sample - before) * options.length) * width;
  std::vector<std::byte> bytes(static_cast<size_t>(options.length + 1) * width);
  open_files.read(static_cast<size_t>(found - files.begin()), found->path, found->version, offset,
                  bytes);
  if (width == 2) {
    widen<uint16_t>(bytes, out);
  } else {
    widen<uint32_t>(bytes, out);
  }
  if (!options.vocabulary_size) return;
  for (int64_t i = 0; i <= options.length; ++i) {
    if (out[i] < *options.vocabulary_size) continue;
    throw Error(ErrorCode::kCorruption,
                cadre::format("TokenDataset: {} at byte {}: the token is {}; expected one below "
                              "the vocabulary size of {}",
                              found->path, offset + static_cast<uint64_t>(i) * width, out[i],
                              *options.vocabulary_size));
  }
}

TokenDataset::TokenDataset(const std::string& path, const TokenDatasetOptions& options)
    : TokenDataset(token_files_of(path), options) {}

TokenDataset::TokenDataset(const std::vector<std::string>& paths,
                           const TokenDatasetOptions& options)
    : contents_(std::make_unique<Contents>(options)) {
  // The bound keeps the number of bytes of a sample far from an overflow.
  constexpr int64_t kMaxLength = int64_t{1} << 40;
  if (options.length < 1 || options.length > kMaxLength || paths.empty() ||
      options.vocabulary_size.value_or(1) < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("TokenDataset: a length of {} over {} files with a vocabulary of {}; "
                              "expected a length in [1, 2^40], a file, and a vocabulary of at "
                              "least 1 token",
                              options.length, paths.size(), options.vocabulary_size.value_or(1)));
  }
  contents_->hash.add(static_cast<uint64_t>(options.length));
  for (const std::string& path : paths) contents_->add(path);
}

TokenDataset::TokenDataset(TokenDataset&&) noexcept = default;
TokenDataset& TokenDataset::operator=(TokenDataset&&) noexcept = default;
TokenDataset::~TokenDataset() = default;

const TokenDataset::Contents& TokenDataset::contents() const {
  if (contents_ == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "TokenDataset: this dataset was moved from; use the one that it was moved into");
  }
  return *contents_;
}

int64_t TokenDataset::size() const {
  return contents().files.back().end_sample;
}

int64_t TokenDataset::num_tokens() const {
  return contents().num_tokens;
}

int64_t TokenDataset::num_files() const {
  return static_cast<int64_t>(contents().files.size());
}

std::optional<uint64_t> TokenDataset::digest() const {
  return contents().hash.value();
}

Batch TokenDataset::get(std::span<const int64_t> indices) const {
  const int64_t length = contents().options.length;
  for (const int64_t index : indices) {
    if (index < 0 || index >= size()) {
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("TokenDataset: sample {} does not exist; the dataset has {} "
                                "samples",
                                index, size()));
    }
  }
  // Data and target are views of the same rows, shifted by one token.
  const at::Tensor rows = at::empty({static_cast<int64_t>(indices.size()), length + 1}, at::kLong);
  auto* out = rows.mutable_data_ptr<int64_t>();
  for (const int64_t index : indices) {
    contents().read(index, out);
    out += length + 1;
  }
  return {.data = rows.narrow(1, 0, length), .target = rows.narrow(1, 1, length)};
}

void write_token_file(const std::string& path, std::span<const int64_t> tokens) {
  if (std::ssize(tokens) > wire::kMaxTokensOfFile) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("write_token_file: {} tokens for {}; expected at most {}: divide "
                              "them into several files",
                              tokens.size(), path, wire::kMaxTokensOfFile));
  }
  int64_t largest = 0;
  for (const int64_t token : tokens) {
    if (token < 0 || token > std::numeric_limits<uint32_t>::max()) {
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("write_token_file: the token {} for {}; expected 0 to 2^32 - 1",
                                token, path));
    }
    largest = std::max(largest, token);
  }
  const bool is_narrow = largest <= std::numeric_limits<uint16_t>::max();
  const auto header = wire::encode_token_file_header(
      {.num_tokens = std::ssize(tokens), .bytes_per_token = is_narrow ? 2 : 4});
  wire::ByteWriter out;
  out.raw(header);
  for (const int64_t token : tokens) {
    if (is_narrow) {
      out.integer(static_cast<uint16_t>(token));
    } else {
      out.integer(static_cast<uint32_t>(token));
    }
  }
  os::replace_file(path, out.bytes()).value_or_throw();
}

}  // namespace cadre
