#include "cadre/train/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "cadre/core/os/files/file.h"
#include "cadre/core/os/proc/program_output.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/train/checkpoint/file_digests.h"
#include "cadre/train/checkpoint/module_file.h"
#include "cadre/train/checkpoint/snapshot_parts.h"
#include "cadre/train/checkpoint/snapshot_reader.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class SafetensorsTest : public ::testing::Test {
 protected:
  testing::TemporaryFolder folder_;
  const std::string path_ = folder_.file("x.safetensors");
};

TEST_F(SafetensorsTest, ReadsBackWhatItWrote) {
  const auto options = [](at::ScalarType type) { return at::TensorOptions(type); };
  std::vector<NamedTensor> tensors;
  for (const at::ScalarType type :
       {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat,
        at::kDouble, at::kBool, at::kComplexFloat}) {
    tensors.emplace_back(c10::toString(type), torch::arange(7).to(type));
  }
  tensors.emplace_back("transposed", torch::arange(6, options(at::kFloat)).view({2, 3}).t());
  const at::Tensor numbers = torch::complex(torch::ones({2}), torch::ones({2}));
  tensors.emplace_back("lazy conjugate", numbers.conj());
  tensors.emplace_back("scalar", torch::tensor(2.5));
  tensors.emplace_back("empty", torch::empty({3, 0}));
  ASSERT_TRUE(write_safetensors(path_, tensors, {{"step", "7"}}).ok());

  const SafetensorsFile file = SafetensorsFile::open(path_);
  EXPECT_EQ(file.metadata().at("step"), "7");
  EXPECT_EQ(file.names().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor read = file.read(name);
    EXPECT_EQ(read.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(read.equal(tensor)) << name;
  }
  EXPECT_THROW(file.read("none"), Error);
}

TEST_F(SafetensorsTest, SaysWhatItCannotHold) {
  const auto message = [&](const std::vector<NamedTensor>& tensors) {
    return write_safetensors(path_, tensors).error().message();
  };
  EXPECT_THAT(message({{"a", torch::ones(1)}, {"a", torch::ones(1)}}),
              ::testing::HasSubstr("two tensors are named 'a'"));
  EXPECT_THAT(message({{"a", torch::ones({2, 2}).to_sparse()}}), ::testing::HasSubstr("'a'"));
  EXPECT_THAT(message({{"a", at::Tensor()}}), ::testing::HasSubstr("undefined"));
  EXPECT_THAT(message({{"a", torch::empty({2}, torch::kMeta)}}),
              ::testing::HasSubstr("call cadre::materialize() for a module of defer_init()"));
  // The header uses the key __metadata__ for other data, so a file with a tensor of this name could
  // not be read.
  EXPECT_THAT(message({{"__metadata__", torch::ones(1)}}),
              ::testing::HasSubstr("'__metadata__' is reserved by the safetensors format"));
  EXPECT_THAT(message({{"\xff", torch::ones(1)}}), ::testing::HasSubstr("is no UTF-8 text"));
  EXPECT_FALSE(std::filesystem::exists(path_));
  torch::nn::Module named;
  named.register_parameter("__metadata__", torch::zeros({2}));
  EXPECT_THROW(save(named, path_), Error);
  torch::nn::Module module;
  module.register_buffer("z", torch::zeros({2}, torch::kComplexDouble));
  EXPECT_THROW(save(module, path_), Error);
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path())) << "the temporary file was not removed";
}

std::string corruption_of(const std::function<void()>& read) {
  try {
    read();
  } catch (const Error& error) {
    return error.code() == ErrorCode::kCorruption ? error.message() : "another code";
  }
  return "no error";
}

// Another process truncates the file while this process reads it. The read must fail with an error;
// if the file were mapped, SIGBUS would end this process.
TEST_F(SafetensorsTest, AFileThatIsCutShortIsAnErrorAndNoSignal) {
  constexpr int64_t kRows = 300;
  const at::Tensor weight = torch::arange(kRows * 1000, torch::kDouble).view({kRows, 1000});
  ASSERT_TRUE(write_safetensors(path_, {{"weight", weight}}).ok());
  const SafetensorsFile file = SafetensorsFile::open(path_);
  SnapshotReader reader = SnapshotReader::open(path_);
  const ManifestTensor& tensor = *reader.model().at("weight");
  const std::vector<Box> boxes = {Box{{0, 0}, {kRows, 1000}}};
  reader.prepare(tensor, boxes);
  const std::string digest = digest_of(path_).value_or_throw();
  EXPECT_EQ(digest.size(), 128u);
  std::filesystem::resize_file(path_, 100'000);
  const auto expected = ::testing::AllOf(::testing::HasSubstr(path_ + " was cut short"),
                                         ::testing::HasSubstr("ends at byte 100000 now"));
  EXPECT_THAT(corruption_of([&] { file.read("weight"); }), expected);
  EXPECT_THAT(corruption_of([&] {
                reader.read(tensor, boxes, torch::empty({kRows * 1000}, torch::kDouble));
              }),
              expected);
}

// The tensor is larger than one read, and the requested boxes contain only parts of its rows.
TEST_F(SafetensorsTest, BoxesOfALargeTensorAreRead) {
  const std::vector<int64_t> sizes = {1200, 5, 500};  // 24 MB
  const at::Tensor weight = torch::arange(1200 * 2500, torch::kDouble).view(sizes);
  ASSERT_TRUE(write_safetensors(path_, {{"weight", weight}, {"one", torch::tensor(3.5)}}).ok());
  SnapshotReader reader = SnapshotReader::open(path_);
  const std::vector<Box> boxes = {Box{{0, 0, 0}, sizes}, Box{{3, 0, 0}, {1100, 5, 500}},
                                  Box{{3, 2, 7}, {1100, 2, 9}}, Box{{1199, 4, 499}, {1, 1, 1}}};
  for (const Box& box : boxes) {
    const ManifestTensor& tensor = *reader.model().at("weight");
    reader.prepare(tensor, {&box, 1});
    const at::Tensor flat = torch::zeros({box.numel()}, torch::kDouble);
    reader.read(tensor, {&box, 1}, flat);
    EXPECT_TRUE(torch::equal(flat.view(box.sizes), slice_of(weight, Box{{0, 0, 0}, sizes}, box)));
  }
  const ManifestTensor& one = *reader.model().at("one");
  const Box whole;
  reader.prepare(one, {&whole, 1});
  const at::Tensor flat = torch::zeros({1});
  reader.read(one, {&whole, 1}, flat);
  EXPECT_EQ(flat.item<float>(), 3.5);
}

TEST_F(SafetensorsTest, NamesTheFileThatIsDamaged) {
  const std::string text = "garbage!garbage!";
  ASSERT_TRUE(os::replace_file(path_, std::as_bytes(std::span(text))).ok());
  try {
    SafetensorsFile::open(path_);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorruption);
    EXPECT_THAT(error.message(), ::testing::HasSubstr(path_));
  }
}

TEST_F(SafetensorsTest, AFileOfAnotherFormatIsSaidToBeOne) {
  const auto message = [](auto&& read) {
    try {
      read();
    } catch (const Error& error) {
      return error.message();
    }
    return std::string("no error");
  };
  torch::nn::Linear linear(2, 2);
  torch::save(linear, path_);
  EXPECT_EQ(message([&] { load(linear, path_); }),
            path_ +
                " is no safetensors file: torch::save() wrote it, so read it with "
                "torch::load() and write it with cadre::save()");
  const std::string text = "garbage!garbage!";
  ASSERT_TRUE(os::replace_file(path_, std::as_bytes(std::span(text))).ok());
  EXPECT_THAT(message([&] { load(linear, path_); }),
              ::testing::StartsWith(path_ + " is no safetensors file, or is damaged: header: "));
  EXPECT_EQ(message([&] { load(linear, path_ + ".none"); }),
            "open " + path_ + ".none: No such file or directory (errno 2)");
  EXPECT_EQ(message([&] { save(linear, path_ + ".none/x"); }),
            "create a file beside " + path_ + ".none/x: No such file or directory (errno 2)");
}

// An independent reader in Python, written from the description of the format with only the modules
// struct and json.
constexpr const char* kPythonReader = R"(
import json, struct, sys
raw = open(sys.argv[1], 'rb').read()
(n,) = struct.unpack('<Q', raw[:8])
header = json.loads(raw[8:8 + n])
assert (8 + n) % 8 == 0
meta = header.pop('__metadata__')
codes = {'F32': 'f', 'I64': 'q', 'U8': 'B'}
end = 0
for name, t in header.items():
    begin, stop = t['data_offsets']
    assert begin == end, name
    end = stop
    values = struct.unpack('<%d%s' % ((stop - begin) // struct.calcsize('<' + codes[t['dtype']]),
                                      codes[t['dtype']]), raw[8 + n + begin:8 + n + stop])
    print(name, t['dtype'], t['shape'], *values)
assert 8 + n + end == len(raw)
print(meta)
)";

TEST_F(SafetensorsTest, PythonReadsIt) {
  ASSERT_TRUE(write_safetensors(path_,
                                {{"u", torch::arange(3, at::kByte)},
                                 {"f", torch::tensor({{0.5F}, {-2.0F}})},
                                 {"i", torch::tensor(int64_t{-9})}},
                                {{"format", "pt"}})
                  .ok());
  const auto system = os::make_native_system();
  const auto output = os::program_output({"python3", "-c", kPythonReader, path_},
                                         system->deadline_in(std::chrono::seconds(60)));
  ASSERT_TRUE(output.ok()) << output.error().message();
  EXPECT_EQ(*output,
            "i I64 [] -9\n"
            "f F32 [2, 1] 0.5 -2.0\n"
            "u U8 [3] 0 1 2\n"
            "{'format': 'pt'}\n");
}

TEST_F(SafetensorsTest, AFileThatIsWrittenOrReplacedWhileItIsOpenIsNoticed) {
  const torch::nn::Linear net(3, 4);
  save(*net, path_);
  const SafetensorsFile file = SafetensorsFile::open(path_);
  file.check_unchanged();
  save(*net, path_);
  file.check_unwritten();  // the open file was not written to; the path now names another file
  EXPECT_THAT([&] { file.check_unchanged(); },
              ThrowsMessage<Error>(AllOf(HasSubstr(path_), HasSubstr("was replaced by another"))));
  const SafetensorsFile next = SafetensorsFile::open(path_);
  std::ofstream(path_, std::ios::app) << "more";
  EXPECT_THAT([&] { next.check_unwritten(); }, ThrowsMessage<Error>(HasSubstr(path_)));
  EXPECT_THAT([&] { next.check_unchanged(); }, ThrowsMessage<Error>(HasSubstr(path_)));
}

// All ranks of one host may save to one path at once. A reader always gets a complete file, and no
// temporary file stays in the folder.
TEST_F(SafetensorsTest, SeveralWritersOfOnePathDoNotMeet) {
  constexpr int kWriters = 4;
  std::vector<std::thread> writers;
  std::atomic<int> num_failed = 0;
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([&, writer] {
      torch::nn::Linear net(100, 100);
      torch::nn::init::constant_(net->weight, writer);
      torch::nn::init::constant_(net->bias, writer);
      try {
        for (int i = 0; i < 20; ++i) {
          save(net, path_);
          torch::nn::Linear read(100, 100);
          load(read, path_);
          if (!read->weight.eq(read->bias[0]).all().item<bool>()) ++num_failed;
        }
      } catch (const Error&) {
        ++num_failed;
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(num_failed, 0);
  const std::filesystem::path folder = std::filesystem::path(path_).parent_path();
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);
}

}  // namespace
}  // namespace cadre
