// A small training by `cadre train` for tests that run it as a program: its text, its configuration
// and the steps that its runs have written.
//
// Threads: one. Lifetime: the destructor removes the folder with all runs.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::testing {

inline std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class SmallTraining {
 public:
  // The values of a step that do not depend on time.
  struct Step {
    int step = 0;
    double loss = 0;
    double gradient_norm = 0;

    friend bool operator==(const Step&, const Step&) = default;
    friend std::ostream& operator<<(std::ostream& stream, const Step& one) {
      return stream << format("{}: {} {}", one.step, one.loss, one.gradient_norm);
    }
  };

  explicit SmallTraining(int num_steps) : num_steps_(num_steps) {
    std::ofstream text(folder_.file("text"));
    for (int i = 0; i < 700; ++i) text << "line " << i * i % 97 << " of a text to learn\n";
    // The batch size is odd, so the ranks have shares of different sizes, which are weighted.
    std::ofstream(config())
        << "[model]\nkind = \"gpt\"\nlayers = 1\nheads = 2\nwidth = 16\ncontext = 16\n"
        << "[data]\npath = \"" << folder_.file("text") << "\"\n"
        << "[run]\nfolder = \"" << folder_.path().string() << "\"\nsteps = " << num_steps
        << "\nglobal_batch_size = 11\nevaluate_tokens = 500\n[sample]\ntokens = 0\n";
  }

  std::string config() const { return folder_.file("config.toml"); }
  std::filesystem::path folder_of(const std::string& run) const { return folder_.path() / run; }
  std::filesystem::path metrics_of(const std::string& run) const {
    return folder_of(run) / "metrics.jsonl";
  }
  // Returns a file of the snapshot at the end of the run.
  std::string snapshot_file(const std::string& run, const std::string& file) const {
    return content_of(folder_of(run) / format("step-{:06d}", num_steps_) / file);
  }

  std::vector<Step> steps_of(const std::string& run) const {
    std::vector<Step> steps;
    std::ifstream file(metrics_of(run));
    for (std::string line; std::getline(file, line);) {
      const auto step = nlohmann::json::parse(line);
      if (!step.contains("loss")) continue;
      steps.push_back({step["step"], step["loss"], step["gradient_norm"]});
    }
    return steps;
  }
  // Returns the steps of an undisturbed run as one shows them in which rank 0 was killed and whose
  // survivor continued from `resumed`. Rank 0 writes the line of a step after the last collective
  // of that step. If it is killed in between, the survivor has completed the step and no line shows
  // it.
  std::vector<Step> steps_without_rank_0(const std::string& undisturbed, const std::string& run,
                                         int resumed) const {
    std::vector<Step> steps = steps_of(undisturbed);
    if (steps_of(run).size() + 1 == steps.size()) {
      std::erase_if(steps, [&](const Step& one) { return one.step == resumed; });
    }
    return steps;
  }

 private:
  const int num_steps_;
  const TemporaryFolder folder_;
};

}  // namespace cadre::testing
