// Text as one sequence of tokens: a file, or the files of a folder in the order of their paths.
//
// Each byte is a token (0 to 255); a token <|endoftext|> (256) follows each document. A document is
// a file; if a file contains the literal text "<|endoftext|>", that separates documents, too. A
// small text is kept in memory. A large text stays in its files, and every read fetches its bytes
// from them: the ranks of a host share the pages in the system's cache, which the system can drop.
// If a file has changed since open(), check_unchanged() throws.
//
// Threads: all methods are const and may be called from any thread. Blocking: open() reads every
// file once; reading tokens may wait for the disk. Lifetime: owns the text, or up to 64
// descriptors. Errors: kInvalidArgument for a path without text, for tokens out of range, for a
// corpus that was moved from, and for a file that has changed; kUnavailable for a file that cannot
// be opened.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre {

inline constexpr int64_t kEndOfText = 256;
inline constexpr int64_t kVocabularySize = 257;
inline constexpr std::string_view kEndOfTextMark = "<|endoftext|>";

struct TextCorpusOptions {
  // Selects files of a folder by the end of their names, for example ".py"; if empty, all files are
  // read. Binary files (a NUL byte among the first 8000 bytes, the rule of git) and hidden files
  // are always skipped.
  std::vector<std::string> suffixes = {};
  // Folders with these names are skipped at any depth, such as "site-packages".
  std::vector<std::string> skipped_folders = {};
  // A text of at most this size is kept in memory, so later changes of its files have no effect.
  uint64_t max_bytes_in_memory = 64 << 20;
};

// The tokens [begin, end) of the corpus.
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
  // Returns a hash of the bytes of all documents, computed by open(). If it differs between two
  // ranks, or between a run and its resumption, they read different texts.
  uint64_t fingerprint() const;

  // Copies tokens [begin, begin + out.size()), which must be within [0, num_tokens()]. Does not
  // throw if a file has changed: `out` then gets wrong tokens, or 0 for missing bytes, and from
  // then on check_unchanged() throws. Ranks notice a change at different reads; by calling
  // check_unchanged() at the same step they can throw together.
  void copy_tokens(int64_t begin, std::span<int64_t> out) const;
  // Returns false if a read has found a changed file. Costs one atomic load.
  bool is_unchanged() const;
  // Throws the error of the first read that found a changed file.
  void check_unchanged() const;

 private:
  struct Contents;
  explicit TextCorpus(std::unique_ptr<Contents> contents);
  Contents& contents() const;  // throws if the program has moved from this corpus
  std::unique_ptr<Contents> contents_;
};

struct TextSplit {
  TokenRange train;
  TokenRange held_out;
};

// Holds out the last `held_out_fraction` of the tokens for evaluation. A split by position holds
// out contiguous text, mostly whole files. If single samples were held out, the text around them
// would be in the training data. Throws kInvalidArgument for a fraction that is not in [0, 1].
CADRE_EXPORT TextSplit split_by_position(const TextCorpus& corpus, double held_out_fraction);

}  // namespace cadre
