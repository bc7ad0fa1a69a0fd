#include "cadre/train/trainer/progress.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"

namespace cadre::train {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kEraseLine = "\r\x1b[K";
constexpr size_t kMaxStatmBytes = 4096;
// The size of a page on x86-64, and on arm64 in Debian's kernel.
constexpr int64_t kPageBytes = 4096;

constexpr int kBarsOfALine = 48;

void add_losses(LossCurve& curve, const Json& metrics) {
  const auto step = metrics.at("step").get<int64_t>();
  for (const auto& [key, points] :
       {std::pair{"loss", &curve.training}, {"held_out_loss", &curve.held_out}}) {
    // A loss that is NaN or infinite is written as null, because JSON has no such number.
    const auto loss = metrics.find(key);
    if (loss != metrics.end() && loss->is_number()) points->push_back({step, loss->get<double>()});
  }
}

// Returns the lines of the metrics up to `step`; a resumed run drops the later ones. Adds their
// losses to the curve.
std::string lines_until(const std::string& path, int64_t step, LossCurve& curve) {
  std::string kept;
  std::ifstream file(path);
  for (std::string line; step > 0 && std::getline(file, line);) {
    const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    // If the run was killed, the last line may be incomplete.
    const bool is_line = json.is_object() && json.contains("step") && json["step"].is_number();
    if (!is_line || json["step"] > step) continue;
    kept += line + "\n";
    add_losses(curve, json);
  }
  return kept;
}

std::string duration_text(double seconds) {
  const auto total = static_cast<int64_t>(std::ceil(std::max(seconds, 0.0)));
  if (total < 3600) return cadre::format("{}:{:02}", total / 60, total % 60);
  return cadre::format("{}:{:02}:{:02}", total / 3600, total / 60 % 60, total % 60);
}

// Formats a speed with at least two digits.
std::string speed_text(double per_second) {
  if (per_second >= 1000) return cadre::format("{:.1f}k", per_second / 1000);
  if (per_second >= 10) return cadre::format("{:.0f}", per_second);
  return cadre::format("{:.{}f}", per_second, per_second >= 1 ? 1 : 2);
}

}  // namespace

Progress::Progress(const ProgressOptions& options)
    : options_(options),
      metrics_(open_metrics()),
      metrics_size_(metrics_.size().value_or_throw()) {}

// The file is replaced by a rename, so that no line is lost if the run is killed.
os::LockedFile Progress::open_metrics() {
  const std::string& path = options_.metrics_path;
  const std::string kept = lines_until(path, options_.keep_metrics_until_step, curve_);
  os::replace_file(path, std::as_bytes(std::span(kept))).value_or_throw();
  return os::LockedFile::open(path, os::LockedFile::kReadableByAll).value_or_throw();
}

void Progress::report(const StepReport& step) {
  const std::string line = step_line(step);
  if (options_.is_terminal) {
    options_.print(cadre::format("{}{}", kEraseLine, line));
    line_is_open_ = true;
  } else {
    options_.print(line + "\n");
  }
  curve_.training.push_back({step.step, step.loss});
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
  curve_.held_out.push_back({evaluation.step, held_out.loss});
  print_line(line);
  write_metrics(json.dump());
}

void Progress::print_line(std::string_view line) {
  if (std::exchange(line_is_open_, false)) options_.print("\n");
  options_.print(cadre::format("{}\n", line));
}

void Progress::plot(const std::string& title, const std::string& svg_path) {
  if (curve_.training.size() < 2) return;
  if (options_.is_terminal) {
    print_line("the loss:");
    for (const std::string& line : plot_lines(curve_, {.columns = options_.num_columns})) {
      print_line(line);
    }
  } else if (const std::string line = plot_line(curve_, kBarsOfALine); !line.empty()) {
    print_line(line);
  }
  const std::string svg = plot_svg(curve_, title);
  const Status written = os::replace_file(svg_path, std::as_bytes(std::span(svg)));
  print_line(written.ok() ? cadre::format("the loss as a picture: {}", svg_path)
                          : cadre::format("warning: {}", written.error().message()));
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
  // The file has numbers of pages: first the size of the whole address space, then the resident
  // pages.
  std::istringstream fields(os::read_file("/proc/self/statm", kMaxStatmBytes).value_or_throw());
  int64_t mapped = 0;
  int64_t resident = 0;
  fields >> mapped >> resident;
  return resident * kPageBytes;
}

}  // namespace cadre::train
