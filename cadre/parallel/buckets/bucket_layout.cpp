#include "cadre/parallel/buckets/bucket_layout.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>
#include <optional>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre {

namespace {

// Returns the part of `text` before the first `separator`, and removes that part and the separator
// from `text`.
std::string_view take_until(std::string_view& text, char separator) {
  const size_t end = text.find(separator);
  const std::string_view part = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return part;
}

Error malformed(std::string_view part, std::string_view expected) {
  return Error(
      ErrorCode::kCorruption,
      format("bucket layout: \"{}\" is not {}; use the layout of another snapshot, or none",
             part.substr(0, 40), expected));
}

Result<BucketLayout::Bucket> parse_bucket(std::string_view text) {
  const std::string_view whole = text;
  const std::optional<DType> dtype = parse_dtype(take_until(text, ':'));
  if (!dtype || text.empty()) return malformed(whole, "dtype:index,index,...");
  BucketLayout::Bucket bucket{.dtype = *dtype, .parameters = {}};
  while (!text.empty()) {
    const bool more_follows = text.find(',') != std::string_view::npos;
    const std::string_view number = take_until(text, ',');
    int64_t index = -1;
    const auto [end, problem] =
        std::from_chars(number.data(), number.data() + number.size(), index);
    if (problem != std::errc() || end != number.data() + number.size() || index < 0 ||
        (more_follows && text.empty())) {
      return malformed(whole, "dtype:index,index,...");
    }
    bucket.parameters.push_back(index);
  }
  return bucket;
}

}  // namespace

std::string BucketLayout::to_string() const {
  std::string text;
  for (const Bucket& bucket : buckets) {
    if (!text.empty()) text += ';';
    text += cadre::to_string(bucket.dtype);
    char separator = ':';
    for (const int64_t index : bucket.parameters) {
      text += separator + std::to_string(index);
      separator = ',';
    }
  }
  return text;
}

BucketLayout BucketLayout::parse(std::string_view text) {
  BucketLayout layout;
  while (!text.empty()) {
    const bool more_follows = text.find(';') != std::string_view::npos;
    layout.buckets.push_back(parse_bucket(take_until(text, ';')).value_or_throw());
    if (more_follows && text.empty()) throw malformed(";", "followed by a bucket");
  }
  return layout;
}

std::vector<int64_t> reverse_order(size_t num_parameters) {
  std::vector<int64_t> order(num_parameters);
  std::iota(order.rbegin(), order.rend(), 0);
  return order;
}

BucketLayout plan_bucket_layout(std::span<const ParameterSize> parameters,
                                std::span<const int64_t> order, const BucketCaps& caps) {
  struct Open {
    BucketLayout::Bucket bucket;
    int64_t num_bytes = 0;
    size_t last_position = 0;  // the index in `order` of the bucket's last parameter
  };
  std::array<Open, kNumDTypes> open;
  std::vector<Open> closed;
  for (size_t position = 0; position < order.size(); ++position) {
    const int64_t index = order[position];
    const ParameterSize& parameter = parameters[index];
    Open& current = open[static_cast<size_t>(parameter.dtype)];
    current.bucket.dtype = parameter.dtype;
    current.bucket.parameters.push_back(index);
    current.num_bytes += parameter.num_bytes();
    current.last_position = position;
    if (current.num_bytes >= (closed.empty() ? caps.first_bytes : caps.bytes)) {
      closed.push_back(std::exchange(current, Open{}));
    }
  }
  for (Open& rest : open) {
    if (!rest.bucket.parameters.empty()) closed.push_back(std::move(rest));
  }
  std::sort(closed.begin(), closed.end(),
            [](const Open& a, const Open& b) { return a.last_position < b.last_position; });
  BucketLayout layout;
  for (Open& done : closed) layout.buckets.push_back(std::move(done.bucket));
  return layout;
}

void check_layout_fits(const BucketLayout& layout, std::span<const ParameterSize> parameters) {
  const auto misfit = [](const std::string& problem) {
    return Error(ErrorCode::kInvalidArgument,
                 format("bucket layout: {}; the layout belongs to another model: pass no layout, "
                        "and it is learned again",
                        problem));
  };
  const int64_t num_parameters = static_cast<int64_t>(parameters.size());
  std::vector<bool> seen(parameters.size(), false);
  int64_t num_seen = 0;
  for (const BucketLayout::Bucket& bucket : layout.buckets) {
    if (bucket.parameters.empty()) throw misfit("the layout has an empty bucket");
    for (const int64_t index : bucket.parameters) {
      if (index < 0 || index >= num_parameters) {
        throw misfit(format(
            "the layout has parameter {}, but the model has only {} parameters that are trained",
            index, num_parameters));
      }
      if (seen[index]) throw misfit(format("parameter {} is in the layout twice", index));
      if (parameters[index].dtype != bucket.dtype) {
        throw misfit(format("parameter {} has the dtype {}, but its bucket has {}", index,
                            parameters[index].dtype, bucket.dtype));
      }
      seen[index] = true;
      ++num_seen;
    }
  }
  if (num_seen != num_parameters) {
    throw misfit(format("the layout has {} parameters, but the model has {} that are trained",
                        num_seen, num_parameters));
  }
}

}  // namespace cadre
