#include "cadre/core/wire/snapshot_manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace cadre {
namespace {

using ::testing::HasSubstr;

SnapshotManifest sample() {
  return {.step = 100,
          .world_size = 2,
          .strategy = "fsdp",
          .mesh = "{shard: 2}",
          .files = {{"shard-00001-model-00001-of-00001.safetensors", 120},
                    {"shard-00002-model-00001-of-00001.safetensors", 140}},
          .tensors = {{.name = "fc.weight",
                       .dtype = "F32",
                       .shape = {3, 2},
                       .pieces = {{0, {0, 0}, {1, 2}}, {1, {1, 0}, {2, 2}}}},
                      {.name = "fc.weight",
                       .state = "step",
                       .is_scalar = true,
                       .dtype = "I64",
                       .shape = {},
                       .pieces = {{0, {}, {}}}}},
          .extra = R"({"epoch":3})"};
}

std::string text_of(const SnapshotManifest& manifest) {
  return encode_snapshot_manifest(manifest).value_or_throw();
}

std::string with(std::string_view from, std::string_view to) {
  std::string text = text_of(sample());
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

Error error_of(const std::string& text) {
  const auto parsed = parse_snapshot_manifest(text);
  return parsed.ok() ? Error(ErrorCode::kInternal, "accepted") : parsed.error();
}

TEST(SnapshotManifest, WhatIsWrittenReadsTheSame) {
  const auto parsed = parse_snapshot_manifest(text_of(sample()));
  ASSERT_TRUE(parsed.ok()) << parsed.error().message();
  EXPECT_EQ(*parsed, sample());
}

// The expected text is the format of version 1, which later versions must still be able to read.
TEST(SnapshotManifest, HasTheTextOfItsVersion) {
  EXPECT_EQ(
      text_of(sample()),
      R"({"format":"cadre sharded snapshot","version":1,"step":100,"world_size":2,)"
      R"("strategy":"fsdp","mesh":"{shard: 2}","files":[)"
      R"({"name":"shard-00001-model-00001-of-00001.safetensors","bytes":120},)"
      R"({"name":"shard-00002-model-00001-of-00001.safetensors","bytes":140}],)"
      R"("model":{"fc.weight":{"dtype":"F32","pieces":[{"file":0,"offsets":[0,0],"sizes":[1,2]},)"
      R"({"file":1,"offsets":[1,0],"sizes":[2,2]}],"shape":[3,2]}},)"
      R"("optimizer":{"fc.weight":{"step":{"dtype":"I64",)"
      R"("pieces":[{"file":0,"offsets":[],"sizes":[]}],"scalar":true,"shape":[]}}},)"
      R"("extra":{"epoch":3}})"
      "\n");
}

TEST(SnapshotManifest, NamesInFilesAreThoseOfTorchDistributedCheckpoint) {
  EXPECT_EQ(name_in_files(sample().tensors[0]), "fc.weight");
  EXPECT_EQ(name_in_files(sample().tensors[1]), "state.fc.weight.step");
}

TEST(SnapshotManifest, AnotherVersionIsRefusedByItsNumber) {
  const Error error = error_of(with(R"("version":1)", R"("version":7)"));
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error.message(), "it has version 7; this program reads version 1");
}

TEST(SnapshotManifest, HostileTextsAreRefused) {
  const std::string file = R"("name":"shard-00001-model-00001-of-00001.safetensors")";
  const struct {
    std::string text;
    const char* message;
  } cases[] = {
      {"", "parse error"},
      {"{}", "format"},
      {R"({"format":"cadre sharded snapshot"})", "version"},
      {std::string(100'000, '['), "nested too deeply"},
      {with(file, R"("name":"../model.safetensors")"), "not the plain name"},
      {with(file, R"("name":"/etc/model.safetensors")"), "not the plain name"},
      {with(file, R"("name":".hidden.safetensors")"), "not the plain name"},
      {with(file, R"("name":"manifest.json")"), "not the plain name"},
      {with(file, R"("name":"a\u0000.safetensors")"), "not the plain name"},
      {with(file, R"("name":"\ud800.safetensors")"), "parse error"},
      {with(file, R"("name":"shard-00002-model-00001-of-00001.safetensors")"), "listed twice"},
      {with(R"("bytes":120)", R"("bytes":-1)"), "-1 bytes"},
      {with(R"("bytes":120)", R"("bytes":18446744073709551615)"), "no number of elements"},
      {with(R"("bytes":120)", R"("bytes":1.5)"), "no number of elements"},
      {with(R"("F32")", R"("F99")"), "unknown dtype"},
      {with(R"("shape":[3,2])", R"("shape":[3,-2])"), "negative size"},
      {with(R"("shape":[3,2])", R"("shape":[4611686018427387904,4])"), "63 bits"},
      {with(R"("shape":[3,2])", R"("shape":[4,2])"), "cover 6 of 8"},
      {with(R"("shape":[3,2])", R"("shape":[2,2])"), "a piece has the elements [1, 1 + 2)"},
      {with(R"("offsets":[1,0])", R"("offsets":[0,0])"), "overlap"},
      {with(R"("offsets":[1,0])", R"("offsets":[9223372036854775807,0])"),
       "a piece has the elements"},
      {with(R"("offsets":[1,0])", R"("offsets":[1])"), "1 offsets"},
      {with(R"("sizes":[2,2])", R"("sizes":[0,2])"), "is empty"},
      {with(R"("file":1)", R"("file":2)"), "in file 2 of 2"},
      {with(R"("file":1)", R"("file":0)"), "two pieces"},
      {with(R"("extra":{"epoch":3})", R"("extra":[])"), "array"},
      {with(R"("scalar":true)", R"("scalar":1)"), "boolean"},
  };
  for (const auto& [text, message] : cases) {
    const Error error = error_of(text);
    EXPECT_EQ(error.code(), ErrorCode::kCorruption) << text.substr(0, 500);
    EXPECT_THAT(error.message(), HasSubstr(message)) << text.substr(0, 500);
  }
}

TEST(SnapshotManifest, PiecesOfATensorWithoutElements) {
  const std::vector<int64_t> shape = {0, 4};
  const std::vector<ManifestPiece> one = {{0, {0, 0}, {0, 4}}};
  const std::vector<ManifestPiece> two = {{0, {0, 0}, {0, 4}}, {1, {0, 0}, {0, 4}}};
  EXPECT_TRUE(check_pieces(shape, one).ok());
  EXPECT_FALSE(check_pieces(shape, two).ok());
  EXPECT_FALSE(check_pieces(shape, {}).ok());
}

// The pieces tile the tensor. If any of them is moved or resized by one element, the list must be
// rejected.
TEST(SnapshotManifest, PiecesCoverATensorExactlyOrAreRefused) {
  const std::vector<int64_t> shape = {4, 6};
  const std::vector<ManifestPiece> tiles = {{0, {0, 0}, {2, 4}},
                                            {1, {0, 4}, {3, 2}},
                                            {2, {2, 0}, {2, 3}},
                                            {3, {2, 3}, {1, 1}},
                                            {4, {3, 3}, {1, 3}}};
  EXPECT_TRUE(check_pieces(shape, tiles).ok());
  for (size_t i = 0; i < tiles.size(); ++i) {
    for (const int64_t step : {-1, 1}) {
      for (const size_t dim : {0, 1}) {
        auto moved = tiles;
        moved[i].offsets[dim] += step;
        EXPECT_FALSE(check_pieces(shape, moved).ok()) << i << " " << step << " " << dim;
        auto resized = tiles;
        resized[i].sizes[dim] += step;
        EXPECT_FALSE(check_pieces(shape, resized).ok()) << i << " " << step << " " << dim;
      }
    }
  }
}

TEST(SnapshotManifest, WhatJsonCannotHoldIsRefused) {
  SnapshotManifest manifest = sample();
  manifest.tensors[0].name = "\xff";
  EXPECT_EQ(encode_snapshot_manifest(manifest).error().code(), ErrorCode::kInvalidArgument);
  manifest = sample();
  manifest.extra = "[]";
  EXPECT_THAT(encode_snapshot_manifest(manifest).error().message(), HasSubstr("no JSON object"));
  manifest.extra = "{";
  EXPECT_FALSE(encode_snapshot_manifest(manifest).ok());
}

// A manifest that parse_snapshot_manifest() would reject must not be written: the snapshot would be
// lost.
TEST(SnapshotManifest, WhatCannotBeReadIsNotWritten) {
  SnapshotManifest manifest = sample();
  int num_written = 0;
  for (int depth = 1; depth < 80; ++depth) {
    manifest.extra.clear();
    for (int i = 0; i < depth; ++i) manifest.extra += R"({"a":)";
    manifest.extra += "1" + std::string(static_cast<size_t>(depth), '}');
    const auto text = encode_snapshot_manifest(manifest);
    if (!text.ok()) continue;
    ++num_written;
    EXPECT_TRUE(parse_snapshot_manifest(*text).ok()) << depth;
  }
  EXPECT_GT(num_written, 50);
  EXPECT_LT(num_written, 70);
  manifest.extra = R"({"a":")" + std::string(kMaxSnapshotManifestBytes, 'a') + R"("})";
  EXPECT_THAT(encode_snapshot_manifest(manifest).error().message(), HasSubstr("are allowed"));
}

}  // namespace
}  // namespace cadre
