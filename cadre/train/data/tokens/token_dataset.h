// Samples for next-token prediction from files of tokens: those of llm.c, or plain arrays of 16 or
// 32 bits as nanoGPT has them. The tokens stay in their files.
//
// With a keyed sampler, or as a stream (stream_dataset), an epoch over any number of tokens takes
// no memory for its order. Reads copy from the system's cache, which the ranks of a host share; a
// mapping would share it, too, but would end the process (SIGBUS) when a file is truncated.
//
// Threads: all methods are const and may be called from any thread. Blocking: the constructor reads
// the headers and some tokens of each file; get() may wait for the disk. Lifetime: up to 64
// descriptors. Errors: kInvalidArgument for a length below 1, without files, and for a file that
// has changed since; kCorruption, with path and offset, for a damaged header, a size that does not
// fit, and a token that is not in the vocabulary; kUnavailable for a file that cannot be read.
// Format: docs/formats/token-file.md. Guide: docs/guide/training/data.md.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/train/data/dataset.h"

namespace cadre {

enum class TokenFormat : uint8_t {
  kWithHeader,   // llm.c: the header tells the size of a token
  kPlainUint16,  // no header; 16 bits, little-endian
  kPlainUint32,  // no header; 32 bits, little-endian
};

struct TokenDatasetOptions {
  int64_t length = 1024;  // the number of tokens of a sample's data, and of its target
  TokenFormat format = TokenFormat::kWithHeader;
  // If set, get() refuses a token that is not in [0, vocabulary_size).
  std::optional<int64_t> vocabulary_size = {};
};

// A file of n tokens has (n - 1) / length samples: sample i of the file has the tokens [i * length,
// i * length + length + 1), its data the first `length` of them, its target the last. No sample
// reaches into another file, and each token is predicted at most once. data, target: (B, length)
// int64.
class CADRE_EXPORT TokenDataset : public Dataset {
 public:
  // path: a file, or a folder, whose files that end in ".bin" are read in the order of their names.
  TokenDataset(const std::string& path, const TokenDatasetOptions& options);
  // paths: the files, in the order of the samples.
  TokenDataset(const std::vector<std::string>& paths, const TokenDatasetOptions& options);
  TokenDataset(TokenDataset&&) noexcept;
  TokenDataset& operator=(TokenDataset&&) noexcept;
  ~TokenDataset() override;

  int64_t size() const override;
  int64_t num_tokens() const;  // the tokens of all files
  int64_t num_files() const;
  Batch get(std::span<const int64_t> indices) const override;
  // Returns a hash of the length, the sizes of the files, and the bytes at 16 places of each file.
  std::optional<uint64_t> digest() const override;

 private:
  struct Contents;
  const Contents& contents() const;  // throws if the program has moved from this dataset

  std::unique_ptr<Contents> contents_;
};

// Writes a file of tokens with a header, of 16 bits if all tokens fit, else of 32 bits. Replaces
// the file atomically. Throws kInvalidArgument for more than 2^31 - 1 tokens and for a token that
// is not in [0, 2^32).
CADRE_EXPORT void write_token_file(const std::string& path, std::span<const int64_t> tokens);

}  // namespace cadre
