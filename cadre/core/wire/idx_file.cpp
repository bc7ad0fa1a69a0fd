#include "cadre/core/wire/idx_file.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <span>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

constexpr uint8_t kUnsignedByte = 0x08;
constexpr size_t kMagicBytes = 4;
constexpr size_t kAxisBytes = 4;
// The largest ratio by which deflate can expand data: a match of 258 bytes takes 2 bits.
constexpr uint64_t kMaxExpansion = 1032;
// The largest number of bytes that zlib has read and not yet decoded.
constexpr uint64_t kMaxHeldBytes = 8;
constexpr std::array<std::byte, 2> kGzipStart = {std::byte{0x1f}, std::byte{0x8b}};
constexpr int kGzipWindowBits = 15 + 16;  // the value with which zlib accepts gzip only

Error corrupt_idx(const std::string& what) {
  return Error(ErrorCode::kCorruption, cadre::format("idx file: {}", what));
}

// The content of the file, after decompression, which is read in pieces.
class Source {
 public:
  virtual ~Source() = default;
  // Reads into `out` and returns the number of bytes. It is less than the size of `out` only if the
  // content has ended.
  virtual Result<size_t> read(std::span<uint8_t> out) = 0;
  // Returns an upper bound of the number of bytes that are left.
  virtual uint64_t max_remaining() const = 0;
};

class PlainSource final : public Source {
 public:
  explicit PlainSource(ConstBytes file) : rest_(file) {}

  Result<size_t> read(std::span<uint8_t> out) override {
    const size_t count = std::min(out.size(), rest_.size());
    std::ranges::copy(rest_.first(count), std::as_writable_bytes(out).begin());
    rest_ = rest_.subspan(count);
    return count;
  }
  uint64_t max_remaining() const override { return rest_.size(); }

 private:
  ConstBytes rest_;
};

class GzipSource final : public Source {
 public:
  explicit GzipSource(ConstBytes file) : rest_(file) {
    is_open_ = inflateInit2(&stream_, kGzipWindowBits) == Z_OK;
  }
  ~GzipSource() override {
    if (is_open_) inflateEnd(&stream_);
  }
  GzipSource(const GzipSource&) = delete;
  GzipSource& operator=(const GzipSource&) = delete;

  Result<size_t> read(std::span<uint8_t> out) override {
    if (!is_open_)
      return Error(ErrorCode::kUnavailable, "idx file: not enough memory to decompress the file");
    size_t count = 0;
    while (count < out.size() && !is_at_end_) {
      feed();
      stream_.next_out = out.data() + count;
      stream_.avail_out = chunk(out.size() - count);
      const uInt room = stream_.avail_out;
      const int code = inflate(&stream_, Z_NO_FLUSH);
      count += room - stream_.avail_out;
      if (code == Z_STREAM_END) {
        const Status status = go_to_next_member();
        if (!status.ok()) return status.error();
      } else if (code == Z_BUF_ERROR) {
        return corrupt_idx("the gzip data is truncated; fetch the file again");
      } else if (code != Z_OK) {
        return corrupt_idx(cadre::format("the gzip data is damaged ({}); fetch the file again",
                                         stream_.msg != nullptr ? stream_.msg : "no reason given"));
      }
    }
    return count;
  }

  uint64_t max_remaining() const override {
    return is_at_end_ ? 0 : (rest_.size() + stream_.avail_in + kMaxHeldBytes) * kMaxExpansion;
  }

 private:
  static uInt chunk(size_t size) {
    return static_cast<uInt>(std::min<size_t>(size, std::numeric_limits<uInt>::max()));
  }

  // Goes on with the next gzip member: a gzip file is a sequence of members, whose contents are
  // concatenated (RFC 1952, 2.2).
  Status go_to_next_member() {
    feed();
    is_at_end_ = stream_.avail_in == 0;
    if (is_at_end_) return {};
    if (std::byte{*stream_.next_in} != kGzipStart[0]) {
      return corrupt_idx(cadre::format("{} bytes follow the gzip data; fetch the file again",
                                       stream_.avail_in + rest_.size()));
    }
    inflateReset(&stream_);  // fails only for a stream that is not initialized
    return {};
  }

  void feed() {
    if (stream_.avail_in > 0) return;
    const uInt count = chunk(rest_.size());
    // zlib only reads through this pointer, but its type is not const.
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(rest_.data()));
    stream_.avail_in = count;
    rest_ = rest_.subspan(count);
  }

  ConstBytes rest_;
  z_stream stream_ = {};
  bool is_open_ = false;
  bool is_at_end_ = false;
};

bool is_gzip(ConstBytes file) {
  return file.size() >= kGzipStart.size() &&
         std::ranges::equal(file.first(kGzipStart.size()), kGzipStart);
}

// Reads a 32-bit number, which is big-endian in this format.
uint32_t number_at(std::span<const uint8_t> bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

Result<std::vector<int64_t>> read_shape(Source& source) {
  std::array<uint8_t, kMagicBytes> magic = {};
  const auto got = source.read(magic);
  if (!got.ok()) return got.error();
  if (*got != kMagicBytes || magic[0] != 0 || magic[1] != 0) {
    return corrupt_idx(cadre::format(
        "the file starts with {:02x} {:02x} {:02x} {:02x} ({} bytes read); expected 00 00 "
        "and an element type",
        magic[0], magic[1], magic[2], magic[3], *got));
  }
  if (magic[2] != kUnsignedByte) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("idx file: elements of type 0x{:02x}; only unsigned bytes (0x08) "
                               "are read, which images and labels are",
                               magic[2]));
  }
  const size_t num_axes = magic[3];
  if (num_axes == 0 || num_axes > kMaxIdxAxes) {
    return corrupt_idx(cadre::format("{} axes; expected 1 to {}", num_axes, kMaxIdxAxes));
  }
  std::array<uint8_t, kMaxIdxAxes* kAxisBytes> sizes = {};
  const std::span<uint8_t> used = std::span(sizes).first(num_axes * kAxisBytes);
  const auto num_read = source.read(used);
  if (!num_read.ok()) return num_read.error();
  if (*num_read != used.size()) return corrupt_idx("the file ends before the sizes of its axes");
  std::vector<int64_t> shape;
  for (size_t axis = 0; axis < num_axes; ++axis) {
    shape.push_back(number_at(used.subspan(axis * kAxisBytes)));
  }
  return shape;
}

// Returns the product of the sizes, or an error if it exceeds the limit. The product is 0 if one
// size is 0.
Result<uint64_t> num_elements(const std::vector<int64_t>& shape) {
  uint64_t product = 1;
  for (const int64_t size : shape) {
    if (size == 0) return uint64_t{0};
  }
  for (const int64_t size : shape) {
    const auto factor = static_cast<uint64_t>(size);
    if (product > kMaxIdxBytes / factor) {
      return corrupt_idx(
          cadre::format("the product of its axes is more than {} elements", kMaxIdxBytes));
    }
    product *= factor;
  }
  return product;
}

}  // namespace

Result<IdxArray> parse_idx(ConstBytes file) {
  std::unique_ptr<Source> source;
  if (is_gzip(file)) {
    source = std::make_unique<GzipSource>(file);
  } else {
    source = std::make_unique<PlainSource>(file);
  }
  auto shape = read_shape(*source);
  if (!shape.ok()) return shape.error();
  const auto count = num_elements(*shape);
  if (!count.ok()) return count.error();
  if (*count > source->max_remaining()) {
    return corrupt_idx(
        cadre::format("its header declares {} elements, but at most {} can follow; fetch the "
                      "file again",
                      *count, source->max_remaining()));
  }
  IdxArray array{.shape = *std::move(shape), .elements = std::vector<uint8_t>(*count)};
  const auto got = source->read(array.elements);
  if (!got.ok()) return got.error();
  if (*got != *count) {
    return corrupt_idx(
        cadre::format("the file has {} elements, but its header declares {}; fetch the file again",
                      *got, *count));
  }
  std::array<uint8_t, 1> extra = {};
  const auto num_extra = source->read(extra);
  if (!num_extra.ok()) return num_extra.error();
  if (*num_extra != 0) {
    return corrupt_idx(
        cadre::format("bytes follow the {} elements that its header declares", *count));
  }
  return array;
}

std::vector<std::byte> encode_idx(const IdxArray& array) {
  std::vector<std::byte> bytes = {std::byte{0}, std::byte{0}, std::byte{kUnsignedByte},
                                  static_cast<std::byte>(array.shape.size())};
  for (const int64_t size : array.shape) {
    for (const int shift : {24, 16, 8, 0}) bytes.push_back(static_cast<std::byte>(size >> shift));
  }
  const auto elements = std::as_bytes(std::span(array.elements));
  bytes.insert(bytes.end(), elements.begin(), elements.end());
  return bytes;
}

}  // namespace cadre
