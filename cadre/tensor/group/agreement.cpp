#include "cadre/tensor/group/agreement.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <limits>
#include <span>
#include <utility>

#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/tensor/group/caught_error.h"

namespace cadre {
namespace {

// The data of the all_gather with which every agreement begins. Its mark and subject show whether
// all ranks are in the same agreement, or one of them runs another all_gather of this size.
struct Announcement {
  static constexpr uint64_t kMark = 0x6361647265'616772;  // "cadreagr"
  static constexpr int64_t kNoError = -1;

  uint64_t mark = kMark;
  int64_t code = kNoError;  // the ErrorCode, or kNoError
  uint64_t length = 0;      // the size of the text or of the error message
  uint64_t digest = 0;      // the hash of that text or message
  std::array<char, 96> subject = {};

  std::string_view subject_text() const {
    return {subject.data(), strnlen(subject.data(), subject.size())};
  }
};
static_assert(sizeof(Announcement) == 128);

Result<std::string> outcome_of(const std::function<std::string()>& make_text) {
  try {
    return make_text();
  } catch (...) {
    return caught_error();
  }
}

const std::string& payload_of(const Result<std::string>& outcome) {
  return outcome.ok() ? *outcome : outcome.error().message();
}

// The collectives of one agreement: an all_gather of the announcements, and then, only if a rank
// has an error or the caller needs the texts, collectives that exchange these texts.
class AgreementExchange {
 public:
  AgreementExchange(const ProcessGroup& group, const AgreementSubject& subject,
                    Result<std::string> own)
      : group_(group), subject_(subject), own_(std::move(own)) {
    if (subject_.timeout) deadline_ = communicator().system().deadline_in(*subject_.timeout);
    announce();
  }

  int world_size() const { return static_cast<int>(announcements_.size()); }
  const Announcement& of(int rank) const { return announcements_[static_cast<size_t>(rank)]; }

  // Returns the lowest rank whose text differs from that of rank 0; nullopt if all are equal.
  std::optional<int> first_unlike() const {
    for (int rank = 1; rank < world_size(); ++rank) {
      if (of(rank).digest != of(0).digest || of(rank).length != of(0).length) return rank;
    }
    return std::nullopt;
  }

  std::optional<CommonRefusal> refusal() const {
    const auto refuses = [](const Announcement& a) { return a.code != Announcement::kNoError; };
    const auto lowest = std::ranges::find_if(announcements_, refuses);
    if (lowest == announcements_.end()) return std::nullopt;
    const int rank = static_cast<int>(lowest - announcements_.begin());
    const auto count = std::ranges::count_if(announcements_, refuses);
    return CommonRefusal{.error = outcome_of_rank(rank, text_of_rank(rank)).error(),
                         .rank = rank,
                         .num_refusing = static_cast<int>(count)};
  }

  // Collective. Returns the text of one rank.
  std::string text_of_rank(int rank) const {
    std::string text(of(rank).length, '\0');
    if (group_.rank() == rank) text = payload_of(own_);
    if (world_size() > 1 && !text.empty()) {
      communicator().broadcast(std::as_writable_bytes(std::span(text)), DType::kUint8, Rank(rank),
                               options());
    }
    return text;
  }

  // Collective. Returns the text or the error of each rank.
  std::vector<Result<std::string>> outcomes() const {
    if (world_size() == 1) return {own_};
    const size_t longest = std::ranges::max(announcements_, {}, &Announcement::length).length;
    std::string padded = payload_of(own_);
    padded.resize(longest);
    std::string all(longest * announcements_.size(), '\0');
    if (longest > 0) {
      communicator().all_gather(std::as_bytes(std::span(padded)),
                                std::as_writable_bytes(std::span(all)), DType::kUint8, options());
    }
    std::vector<Result<std::string>> outcomes;
    for (int rank = 0; rank < world_size(); ++rank) {
      outcomes.push_back(
          outcome_of_rank(rank, all.substr(static_cast<size_t>(rank) * longest, of(rank).length)));
    }
    return outcomes;
  }

 private:
  Communicator& communicator() const { return group_.communicator(); }
  CollectiveOptions options() const {
    return {.deadline = deadline_, .keep_alive = nullptr, .call = subject_.call};
  }

  Result<std::string> outcome_of_rank(int rank, std::string text) const {
    if (of(rank).code == Announcement::kNoError) return text;
    return Error(static_cast<ErrorCode>(of(rank).code), std::move(text));
  }

  void announce() {
    Announcement own;
    if (!own_.ok()) own.code = static_cast<int64_t>(own_.error().code());
    own.length = payload_of(own_).size();
    own.digest = fnv1a(payload_of(own_));
    subject_.call.copy(own.subject.data(), own.subject.size());
    announcements_.assign(static_cast<size_t>(group_.world_size()), own);
    if (world_size() == 1) return;
    communicator().all_gather(std::as_bytes(std::span(&own, 1)),
                              std::as_writable_bytes(std::span(announcements_)), DType::kUint8,
                              options());
    for (int rank = 1; rank < world_size(); ++rank) check_subject(rank);
  }

  void check_subject(int rank) const {
    const auto text = [&](const Announcement& a) {
      return a.mark == Announcement::kMark ? "in " + std::string(a.subject_text())
                                           : std::string("in another operation");
    };
    if (of(rank).mark == of(0).mark && of(rank).subject == of(0).subject) return;
    throw Error(ErrorCode::kInvalidArgument,
                format("{} on group \"{}\": the ranks are in different calls: rank 0 is {} and "
                       "rank {} is {}; make these calls on all ranks "
                       "of the group, in the same order",
                       subject_.call, group_.name(), text(of(0)), rank, text(of(rank))))
        .with_culprit(Rank(rank));
  }

  const ProcessGroup& group_;
  AgreementSubject subject_;
  Result<std::string> own_;
  std::optional<Deadline> deadline_;
  std::vector<Announcement> announcements_;
};

[[noreturn]] void throw_refusal(const ProcessGroup& group, const CommonRefusal& refusal) {
  if (refusal.num_refusing == group.world_size()) throw refusal.error;
  throw Error(refusal.error.code(),
              format("{} (on rank {} of {} of group \"{}\")", refusal.error.message(), refusal.rank,
                     group.world_size(), group.name()))
      .with_culprit(Rank(refusal.rank));
}

std::string text_of(const std::vector<AgreedField>& fields) {
  wire::ByteWriter out;
  for (const AgreedField& field : fields) {
    out.text<uint64_t>(field.name);
    out.text<uint64_t>(field.value);
  }
  const std::vector<std::byte> bytes = out.take();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<AgreedField> fields_of(const std::string& text) {
  wire::ByteReader in(std::as_bytes(std::span(text)));
  std::vector<AgreedField> fields;
  while (in.ok() && in.remaining() > 0) {
    AgreedField& field = fields.emplace_back();
    field.name = in.text<uint64_t>(std::numeric_limits<size_t>::max());
    field.value = in.text<uint64_t>(std::numeric_limits<size_t>::max());
  }
  return fields;
}

// Returns a sentence such as "seed is 1 on rank 0 and 2 on rank 3".
std::string first_difference(const std::string& zero, const std::string& other, int other_rank) {
  const std::vector<AgreedField> a = fields_of(zero);
  const std::vector<AgreedField> b = fields_of(other);
  const auto [in_a, in_b] = std::ranges::mismatch(a, b);
  const bool has_a = in_a != a.end();
  const bool has_b = in_b != b.end();
  if (has_a && has_b && in_a->name == in_b->name) {
    return format("{} is {} on rank 0 and {} on rank {}", in_a->name, in_a->value, in_b->value,
                  other_rank);
  }
  return format("the ranks compare different values: rank 0 has {} where rank {} has {}",
                has_a ? in_a->name : "nothing more", other_rank,
                has_b ? in_b->name : "nothing more");
}

}  // namespace

std::optional<CommonRefusal> common_refusal(const ProcessGroup& group,
                                            const AgreementSubject& subject,
                                            const std::function<void()>& check) {
  return AgreementExchange(group, subject, outcome_of([&] {
                             check();
                             return std::string();
                           }))
      .refusal();
}

std::optional<Error> common_refusal(std::span<const ProcessGroup> groups,
                                    const AgreementSubject& subject,
                                    const std::function<void()>& check) {
  std::optional<Error> problem;
  try {
    check();
  } catch (...) {
    problem = caught_error();
  }
  // An error that a rank of one group has thrown becomes this rank's error in the following groups,
  // so that it reaches the ranks of all groups.
  for (const ProcessGroup& group : groups) {
    const auto refusal = common_refusal(group, subject, [&problem] {
      if (problem) throw *problem;
    });
    if (refusal) problem = refusal->error;
  }
  return problem;
}

void check_on_all_ranks(const ProcessGroup& group, const AgreementSubject& subject,
                        const std::function<void()>& check) {
  if (const auto refusal = common_refusal(group, subject, check)) throw_refusal(group, *refusal);
}

std::vector<Result<std::string>> gather_outcomes(const ProcessGroup& group,
                                                 const AgreementSubject& subject,
                                                 const std::function<std::string()>& make_text) {
  return AgreementExchange(group, subject, outcome_of(make_text)).outcomes();
}

std::vector<std::string> gather_texts(const ProcessGroup& group, const AgreementSubject& subject,
                                      const std::function<std::string()>& make_text) {
  const AgreementExchange exchange(group, subject, outcome_of(make_text));
  if (const auto refusal = exchange.refusal()) throw_refusal(group, *refusal);
  std::vector<std::string> texts;
  for (Result<std::string>& outcome : exchange.outcomes()) {
    texts.push_back(std::move(outcome).value());
  }
  return texts;
}

std::vector<std::vector<int64_t>> gather_words(
    const ProcessGroup& group, const AgreementSubject& subject, size_t num_words,
    const std::function<std::vector<int64_t>()>& make_words, std::optional<Duration> timeout) {
  std::exception_ptr refusal;
  std::vector<int64_t> words(num_words, 0);
  try {
    words = make_words();
  } catch (...) {
    refusal = std::current_exception();
  }
  const auto count = static_cast<int64_t>(num_words) + 1;
  const at::Tensor own = at::empty({count}, at::kLong);
  auto* const own_words = own.mutable_data_ptr<int64_t>();
  own_words[0] = refusal ? 1 : 0;
  std::ranges::copy(words, own_words + 1);
  const at::Tensor all = at::empty({group.world_size() * count}, at::kLong);
  group.all_gather(all, own, {.timeout = timeout});
  const auto* const gathered = all.const_data_ptr<int64_t>();
  std::vector<std::vector<int64_t>> result;
  bool is_refused = false;
  for (int rank = 0; rank < group.world_size(); ++rank) {
    const int64_t* const begin = gathered + rank * count;
    is_refused |= *begin != 0;
    result.emplace_back(begin + 1, begin + count);
  }
  if (is_refused) {
    check_on_all_ranks(group, subject, [&] {
      if (refusal) std::rethrow_exception(refusal);
    });
  }
  return result;
}

void check_equal_on_all_ranks(const ProcessGroup& group, const AgreementSubject& subject,
                              const std::function<std::vector<AgreedField>()>& make_fields,
                              std::string_view remedy) {
  const AgreementExchange exchange(group, subject,
                                   outcome_of([&] { return text_of(make_fields()); }));
  if (const auto refusal = exchange.refusal()) throw_refusal(group, *refusal);
  const std::optional<int> other = exchange.first_unlike();
  if (!other) return;
  const std::string zero_text = exchange.text_of_rank(0);
  const std::string other_text = exchange.text_of_rank(*other);
  throw Error(ErrorCode::kInvalidArgument,
              format("{} on group \"{}\": {}; {}", subject.call, group.name(),
                     first_difference(zero_text, other_text, *other), remedy))
      .with_culprit(Rank(*other));
}

}  // namespace cadre
