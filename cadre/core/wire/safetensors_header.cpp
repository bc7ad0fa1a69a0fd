#include "cadre/core/wire/safetensors_header.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre::wire {
namespace {

using Json = nlohmann::json;

constexpr size_t kAlignment = 8;

struct DTypeBytes {
  std::string_view name;
  size_t num_bytes;
};
constexpr std::array<DTypeBytes, 16> kDTypes = {{{"BOOL", 1},
                                                 {"U8", 1},
                                                 {"I8", 1},
                                                 {"F8_E5M2", 1},
                                                 {"F8_E4M3", 1},
                                                 {"I16", 2},
                                                 {"U16", 2},
                                                 {"F16", 2},
                                                 {"BF16", 2},
                                                 {"I32", 4},
                                                 {"U32", 4},
                                                 {"F32", 4},
                                                 {"F64", 8},
                                                 {"I64", 8},
                                                 {"U64", 8},
                                                 {"C64", 8}}};

Error corrupt_header(const std::string& what) {
  return Error(ErrorCode::kCorruption, cadre::format("header: {}", what));
}

// Builds the header from the events of a SAX parser. So only the three levels of the format are
// stored, duplicate keys are detected, and deep nesting needs no stack.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  std::vector<SafetensorsEntry>& tensors() { return tensors_; }
  std::map<std::string, std::string>& metadata() { return metadata_; }
  const std::string& failure() const { return failure_; }

  bool start_object(size_t) override {
    if (place_ == Place::kStart) return enter(Place::kTop);
    if (place_ == Place::kTop && key_ == kSafetensorsMetadataKey) return enter(Place::kMetadata);
    if (place_ == Place::kTop) {
      tensors_.push_back({.name = key_, .dtype = {}, .shape = {}});
      seen_fields_.clear();
      num_offsets_ = 0;
      return enter(Place::kTensor);
    }
    return unexpected("an object");
  }

  bool end_object() override {
    if (place_ == Place::kTensor && seen_fields_.size() != 3) {
      return fail(cadre::format("tensor '{}' lacks dtype, shape or data_offsets", name()));
    }
    return enter(place_ == Place::kTop ? Place::kEnd : Place::kTop);
  }

  bool key(std::string& text) override {
    key_ = text;
    if (place_ == Place::kTop && !names_.insert(text).second) {
      return fail(cadre::format("name '{}' occurs twice", text));
    }
    if (place_ == Place::kTensor) {
      if (text != "dtype" && text != "shape" && text != "data_offsets") {
        return fail(cadre::format("tensor '{}' has the unknown field '{}'", name(), text));
      }
      if (!seen_fields_.insert(text).second) {
        return fail(cadre::format("tensor '{}' has {} twice", name(), text));
      }
    }
    if (place_ == Place::kMetadata && metadata_.contains(text)) {
      return fail(cadre::format("metadata key '{}' occurs twice", text));
    }
    return true;
  }

  bool string(std::string& text) override {
    if (place_ == Place::kMetadata) {
      metadata_.emplace(key_, text);
      return true;
    }
    if (place_ == Place::kTensor && key_ == "dtype") {
      tensors_.back().dtype = text;
      return true;
    }
    return unexpected("a string");
  }

  bool start_array(size_t) override {
    if (place_ == Place::kTensor && key_ == "shape") return enter(Place::kShape);
    if (place_ == Place::kTensor && key_ == "data_offsets") return enter(Place::kOffsets);
    return unexpected("an array");
  }

  bool end_array() override {
    if (place_ == Place::kOffsets && num_offsets_ != 2) {
      return fail(
          cadre::format("tensor '{}' has {} data_offsets; expected 2", name(), num_offsets_));
    }
    return enter(Place::kTensor);
  }

  bool number_unsigned(uint64_t value) override {
    if (place_ == Place::kShape) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        return fail(cadre::format("tensor '{}' has a dimension of {}", name(), value));
      }
      tensors_.back().shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (place_ == Place::kOffsets && num_offsets_ < 2) {
      (num_offsets_ == 0 ? tensors_.back().begin : tensors_.back().end) = value;
      ++num_offsets_;
      return true;
    }
    return unexpected("a number");
  }

  bool number_integer(int64_t) override { return unexpected("a negative number"); }
  bool number_float(double, const std::string&) override { return unexpected("a fraction"); }
  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a truth value"); }
  bool binary(Json::binary_t&) override { return unexpected("binary data"); }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return fail(cadre::format("no valid JSON at byte {}", position));
  }

 private:
  enum class Place { kStart, kTop, kMetadata, kTensor, kShape, kOffsets, kEnd };

  const std::string& name() const { return tensors_.back().name; }

  bool enter(Place place) {
    place_ = place;
    return true;
  }

  bool fail(std::string what) {
    if (failure_.empty()) failure_ = std::move(what);
    return false;
  }

  bool unexpected(std::string_view what) {
    return fail(cadre::format("{} under key '{}', where the format allows none", what, key_));
  }

  Place place_ = Place::kStart;
  std::string key_;
  std::set<std::string> names_;
  std::set<std::string> seen_fields_;
  int num_offsets_ = 0;
  std::vector<SafetensorsEntry> tensors_;
  std::map<std::string, std::string> metadata_;
  std::string failure_;
};

// Returns the size of the tensor in bytes; nullopt if it does not fit into 64 bits.
std::optional<uint64_t> bytes_of(const SafetensorsEntry& entry, size_t element_bytes) {
  // A dimension of 0 makes the tensor empty, whatever the other dimensions are.
  if (std::ranges::find(entry.shape, 0) != entry.shape.end()) return 0;
  uint64_t total = element_bytes;
  for (const int64_t dim : entry.shape) {
    if (__builtin_mul_overflow(total, static_cast<uint64_t>(dim), &total)) return std::nullopt;
  }
  return total;
}

// Sorts the tensors. Checks that the byte range of each tensor has the size that its dtype and
// shape need, and that the ranges cover the data without gap or overlap.
Status check_layout(std::vector<SafetensorsEntry>& tensors, uint64_t data_bytes) {
  std::ranges::sort(tensors, [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  uint64_t covered = 0;
  for (const SafetensorsEntry& entry : tensors) {
    const size_t element_bytes = safetensors_dtype_bytes(entry.dtype);
    if (element_bytes == 0) {
      return corrupt_header(
          cadre::format("tensor '{}' has the unknown dtype '{}'", entry.name, entry.dtype));
    }
    if (entry.begin != covered || entry.end < entry.begin) {
      return corrupt_header(
          cadre::format("tensor '{}' lies at [{}, {}); expected it to begin at {}", entry.name,
                        entry.begin, entry.end, covered));
    }
    const std::optional<uint64_t> expected = bytes_of(entry, element_bytes);
    if (expected != entry.end - entry.begin) {
      return corrupt_header(
          cadre::format("tensor '{}' has {} bytes, which its dtype and shape contradict",
                        entry.name, entry.end - entry.begin));
    }
    covered = entry.end;
  }
  if (covered != data_bytes) {
    return corrupt_header(
        cadre::format("tensors cover {} bytes, but the file holds {}", covered, data_bytes));
  }
  return {};
}

}  // namespace

size_t safetensors_dtype_bytes(std::string_view dtype) {
  const auto found = std::ranges::find(kDTypes, dtype, &DTypeBytes::name);
  return found == kDTypes.end() ? 0 : found->num_bytes;
}

SafetensorsHeader lay_out_safetensors(std::vector<SafetensorsEntry> tensors,
                                      std::map<std::string, std::string> metadata) {
  std::ranges::sort(tensors, [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    const size_t a_bytes = safetensors_dtype_bytes(a.dtype);
    const size_t b_bytes = safetensors_dtype_bytes(b.dtype);
    return a_bytes != b_bytes ? a_bytes > b_bytes : a.name < b.name;
  });
  uint64_t offset = 0;
  for (SafetensorsEntry& entry : tensors) {
    entry.begin = offset;
    offset += bytes_of(entry, safetensors_dtype_bytes(entry.dtype)).value_or(0);
    entry.end = offset;
  }
  SafetensorsHeader header;
  header.tensors = std::move(tensors);
  header.metadata = std::move(metadata);
  return header;
}

uint64_t safetensors_header_bytes(ConstBytes prefix) {
  if (prefix.size() < kSafetensorsLengthBytes) return 0;
  uint64_t length = 0;
  for (size_t i = 0; i < kSafetensorsLengthBytes; ++i) {
    length |= std::to_integer<uint64_t>(prefix[i]) << (8 * i);  // the word is little-endian
  }
  return length;
}

Result<SafetensorsHeader> parse_safetensors_header(ConstBytes prefix, uint64_t file_bytes) {
  if (prefix.size() < kSafetensorsLengthBytes) {
    return corrupt_header(cadre::format("{} bytes; expected at least 8", prefix.size()));
  }
  const uint64_t length = safetensors_header_bytes(prefix);
  if (length > kMaxSafetensorsHeaderBytes) {
    return corrupt_header(cadre::format("its length field says {} bytes; at most {} are allowed",
                                        length, kMaxSafetensorsHeaderBytes));
  }
  if (length > prefix.size() - kSafetensorsLengthBytes ||
      length > file_bytes - kSafetensorsLengthBytes) {
    return corrupt_header(
        cadre::format("its length field says {} bytes, but the file has {}", length, file_bytes));
  }
  const std::string_view json(
      reinterpret_cast<const char*>(prefix.data()) + kSafetensorsLengthBytes, length);
  if (!json.starts_with('{')) return corrupt_header("it does not start with '{'");
  HeaderReader reader;
  if (!Json::sax_parse(json, &reader)) return corrupt_header(reader.failure());

  SafetensorsHeader header;
  header.data_offset = kSafetensorsLengthBytes + length;
  header.tensors = std::move(reader.tensors());
  header.metadata = std::move(reader.metadata());
  CADRE_RETURN_IF_ERROR(check_layout(header.tensors, file_bytes - header.data_offset));
  return header;
}

std::string encode_safetensors_header(const SafetensorsHeader& header) {
  // ordered_json keeps the tensors in the order of their data, as the safetensors library writes
  // them.
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) json[std::string(kSafetensorsMetadataKey)] = header.metadata;
  for (const SafetensorsEntry& entry : header.tensors) {
    json[entry.name] = {
        {"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text = json.dump();
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  std::string encoded(kSafetensorsLengthBytes, '\0');
  for (size_t i = 0; i < kSafetensorsLengthBytes; ++i) {
    encoded[i] = static_cast<char>((text.size() >> (8 * i)) & 0xff);
  }
  return encoded + text;
}

}  // namespace cadre::wire
