#include "cadre/data/text_corpus.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <mutex>
#include <system_error>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/fnv1a.h"
#include "cadre/base/format.h"
#include "cadre/data/content_hash.h"
#include "cadre/os/files/read_only_file.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBinaryProbeBytes = 8000;

struct Document {
  std::string_view text;
  int64_t first_token = 0;

  // Its bytes and <|endoftext|>.
  int64_t num_tokens() const { return static_cast<int64_t>(text.size()) + 1; }
};

bool is_wanted_file(const fs::path& path, const TextCorpusOptions& options) {
  const std::string name = path.filename().string();
  if (name.starts_with('.')) return false;
  return options.suffixes.empty() ||
         std::ranges::any_of(options.suffixes,
                             [&](const std::string& suffix) { return name.ends_with(suffix); });
}

bool is_wanted_folder(const fs::path& path, const TextCorpusOptions& options) {
  const std::string name = path.filename().string();
  return !name.starts_with('.') &&
         std::ranges::find(options.skipped_folders, name) == options.skipped_folders.end();
}

// Sorted by path, so that machines with the same files have the same tokens.
std::vector<std::string> files_below(const fs::path& folder, const TextCorpusOptions& options) {
  std::vector<std::string> paths;
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, fs::directory_options::skip_permission_denied,
                                         error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    std::error_code unknown;  // a file that was deleted meanwhile is skipped
    if (entry->is_directory(unknown)) {
      if (!is_wanted_folder(entry->path(), options)) entry.disable_recursion_pending();
    } else if (entry->is_regular_file(unknown) && is_wanted_file(entry->path(), options)) {
      paths.push_back(entry->path().string());
    }
  }
  if (error) {
    throw Error(ErrorCode::kUnavailable,
                cadre::format("list {}: {}", folder.string(), error.message()));
  }
  std::ranges::sort(paths);
  return paths;
}

bool is_binary(std::string_view content) {
  return content.substr(0, kBinaryProbeBytes).find('\0') != std::string_view::npos;
}

}  // namespace

struct TextCorpus::Contents {
  std::vector<os::ReadOnlyFile> files;
  std::vector<Document> documents;
  int64_t num_tokens = 0;
  std::once_flag is_hashed;
  uint64_t fingerprint = 0;

  void add(os::ReadOnlyFile file) {
    const ConstBytes bytes = file.bytes();
    const std::string_view content(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (content.empty() || is_binary(content)) return;
    files.push_back(std::move(file));  // moving it keeps the address of the mapping
    size_t begin = 0;
    while (begin < content.size()) {
      const size_t end = std::min(content.find(kEndOfTextMark, begin), content.size());
      if (end > begin) add_document(content.substr(begin, end - begin));
      begin = end + kEndOfTextMark.size();
    }
  }

 private:
  void add_document(std::string_view text) {
    documents.push_back({.text = text, .first_token = num_tokens});
    num_tokens += documents.back().num_tokens();
  }
};

TextCorpus::TextCorpus(std::unique_ptr<Contents> contents) : contents_(std::move(contents)) {}
TextCorpus::TextCorpus(TextCorpus&&) noexcept = default;
TextCorpus& TextCorpus::operator=(TextCorpus&&) noexcept = default;
TextCorpus::~TextCorpus() = default;

TextCorpus TextCorpus::open(const std::string& path, const TextCorpusOptions& options) {
  std::vector<std::string> paths = {path};
  std::error_code unknown;  // opening it tells more
  if (fs::is_directory(path, unknown)) paths = files_below(path, options);
  auto contents = std::make_unique<Contents>();
  for (const std::string& file : paths) {
    contents->add(os::ReadOnlyFile::open(file).value_or_throw());
  }
  if (contents->documents.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("{} has no text: expected a text file, or a folder with text files; "
                              "empty and binary files are skipped",
                              path));
  }
  return TextCorpus(std::move(contents));
}

TextCorpus::Contents& TextCorpus::contents() const {
  if (contents_ == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "TextCorpus: this corpus was moved from; use the one that it was moved into");
  }
  return *contents_;
}

int64_t TextCorpus::num_tokens() const {
  return contents().num_tokens;
}

int64_t TextCorpus::num_documents() const {
  return static_cast<int64_t>(contents().documents.size());
}

int64_t TextCorpus::num_files() const {
  return static_cast<int64_t>(contents().files.size());
}

uint64_t TextCorpus::fingerprint() const {
  Contents& own = contents();
  std::call_once(own.is_hashed, [&] {
    Fnv1a hash;
    for (const Document& document : own.documents) {
      hash.add(uint64_t{document.text.size()});
      hash.add(content_hash(document.text));
    }
    own.fingerprint = hash.value();
  });
  return own.fingerprint;
}

void TextCorpus::copy_tokens(int64_t begin, std::span<int64_t> out) const {
  const std::vector<Document>& documents = contents().documents;
  const int64_t left = num_tokens() - begin;
  if (begin < 0 || left < 0 || out.size() > static_cast<size_t>(left)) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("TextCorpus: {} tokens from {} on; the text has {}", out.size(),
                              begin, num_tokens()));
  }
  if (out.empty()) return;
  auto document = std::ranges::upper_bound(documents, begin, {}, &Document::first_token) - 1;
  int64_t offset = begin - document->first_token;
  while (!out.empty()) {
    const std::string_view rest = document->text.substr(static_cast<size_t>(offset));
    const size_t count = std::min(rest.size(), out.size());
    std::ranges::transform(rest.substr(0, count), out.begin(),
                           [](char byte) { return int64_t{static_cast<unsigned char>(byte)}; });
    out = out.subspan(count);
    if (out.empty()) return;
    out.front() = kEndOfText;
    out = out.subspan(1);
    offset = 0;
    ++document;
  }
}

TextSplit split_by_position(const TextCorpus& corpus, double held_out_fraction) {
  if (!(held_out_fraction >= 0 && held_out_fraction <= 1)) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("split_by_position: the fraction that is held out is {}; expected a "
                              "number from 0 to 1",
                              held_out_fraction));
  }
  const int64_t num_tokens = corpus.num_tokens();
  const auto held_out =
      static_cast<int64_t>(std::floor(static_cast<double>(num_tokens) * held_out_fraction));
  const int64_t cut = num_tokens - held_out;
  return {.train = {0, cut}, .held_out = {cut, num_tokens}};
}

}  // namespace cadre
