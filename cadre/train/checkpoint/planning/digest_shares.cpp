#include "cadre/train/checkpoint/planning/digest_shares.h"

#include <algorithm>
#include <map>
#include <set>

#include "cadre/core/wire/byte_codec.h"

namespace cadre {
namespace {

constexpr size_t kMaxViewTextBytes = 4096;

}  // namespace

std::string encode_file_view(const FileView& view) {
  wire::ByteWriter out;
  for (const std::string* text : {&view.options, &view.fingerprint, &view.sight}) out.text(*text);
  for (const size_t file : view.files) out.integer(static_cast<uint64_t>(file));
  return std::string(wire::as_text(out.bytes()));
}

Result<FileView> decode_file_view(std::string_view text) {
  wire::ByteReader in(wire::as_bytes(text));
  FileView view;
  for (std::string* part : {&view.options, &view.fingerprint, &view.sight}) {
    *part = in.text(kMaxViewTextBytes);
  }
  while (in.ok() && in.remaining() > 0) view.files.push_back(in.integer<uint64_t>());
  if (!in.is_complete()) {
    return Error(ErrorCode::kInternal, "a rank's list of the files that it reads is malformed");
  }
  return view;
}

std::vector<std::vector<size_t>> share_digests(std::span<const FileView> by_rank,
                                               std::span<const uint64_t> num_bytes) {
  std::map<std::string_view, std::vector<size_t>> ranks_of_sight;
  std::map<std::string_view, std::set<size_t>> files_of_sight;
  std::vector<size_t> all_ranks;
  std::set<size_t> unread;
  for (size_t file = 0; file < num_bytes.size(); ++file) unread.insert(file);
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const FileView& view = by_rank[rank];
    all_ranks.push_back(rank);
    ranks_of_sight[view.sight].push_back(rank);
    files_of_sight[view.sight].insert(view.files.begin(), view.files.end());
    for (const size_t file : view.files) unread.erase(file);
  }
  std::vector<std::vector<size_t>> shares(by_rank.size());
  std::vector<uint64_t> load(by_rank.size());
  const auto assign = [&](size_t file, const std::vector<size_t>& ranks) {
    const size_t rank =
        *std::ranges::min_element(ranks, {}, [&load](size_t each) { return load[each]; });
    load[rank] += num_bytes[file];
    shares[rank].push_back(file);
  };
  for (const auto& [sight, files] : files_of_sight) {
    for (const size_t file : files) assign(file, ranks_of_sight.at(sight));
  }
  for (const size_t file : unread) assign(file, all_ranks);
  return shares;
}

}  // namespace cadre
