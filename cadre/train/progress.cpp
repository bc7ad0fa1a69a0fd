#include "cadre/train/progress.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/os/files/file.h"

namespace cadre::train {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kEraseLine = "\r\x1b[K";
constexpr size_t kMaxStatmBytes = 4096;
constexpr int64_t kPageBytes = 4096;  // of x86-64 and of arm64 as Debian builds it

// The lines of an earlier run that stay valid when it resumes after `step`.
std::string lines_until(const std::string& path, int64_t step) {
  std::string kept;
  std::ifstream file(path);
  for (std::string line; step > 0 && std::getline(file, line);) {
    const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    // The last line of a killed run may be incomplete.
    if (json.is_object() && json.value("step", step + 1) <= step) kept += line + "\n";
  }
  return kept;
}

// By renaming, so that a run that is killed meanwhile loses no line.
os::LockedFile open_metrics(const ProgressOptions& options) {
  const std::string kept = lines_until(options.metrics_path, options.keep_metrics_until_step);
  os::replace_file(options.metrics_path, std::as_bytes(std::span(kept))).value_or_throw();
  return os::LockedFile::open(options.metrics_path, os::LockedFile::kReadableByAll)
      .value_or_throw();
}

std::string duration_text(double seconds) {
  const auto total = static_cast<int64_t>(std::ceil(std::max(seconds, 0.0)));
  if (total < 3600) return cadre::format("{}:{:02}", total / 60, total % 60);
  return cadre::format("{}:{:02}:{:02}", total / 3600, total / 60 % 60, total % 60);
}

// At least two digits.
std::string speed_text(double per_second) {
  if (per_second >= 1000) return cadre::format("{:.1f}k", per_second / 1000);
  if (per_second >= 10) return cadre::format("{:.0f}", per_second);
  return cadre::format("{:.{}f}", per_second, per_second >= 1 ? 1 : 2);
}

}  // namespace

Progress::Progress(const ProgressOptions& options)
    : options_(options),
      metrics_(open_metrics(options)),
      metrics_size_(metrics_.size().value_or_throw()) {}

void Progress::report(const StepReport& step) {
  const std::string line = step_line(step);
  if (options_.is_terminal) {
    options_.print(cadre::format("{}{}", kEraseLine, line));
    line_is_open_ = true;
  } else {
    options_.print(line + "\n");
  }
  write_metrics(Json{{"step", step.step},
                     {"loss", step.loss},
                     {"learning_rate", step.learning_rate},
                     {"gradient_norm", step.gradient_norm},
                     {cadre::format("{}_per_second", step.item_name), step.items_per_second},
                     {"communication_share", step.communication_share},
                     {"memory_bytes", step.memory_bytes}}
                    .dump());
}

void Progress::report(const EvaluationReport& evaluation) {
  const Evaluation& held_out = evaluation.held_out;
  std::string line = cadre::format("held-out loss {:.4f} nats", held_out.loss);
  Json json = {{"step", evaluation.step}, {"held_out_loss", held_out.loss}};
  if (held_out.bigram_entropy) {
    line += cadre::format(" (bigram conditional entropy {:.4f})", *held_out.bigram_entropy);
    json["bigram_entropy"] = *held_out.bigram_entropy;
  }
  if (held_out.accuracy) {
    line += cadre::format(", accuracy {:.2f} %", 100 * *held_out.accuracy);
    json["accuracy"] = *held_out.accuracy;
  }
  print_line(line);
  write_metrics(json.dump());
}

void Progress::print_line(std::string_view line) {
  if (std::exchange(line_is_open_, false)) options_.print("\n");
  options_.print(cadre::format("{}\n", line));
}

void Progress::write_metrics(const std::string& json_line) {
  const std::string line = json_line + "\n";
  const Status status = metrics_.append_at(metrics_size_, std::as_bytes(std::span(line)));
  if (status.ok()) metrics_size_ += line.size();
  const bool was_losing_lines = std::exchange(is_losing_lines_, !status.ok());
  if (status.ok() || was_losing_lines) return;
  print_line(
      cadre::format("warning: {}; training continues, and this line of the metrics and later ones "
                    "that fail are skipped",
                    status.error().message()));
}

std::string step_line(const StepReport& step) {
  const std::string total = std::to_string(step.num_steps);
  std::string number = std::to_string(step.step);
  number.insert(0, total.size() - std::min(total.size(), number.size()), ' ');
  return cadre::format("step {}/{}  loss {:.4f}  {} {}/s  comm {:2.0f} %  {} MB  {} left", number,
                       total, step.loss, speed_text(step.items_per_second), step.item_name,
                       100 * step.communication_share, step.memory_bytes >> 20,
                       duration_text(step.seconds_left));
}

double communication_share(Duration communicated, Duration step) {
  if (step <= Duration::zero()) return 0;
  const std::chrono::duration<double> whole = step;
  return std::min(std::chrono::duration<double>(communicated) / whole, 1.0);
}

int64_t resident_memory_bytes() {
  // Pages: of the whole address space, then resident ones.
  std::istringstream fields(os::read_file("/proc/self/statm", kMaxStatmBytes).value_or_throw());
  int64_t mapped = 0;
  int64_t resident = 0;
  fields >> mapped >> resident;
  return resident * kPageBytes;
}

}  // namespace cadre::train
