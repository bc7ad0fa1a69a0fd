#include "cadre/train/data/text_corpus.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <optional>
#include <system_error>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/files/versioned_file.h"
#include "cadre/train/data/content_hash.h"
#include "cadre/train/data/versioned_files.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBinaryProbeBytes = 8000;
constexpr uint64_t kScanBytes = 1 << 20;
// A limit that no file reaches: the total size of the files was checked before.
constexpr size_t kMaxTextBytes = size_t{1} << 40;

struct Document {
  size_t file = 0;
  uint64_t offset = 0;  // where the document begins in its file
  uint64_t num_bytes = 0;
  int64_t first_token = 0;

  // The tokens of a document are its bytes and one <|endoftext|>.
  int64_t num_tokens() const { return static_cast<int64_t>(num_bytes) + 1; }
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

// Returns the files sorted by path, so that machines with the same files have the same tokens.
std::vector<std::string> files_below(const fs::path& folder, const TextCorpusOptions& options) {
  std::vector<std::string> paths;
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, fs::directory_options::skip_permission_denied,
                                         error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    std::error_code unknown;  // if the file was deleted since it was listed, it is skipped
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

// Returns the sum of the sizes. A file whose size cannot be read counts as empty; opening it will
// throw the error with its reason.
uint64_t total_bytes(const std::vector<std::string>& paths) {
  uint64_t total = 0;
  for (const std::string& path : paths) {
    std::error_code unknown;
    const uint64_t num_bytes = fs::file_size(path, unknown);
    if (!unknown) total += num_bytes;
  }
  return total;
}

}  // namespace

struct TextCorpus::Contents {
  std::vector<Document> documents;
  int64_t num_tokens = 0;

  void add_in_memory(const std::string& path);
  void add_on_disk(const std::string& path);
  int64_t num_files() const { return static_cast<int64_t>(files_.size()); }
  uint64_t fingerprint() const { return hash_.value(); }
  // Fills `out` from an offset in a document; never throws.
  void read(const Document& document, uint64_t offset, Bytes out);

  bool is_unchanged() const { return !has_changed_.load(std::memory_order_acquire); }
  void check_unchanged();

 private:
  struct File {
    std::string path;
    os::FileVersion version;  // the version (size and time) of the file when its text was scanned
    std::string text;         // empty if the text stays on the disk
  };
  // The scan's progress in the current document.
  struct Scan {
    uint64_t offset = 0;
    uint64_t num_bytes = 0;
    ContentHash hash;
  };

  void take(Scan& scan, std::string_view text);
  void end_document(Scan& scan);
  std::string_view scan_part(Scan& scan, std::string_view part, bool is_last);
  void keep_change(const Error& error);

  std::vector<File> files_;
  Fnv1a hash_;
  VersionedFiles open_files_;
  std::atomic<bool> has_changed_ = false;
  std::mutex mutex_;
  std::optional<Error> change_;  // guarded by mutex_
};

void TextCorpus::Contents::take(Scan& scan, std::string_view text) {
  scan.hash.add(text);
  scan.num_bytes += text.size();
}

// Adds the document that was scanned, unless it is empty. The next document begins after the
// "<|endoftext|>" mark.
void TextCorpus::Contents::end_document(Scan& scan) {
  if (scan.num_bytes > 0) {
    documents.push_back({.file = files_.size() - 1,
                         .offset = scan.offset,
                         .num_bytes = scan.num_bytes,
                         .first_token = num_tokens});
    num_tokens += documents.back().num_tokens();
    hash_.add(scan.num_bytes);
    hash_.add(scan.hash.value());
  }
  scan = {.offset = scan.offset + scan.num_bytes + kEndOfTextMark.size(), .hash = {}};
}

// Scans `part`. Returns its last bytes if they may be the beginning of a "<|endoftext|>" mark; the
// next part must begin with them.
std::string_view TextCorpus::Contents::scan_part(Scan& scan, std::string_view part, bool is_last) {
  for (size_t mark = 0; (mark = part.find(kEndOfTextMark)) != std::string_view::npos;) {
    take(scan, part.substr(0, mark));
    part.remove_prefix(mark + kEndOfTextMark.size());
    end_document(scan);
  }
  const size_t num_kept = is_last ? 0 : std::min(kEndOfTextMark.size() - 1, part.size());
  take(scan, part.substr(0, part.size() - num_kept));
  if (is_last) end_document(scan);
  return part.substr(part.size() - num_kept);
}

void TextCorpus::Contents::add_in_memory(const std::string& path) {
  std::string text = os::read_file(path, kMaxTextBytes).value_or_throw();
  if (text.empty() || is_binary(text)) return;
  files_.push_back({.path = path, .version = {}, .text = std::move(text)});
  Scan scan;
  scan_part(scan, files_.back().text, /*is_last=*/true);
}

void TextCorpus::Contents::add_on_disk(const std::string& path) {
  const os::VersionedFile file = os::VersionedFile::open(path).value_or_throw();
  const uint64_t num_bytes = file.version().num_bytes;
  Scan scan;
  std::string part;
  for (uint64_t done = 0; done < num_bytes;) {
    const size_t num_kept = part.size();
    const auto count = static_cast<size_t>(std::min<uint64_t>(kScanBytes, num_bytes - done));
    part.resize(num_kept + count);
    file.read_at(done, std::as_writable_bytes(std::span(part).subspan(num_kept))).value_or_throw();
    if (done == 0) {
      if (is_binary(part)) return;
      files_.push_back({.path = path, .version = file.version(), .text = {}});
    }
    done += count;
    part = std::string(scan_part(scan, part, done == num_bytes));
  }
}

void TextCorpus::Contents::read(const Document& document, uint64_t offset, Bytes out) {
  if (out.empty()) return;
  const File& file = files_[document.file];
  offset += document.offset;
  if (!file.text.empty()) {
    std::memcpy(out.data(), file.text.data() + offset, out.size());
    return;
  }
  try {
    open_files_.read(document.file, file.path, file.version, offset, out);
  } catch (const Error& error) {
    std::ranges::fill(out, std::byte{0});
    keep_change(error);
  }
}

void TextCorpus::Contents::keep_change(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (!change_) change_ = error;
  has_changed_.store(true, std::memory_order_release);
}

void TextCorpus::Contents::check_unchanged() {
  if (is_unchanged()) return;
  const std::lock_guard lock(mutex_);
  throw Error(
      change_->code(),
      cadre::format("the text has changed while it was used: {}; restore it and start again "
                    "from the last snapshot, or train on a copy that nobody changes",
                    change_->message()));
}

TextCorpus::TextCorpus(std::unique_ptr<Contents> contents) : contents_(std::move(contents)) {}
TextCorpus::TextCorpus(TextCorpus&&) noexcept = default;
TextCorpus& TextCorpus::operator=(TextCorpus&&) noexcept = default;
TextCorpus::~TextCorpus() = default;

TextCorpus TextCorpus::open(const std::string& path, const TextCorpusOptions& options) {
  std::vector<std::string> paths = {path};
  std::error_code unknown;  // ignored: if this fails, opening the path throws with the reason
  if (fs::is_directory(path, unknown)) paths = files_below(path, options);
  auto contents = std::make_unique<Contents>();
  const bool is_small = total_bytes(paths) <= options.max_bytes_in_memory;
  for (const std::string& file : paths) {
    is_small ? contents->add_in_memory(file) : contents->add_on_disk(file);
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
  return contents().num_files();
}

uint64_t TextCorpus::fingerprint() const {
  return contents().fingerprint();
}

bool TextCorpus::is_unchanged() const {
  return contents().is_unchanged();
}

void TextCorpus::check_unchanged() const {
  contents().check_unchanged();
}

void TextCorpus::copy_tokens(int64_t begin, std::span<int64_t> out) const {
  const std::vector<Document>& documents = contents().documents;
  const bool is_inside = begin >= 0 && begin <= num_tokens();
  if (!is_inside || out.size() > static_cast<size_t>(num_tokens() - begin)) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("TextCorpus: cannot read {} tokens from token {} on; the text has {}",
                              out.size(), begin, num_tokens()));
  }
  if (out.empty()) return;
  auto document = std::ranges::upper_bound(documents, begin, {}, &Document::first_token) - 1;
  auto offset = static_cast<uint64_t>(begin - document->first_token);
  std::vector<std::byte> bytes;
  while (!out.empty()) {
    const auto count =
        static_cast<size_t>(std::min<uint64_t>(document->num_bytes - offset, out.size()));
    bytes.resize(count);
    contents().read(*document, offset, bytes);
    std::ranges::transform(bytes, out.begin(), [](std::byte byte) { return int64_t(byte); });
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
