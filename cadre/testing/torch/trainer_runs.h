// A fixture that runs the trainer in a temporary folder, with threads as ranks.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/checkpoint/full_state.h"
#include "cadre/train/checkpoint/safetensors.h"
#include "cadre/train/trainer/trainer.h"

namespace cadre::train {

inline std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_content(const std::filesystem::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << content;
}

class TrainerTest : public ::testing::Test {
 protected:
  TrainerTest() {
    std::ofstream text(folder_ + "/text");
    for (int i = 0; i < 700; ++i) text << "line " << i * i % 97 << " of a text to learn\n";
  }

  Config config(const std::string& name) const {
    Config config;
    config.model = {.layers = 1, .heads = 2, .width = 16, .context = 16};
    config.data.path = folder_ + "/text";
    config.schedule.warmup_steps = 2;
    config.run = {.name = name,
                  .folder = folder_,
                  .steps = 12,
                  .global_batch_size = 10,
                  .evaluate_tokens = 500};
    config.sample.tokens = 5;
    return config;
  }

  struct Run {
    TrainResult result;
    std::string screen;
    std::string failures;
  };

  // Runs the trainer on `world_size` ranks. The last rank is asked to stop during step
  // `stop_after`; -1 means that no rank is.
  Run run(const Config& config, int world_size = 1, int64_t stop_after = -1) {
    Run run;
    const testing::RanksResult ranks = testing::run_groups(
        world_size,
        [&](const ProcessGroup& group, std::string&) {
          const auto system = os::make_native_system();
          int64_t steps = 0;
          Trainer trainer(
              config,
              {.world = group,
               .system = *system,
               .time_in_communication = [&] { return group.communicator().time_in_operations(); },
               .stop_is_requested =
                   [&] { return ++steps == stop_after && group.rank() == world_size - 1; },
               .print =
                   [&](std::string_view text) {
                     run.screen += text;
                     on_print_(text);
                   },
               .job = job_,
               .attempt = attempt_});
          const TrainResult result = trainer.run();
          if (group.rank() == 0) run.result = result;
        },
        {.transport = transport_});
    run.failures = ranks.failures();
    return run;
  }

  std::string snapshot(const std::string& run_name, int64_t step) const {
    return SnapshotFolder(folder_ + "/" + run_name).path_of(step);
  }

  // Reads the tensors of a sharded or whole snapshot, sorted by name.
  std::vector<NamedTensor> tensors(const std::string& run_name, int64_t step,
                                   const std::string& file) const {
    std::string path = snapshot(run_name, step) + "/" + file;
    // Names of optimizer state in a sharded snapshot begin with this prefix.
    const std::string prefix = "state.";
    const bool is_whole = std::filesystem::exists(path);
    if (!is_whole) {
      path = folder_ + "/full.safetensors";
      write_full_state(snapshot(run_name, step), path,
                       file == kModelFile ? SnapshotContent::kModel : SnapshotContent::kOptimizer);
    }
    std::vector<NamedTensor> tensors = SafetensorsFile::open(path).read_all();
    for (auto& [name, tensor] : tensors) {
      if (!is_whole && file == kOptimizerFile) name = name.substr(prefix.size());
    }
    std::ranges::sort(tensors, {}, &NamedTensor::name);
    return tensors;
  }

  void expect_same_bits(const std::string& run_a, const std::string& run_b, int64_t step) const {
    for (const std::string file : {"model.safetensors", "optimizer.safetensors"}) {
      const std::vector<NamedTensor> a = tensors(run_a, step, file);
      const std::vector<NamedTensor> b = tensors(run_b, step, file);
      ASSERT_EQ(a.size(), b.size());
      for (size_t i = 0; i < a.size(); ++i) {
        EXPECT_EQ(a[i].name, b[i].name);
        EXPECT_TRUE(a[i].tensor.equal(b[i].tensor)) << file << " " << a[i].name;
      }
    }
  }

  // Converts a snapshot to an earlier version of the format, which has no checksums (B2SUMS).
  static void set_format(const std::string& snapshot, int format) {
    std::filesystem::remove(snapshot + "/B2SUMS");
    nlohmann::json state = nlohmann::json::parse(std::ifstream(snapshot + "/state.json"));
    state["format"] = format;
    std::ofstream(snapshot + "/state.json") << state.dump();
  }

  std::vector<nlohmann::json> metrics(const std::string& run_name) const {
    std::vector<nlohmann::json> lines;
    std::ifstream file(folder_ + "/" + run_name + "/metrics.jsonl");
    for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }

  std::vector<double> losses(const std::string& run_name) const {
    std::vector<double> losses;
    for (const nlohmann::json& line : metrics(run_name)) {
      if (line.contains("loss")) losses.push_back(line["loss"]);
    }
    return losses;
  }

  static void expect_near(const std::vector<double>& actual, const std::vector<double>& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-5) << i;
  }

  TransportChoice transport_ = TransportChoice::kAuto;
  testing::TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path();
  // The values of the fields of TrainerContext with the same names.
  std::string job_;
  int attempt_ = 0;
  std::function<void(std::string_view)> on_print_ = [](std::string_view) {};
};

}  // namespace cadre::train
