// Checks that parse_snapshot_manifest() returns for all inputs. In a manifest that it returns, the
// pieces must cover each element of each tensor once, and all files must be in the folder. The
// manifest must be equal after encoding and parsing.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "cadre/core/wire/snapshot_manifest.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

using cadre::SnapshotManifest;

// Returns whether each element of the tensor is in exactly one piece; true, unchecked, for tensors
// of more than kMaxElements.
bool is_covered_once(const cadre::ManifestTensor& tensor) {
  constexpr int64_t kMaxElements = 4096;
  int64_t numel = 1;
  for (const int64_t size : tensor.shape) {
    if (size > kMaxElements) return true;
    numel *= size;
    if (numel > kMaxElements) return true;
  }
  std::string seen(static_cast<size_t>(numel), '\0');
  for (const cadre::ManifestPiece& piece : tensor.pieces) {
    for (int64_t i = 0; i < numel; ++i) {
      int64_t rest = i;
      bool is_inside = true;
      for (size_t dim = tensor.shape.size(); dim-- > 0;) {
        const int64_t at = rest % tensor.shape[dim];
        rest /= tensor.shape[dim];
        is_inside =
            is_inside && at >= piece.offsets[dim] && at < piece.offsets[dim] + piece.sizes[dim];
      }
      if (is_inside) ++seen[static_cast<size_t>(i)];
    }
  }
  return std::ranges::all_of(seen, [](char count) { return count == 1; });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  const std::string_view text(reinterpret_cast<const char*>(data), num_bytes);
  const auto manifest = cadre::parse_snapshot_manifest(text);
  if (!manifest.ok()) return 0;
  for (const cadre::ManifestFile& file : manifest->files) {
    if (file.name.find('/') != std::string::npos || file.name.starts_with('.')) std::abort();
  }
  if (!std::ranges::all_of(manifest->tensors, is_covered_once)) std::abort();
  const auto encoded = cadre::encode_snapshot_manifest(*manifest);
  if (!encoded.ok()) std::abort();
  const auto again = cadre::parse_snapshot_manifest(*encoded);
  if (!again.ok() || *again != *manifest) std::abort();
  return 0;
}

namespace {

// Returns a valid manifest as a start for mutations, because random bytes never become one.
std::string sample() {
  const SnapshotManifest manifest{
      .step = 7,
      .world_size = 2,
      .strategy = "fsdp",
      .mesh = "{shard: 2}",
      .files = {{"a.safetensors", 120}, {"b.safetensors", 120}},
      .tensors = {{.name = "w",
                   .dtype = "F32",
                   .shape = {3, 2},
                   .pieces = {{0, {0, 0}, {1, 2}}, {1, {1, 0}, {2, 2}}}},
                  {.name = "w",
                   .state = "step",
                   .is_scalar = true,
                   .dtype = "I64",
                   .shape = {},
                   .pieces = {{0, {}, {}}}}}};
  return cadre::encode_snapshot_manifest(manifest).value();
}

}  // namespace

// One call in 16 returns a valid manifest. The others mutate the input; about half of them change
// only one digit, so that the text stays valid JSON.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  const std::string fresh = sample();
  if ((seed % 16 == 0 || size == 0) && fresh.size() <= max_size) {
    std::memcpy(data, fresh.data(), fresh.size());
    return fresh.size();
  }
  if (seed % 2 != 0) return LLVMFuzzerMutate(data, size, max_size);
  for (size_t i = 0; i < size; ++i) {
    uint8_t& byte = data[(seed / 32 + i) % size];
    if (byte < '0' || byte > '9') continue;
    byte = static_cast<uint8_t>('0' + seed / 2 % 10);
    break;
  }
  return size;
}
