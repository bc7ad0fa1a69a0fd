// Text as one long stream of tokens: a file, or a folder's files in the order of their paths.
//
// A byte is a token (0 to 255); after each document stands <|endoftext|> (256). A document is a
// file, or a part of one that the literal text "<|endoftext|>" cuts: files of many stories are
// written so. The files are mapped, not read: gigabytes cost no memory of their own.
// Threads: all methods const and callable from any. Blocking: open() scans every file once; reading
// tokens may wait for the disk. Lifetime: owns the mappings; the files must not be cut short.
// Errors: kInvalidArgument for a path without text; kUnavailable for a file that cannot be opened.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/export.h"
#include "cadre/base/types.h"

namespace cadre {

inline constexpr int64_t kEndOfText = 256;
inline constexpr int64_t kVocabularySize = 257;
inline constexpr std::string_view kEndOfTextMark = "<|endoftext|>";

struct TextCorpusOptions {
  // Of a folder only: files whose names end so, for example ".py"; all files when empty. Binary
  // files (a NUL byte among the first 8000, git's rule) and hidden ones are skipped anyway.
  std::vector<std::string> suffixes;
  std::vector<std::string> skipped_folders;  // names anywhere below the folder: "site-packages"
};

// Tokens [begin, end) of the stream.
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};

class CADRE_EXPORT TextCorpus {
 public:
  static TextCorpus open(const std::string& path, const TextCorpusOptions& options = {});
  TextCorpus(TextCorpus&&) noexcept;
  TextCorpus& operator=(TextCorpus&&) noexcept;
  ~TextCorpus();

  int64_t num_tokens() const;
  int64_t num_documents() const;
  int64_t num_files() const;
  // Of the documents' sizes and first and last bytes: two ranks, or a run and its resumption, that
  // differ in it read different texts.
  uint64_t fingerprint() const;

  // Tokens [begin, begin + out.size()). REQUIRES: within [0, num_tokens()].
  void copy_tokens(int64_t begin, std::span<int64_t> out) const;

 private:
  struct Contents;
  explicit TextCorpus(std::unique_ptr<Contents> contents);
  std::unique_ptr<Contents> contents_;
};

struct TextSplit {
  TokenRange train;
  TokenRange held_out;
};

// Held out is the end of the stream: its last `held_out_fraction`. A cut by position keeps whole
// passages, and mostly whole files, out of the training text, which a cut by sample would not.
CADRE_EXPORT TextSplit split_by_position(const TextCorpus& corpus, double held_out_fraction);

}  // namespace cadre
