#include "cadre/checkpoint/rank_agreement.h"

#include <algorithm>
#include <array>
#include <limits>
#include <span>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/wire/byte_codec.h"

namespace cadre {
namespace {

constexpr uint8_t kNoError = 255;
constexpr uint64_t kMark = 0x636164726573'6e61;  // "cadresna"

std::vector<std::byte> encode(const Result<std::string>& outcome) {
  wire::ByteWriter out;
  out.integer(outcome.ok() ? kNoError : static_cast<uint8_t>(outcome.error().code()));
  out.text<uint64_t>(outcome.ok() ? *outcome : outcome.error().message());
  return out.take();
}

Result<std::string> decode(ConstBytes bytes) {
  wire::ByteReader in(bytes);
  const auto code = in.integer<uint8_t>();
  std::string text = in.text<uint64_t>(std::numeric_limits<size_t>::max());
  if (!in.ok() || (code != kNoError && code > static_cast<uint8_t>(ErrorCode::kInternal))) {
    return Error(ErrorCode::kInternal, "a rank's message in a snapshot's agreement is malformed");
  }
  if (code == kNoError) return text;
  return Error(static_cast<ErrorCode>(code), std::move(text));
}

}  // namespace

std::vector<std::vector<std::byte>> RankAgreement::gather_bytes(
    const std::vector<std::byte>& own) const {
  Communicator& communicator = group_->communicator();
  const auto size = static_cast<size_t>(world_size());
  const CollectiveOptions options{.deadline = communicator.system().deadline_in(timeout_),
                                  .keep_alive = nullptr};
  // The mark distinguishes these numbers from those that wrappers compare; without it, a rank that
  // saves alone would interpret the latter as lengths.
  const std::array<uint64_t, 2> header = {kMark, own.size()};
  std::vector<std::array<uint64_t, 2>> headers(size);
  communicator.all_gather(std::as_bytes(std::span(header)),
                          std::as_writable_bytes(std::span(headers)), DType::kInt64, options);
  std::vector<size_t> lengths;
  for (const auto& [mark, length] : headers) {
    if (mark != kMark) {
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("rank {} of group \"{}\" is in another operation than saving or "
                                "loading a snapshot, which all ranks do together",
                                lengths.size(), group_->name()));
    }
    lengths.push_back(length);
  }
  const size_t longest = *std::ranges::max_element(lengths);
  std::vector<std::byte> padded = own;
  padded.resize(longest);
  std::vector<std::byte> all(longest * size);
  communicator.all_gather(padded, all, DType::kUint8, options);
  std::vector<std::vector<std::byte>> gathered;
  for (size_t rank = 0; rank < size; ++rank) {
    const auto part = std::span(all).subspan(rank * longest, lengths[rank]);
    gathered.emplace_back(part.begin(), part.end());
  }
  return gathered;
}

Result<std::vector<Result<std::string>>> RankAgreement::gather_outcomes(
    const Result<std::string>& own) const {
  if (world_size() == 1) return std::vector<Result<std::string>>{own};
  try {
    std::vector<Result<std::string>> outcomes;
    for (const std::vector<std::byte>& bytes : gather_bytes(encode(own))) {
      outcomes.push_back(decode(bytes));
    }
    return outcomes;
  } catch (const Error& error) {
    return error;
  }
}

Result<std::vector<std::string>> RankAgreement::gather(const Result<std::string>& own) const {
  auto outcomes = gather_outcomes(own);
  if (!outcomes.ok()) return outcomes.error();
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < outcomes->size(); ++rank) {
    Result<std::string>& outcome = (*outcomes)[rank];
    if (!outcome.ok()) {
      if (world_size() == 1) return outcome.error();
      return outcome.error().with_context(cadre::format("rank {}", rank));
    }
    texts.push_back(std::move(outcome).value());
  }
  return texts;
}

Status RankAgreement::follow_first(const Status& own) const {
  const auto outcomes =
      gather_outcomes(own.ok() ? Result<std::string>(std::string()) : own.error());
  if (!outcomes.ok()) return own.ok() ? outcomes.error() : own.error();
  const Result<std::string>& first = outcomes->front();
  if (first.ok()) return {};
  return first.error();
}

}  // namespace cadre
