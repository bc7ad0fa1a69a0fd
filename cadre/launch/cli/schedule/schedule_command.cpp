// `cadre schedule`: shows, checks and simulates a pipeline schedule before a model is split into
// the stages of that schedule.
#include <span>

#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/schedule/schedule_csv.h"
#include "cadre/core/schedule/timeline_text.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/schedule/schedule_options.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kScheduleHelp =
    R"(cadre schedule --name NAME --ranks P --microbatches M [options]
cadre schedule --from FILE.csv [options]

A model that is cut into stages trains as a pipeline: the batch is cut into microbatches, which go
through the stages one behind the other, forward and then backward. The schedule is the order in
which each rank computes. This command makes one, checks it, and simulates a step: when each action
runs, how long ranks wait (the bubble), and of how many microbatches they keep activations.

  cadre schedule --list                                          which there are
  cadre schedule --name gpipe --ranks 4 --microbatches 8         the simplest one
  cadre schedule --name 1f1b --ranks 4 --microbatches 8          the same bubble, half the memory
  cadre schedule --name interleaved-1f1b --ranks 4 --microbatches 8 --virtual 2
  cadre schedule --name zb-v --ranks 4 --microbatches 8 --forward-ms 5 --backward-ms 12 \
                 --message-ms 0.4                                with measured times
  cadre schedule --name 1f1b --ranks 4 --microbatches 8 \
                 --layer-ms 3,2,2,2,2,2,2,2,2,5                  split ten layers into stages
  cadre schedule --name 1f1b --ranks 4 --microbatches 8 --csv step.csv --lower as-sent
  cadre schedule --from step.csv                                 check and show an edited file

In the table "2F0" is the forward of microbatch 0 on stage 2, B a backward, I and W its parts: the
gradient of the input, which the previous stage waits for, and that of the weights, which no
stage waits for. "|" goes on, "." waits. These are the words and the CSV of torch.distributed.pipelining.

The schedule
  --name NAME           which one; the names of PyTorch's get_schedule_class() work, too
  --ranks P             ranks of the pipeline
  --microbatches M      parts of a batch
  --virtual V           stages on each rank, so P x V in all (default: what --list says)
  --from FILE           read it from a CSV file instead
  --lower WHERE         add sends, receives, UNSHARD and RESHARD of up to 3 stages, and REDUCE_GRAD;
                        receives stand before-use (for receives that block) or as-sent (as PyTorch
                        has them, for receives that are posted)
  --max-live N          refuse it when a rank keeps activations of more than N microbatches and
                        stages

Times in milliseconds, 0 or from 1e-6 to 1e12: one for all stages, or one for each, separated by
commas
  --forward-ms T,...    of F (default 1)
  --backward-ms T,...   of B (default: twice the forward)
  --input-grad-ms T,... of I (default: half of the backward)
  --weight-grad-ms T,...of W (default: half of the backward)
  --layer-ms T,...      of the forward of each layer: layers are split into stages so that the
                        longest stage is as short as possible
  --message-ms T        from one rank to another (default 0)
  --overlap SHARE       how much of the shorter part of an OVERLAP_F_B is hidden, 0 to 1 (default 0)

Output
  --csv FILE            the schedule; "-" for standard output, without the table
  --json FILE           the times of all actions; "-" for standard output, without the table.
                        tools/timeline_svg.py, in share/cadre of an installation, makes a picture
                        of it: cadre schedule ... --json - | timeline_svg.py > step.svg
  --list                the schedules
  --help                this text

Exit code: 0; 1 when a file cannot be read or written or its schedule cannot be run; 2 for a command
line that makes no sense, or a schedule that is refused.
)";

int print_schedule_list() {
  std::string text;
  for (const PipelineScheduleInfo& info : pipeline_schedules()) {
    const std::string stages = info.max_stages_per_rank > info.min_stages_per_rank
                                   ? cadre::format("from {} on", info.min_stages_per_rank)
                                   : cadre::format("{}", info.min_stages_per_rank);
    text += cadre::format("{:<24} {}\n{:<24} stages on each rank: {} (default {}); PyTorch: {}\n",
                          info.name, info.summary, "", stages, info.usual_stages_per_rank,
                          info.pytorch_name.empty() ? "none" : info.pytorch_name);
  }
  return print(text);
}

struct NamedSchedule {
  std::string title;
  PipelineSchedule schedule;
};

Result<NamedSchedule> read_or_make(const ScheduleOptions& options) {
  NamedSchedule result;
  if (options.generated) {
    auto made = make_pipeline_schedule(*options.generated);
    if (!made.ok()) return made.error();
    result = {std::string(info_of(options.generated->kind).name), *std::move(made)};
  } else {
    const auto text = os::read_file(options.csv_input, kMaxPipelineCsvBytes);
    if (!text.ok()) return text.error();
    auto parsed = parse_pipeline_csv(*text);
    if (!parsed.ok()) return parsed.error().with_context(printable(options.csv_input));
    result = {printable(options.csv_input), *std::move(parsed)};
  }
  const PipelineSchedule& schedule = result.schedule;
  result.title += cadre::format(": {} stages on {} ranks, {} microbatches", schedule.num_stages(),
                                schedule.num_ranks(), schedule.num_microbatches);
  return result;
}

std::string text_of_layers(const ScheduleCosts& costs) {
  std::string text;
  for (size_t stage = 0; stage + 1 < costs.layer_begins.size(); ++stage) {
    text += cadre::format("stage {}: layers {} to {}, forward {} ms\n", stage,
                          costs.layer_begins[stage], costs.layer_begins[stage + 1] - 1,
                          milliseconds_text(costs.costs.stages[stage].forward_ms));
  }
  return text.empty() ? text : text + "\n";
}

Status write_text(const std::string& path, std::string_view text) {
  if (path.empty() || path == "-") return {};
  return os::replace_file(path, std::as_bytes(std::span(text)));
}

}  // namespace

int schedule_command(Words words) {
  const auto options = parse_schedule_options(words);
  if (!options.ok()) return fail(kScheduleCommand, options.error().message(), kUsageExitCode);
  if (options->wants_help) return print(kScheduleHelp);
  if (options->wants_list) return print_schedule_list();
  const int refused = options->generated ? kUsageExitCode : 1;

  auto named = read_or_make(*options);
  if (!named.ok()) return fail(kScheduleCommand, named.error().message(), refused);
  PipelineSchedule& schedule = named->schedule;
  if (options->lowering) {
    auto lowered = lower_pipeline(schedule, *options->lowering);
    if (!lowered.ok()) return fail(kScheduleCommand, lowered.error().message(), refused);
    schedule = *std::move(lowered);
  }
  const Status status = check_pipeline(schedule, options->limits);
  if (!status.ok()) return fail(kScheduleCommand, status.error().message(), refused);
  const auto costs = make_costs(*options, schedule.num_stages());
  if (!costs.ok()) return fail(kScheduleCommand, costs.error().message(), kUsageExitCode);
  const auto timeline = simulate_pipeline(schedule, costs->costs);
  if (!timeline.ok()) return fail(kScheduleCommand, timeline.error().message(), kUsageExitCode);

  const std::string csv = options->csv_output.empty() ? "" : to_csv(schedule);
  const std::string json =
      options->json_output.empty() ? "" : timeline_json(schedule, *timeline, named->title);
  Status written = write_text(options->csv_output, csv);
  if (written.ok()) written = write_text(options->json_output, json);
  if (!written.ok()) return fail(kScheduleCommand, written.error().message(), 1);
  if (options->csv_output == "-") return print(csv);
  if (options->json_output == "-") return print(json);
  return print(cadre::format("{}\n\n{}{}\n{}", named->title, text_of_layers(*costs),
                             timeline_table(*timeline), timeline_summary(schedule, *timeline)));
}

}  // namespace cadre::cli
