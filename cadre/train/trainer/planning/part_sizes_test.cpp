// Compares the plan of a divided model with runs of it: the parameters that a process has, the
// memory that it holds after a step, and the bytes that the operations along each axis move.
#include "cadre/train/trainer/planning/part_sizes.h"

#include <gtest/gtest.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <ostream>
#include <string>
#include <vector>

#include "cadre/core/collective/op.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/testing/torch/measured_memory.h"
#include "cadre/testing/torch/trainer_runs.h"
#include "cadre/train/data/text_corpus.h"
#include "cadre/train/trainer/planning/config_plan.h"
#include "cadre/train/trainer/run/run_setup.h"
#include "cadre/train/trainer/strategy/strategy.h"

namespace cadre::train {
namespace {

using testing::CountedMemory;

// An upper bound for small messages: agreements, losses of microbatches, and counts of the
// optimizer.
constexpr int64_t kFewBytes = 1024;
// An upper bound that also includes the numbers of tokens that each router sends to each expert.
constexpr int64_t kFewBytesOfRouters = 4096;

struct PlannedLayout {
  std::string name;
  int num_processes;
  ParallelConfig parallel;
  int64_t num_experts = 0;
};

constexpr int64_t kChosenExperts = 2;

std::ostream& operator<<(std::ostream& out, const PlannedLayout& layout) {
  return out << layout.name;
}

// Returns how many bytes a rank receives in the operations from number `first` on, if the
// algorithms are optimal. The flight record has no sizes for all_to_all_v, so the caller gives them
// in exchanged_bytes. In context parallelism a block has four all_to_all_v: two exchange three
// tensors of exchanged_bytes each, and two exchange one. That is eight tensors, so each
// all_to_all_v counts as two. For experts that are chosen equally often, the same formula holds if
// exchanged_bytes is half of the size of the tokens that are sent.
int64_t received_bytes(const ProcessGroup& group, size_t first, int64_t exchanged_bytes) {
  const FlightRecord record = group.communicator().flight_record();
  const int64_t size = group.world_size();
  int64_t sum = 0;
  for (size_t i = first; i < record.entries.size(); ++i) {
    const auto op = OpDescriptor::from_fingerprint(record.entries[i].fingerprint);
    const auto num_bytes = static_cast<int64_t>(op.count * size_of(op.dtype));
    if (op.kind == OpKind::kAllReduce) sum += 2 * num_bytes * (size - 1) / size;
    if (op.kind == OpKind::kAllGather || op.kind == OpKind::kReduceScatter) {
      sum += num_bytes * (size - 1);
    }
    if (op.kind == OpKind::kAllToAllV) sum += 2 * exchanged_bytes * (size - 1) / size;
    if (op.kind == OpKind::kRecv) sum += num_bytes;
  }
  return sum;
}

struct Measured {
  std::map<std::string, int64_t> parameters;  // maps each name to the number of elements
  int64_t held_bytes = 0;                     // the bytes held after a step
  std::map<std::string, int64_t> received;    // maps each axis to the bytes received in a step
};

class PartSizes : public TrainerTest, public ::testing::WithParamInterface<PlannedLayout> {
 protected:
  Config config_of(const PlannedLayout& layout) const {
    Config config = this->config("planned");
    config.model = {.layers = 4,
                    .heads = 4,
                    .width = 64,
                    .context = 16,
                    .experts = layout.num_experts,
                    .experts_per_token = kChosenExperts};
    config.run.global_batch_size = 8;
    config.parallel = layout.parallel;
    return config;
  }

  static Measured measure(const Config& config, const ProcessGroup& world) {
    CountedMemory& memory = CountedMemory::install();
    const int rank = world.rank();
    CountedMemory::set_rank(rank);
    const auto system = os::make_native_system();
    const auto task = open_task(config, system->deadline_in(kTextSourceTimeout));
    const RunLayout layout = lay_out(config, world);
    const auto loader = make_training_loader(config, *task, layout.data.group);
    const Batch batch = *loader->epoch(0).begin();
    const int64_t before = memory.bytes(rank);
    const auto strategy =
        make_strategy(config, make_initial_model(config, *task), layout, std::nullopt);
    Measured measured;
    for (const SnapshotTensor& part : strategy->parts().parameters) {
      if (part.values.numel() > 0) measured.parameters[part.name] = part.values.numel();
    }
    std::vector<std::string> axes = {"pp", "cp", "tp"};
    if (config.model.experts > 0) axes.emplace_back("ep");
    std::map<std::string, size_t> first;
    // Two steps are run and the second is measured, because the first step of a pipeline also
    // announces shapes.
    for (int step = 0; step < 2; ++step) {
      strategy->optimizer().zero_grad();
      for (const std::string& axis : axes) {
        first[axis] = layout.mesh->group(axis).communicator().flight_record().entries.size();
      }
      (void)strategy->backward(*task, batch, {});
      strategy->step(1e-3);
    }
    const int64_t activation =
        batch.data.numel() / layout.degrees.context * config.model.width * int64_t{sizeof(float)};
    for (const std::string& axis : axes) {
      const int64_t exchanged =
          axis == "ep" ? activation * kChosenExperts / 2 : activation / layout.degrees.tensor;
      measured.received[axis] = received_bytes(layout.mesh->group(axis), first[axis], exchanged);
    }
    measured.held_bytes = memory.bytes(rank) - before;
    return measured;
  }

  std::vector<Measured> run_on_ranks(const Config& config, int num_processes) {
    std::vector<Measured> of_ranks(static_cast<size_t>(num_processes));
    const auto ranks =
        testing::run_groups(num_processes, [&](const ProcessGroup& world, std::string&) {
          of_ranks[static_cast<size_t>(world.rank())] = measure(config, world);
        });
    EXPECT_EQ(ranks.failures(), "");
    return of_ranks;
  }
};

// The strategy is ddp, so each replica has all parameters that the division leaves, and the plan
// can be compared directly.
TEST_P(PartSizes, AreThoseOfARun) {
  const PlannedLayout& layout = GetParam();
  const Config config = config_of(layout);
  const Degrees degrees = degrees_of(config.parallel, layout.num_processes);
  const ModelSizes whole = sizes_of_model(config);
  const std::vector<Measured> of_ranks = run_on_ranks(config, layout.num_processes);
  const int per_stage = layout.num_processes / degrees.pipeline;
  for (int stage = 0; stage < degrees.pipeline; ++stage) {
    SCOPED_TRACE(stage);
    const ModelSizes part = part_sizes(whole, config, degrees, stage);
    const Measured& first = of_ranks[static_cast<size_t>(stage * per_stage)];
    std::map<std::string, int64_t> planned;
    for (const ParameterSize& parameter : part.parameters) {
      planned[parameter.name] = parameter.numel();
    }
    EXPECT_EQ(first.parameters, planned);
    const DivisionTraffic traffic = division_traffic(part, config, degrees, stage);
    EXPECT_NEAR(first.received.at("tp"), traffic.tensor, kFewBytes);
    EXPECT_NEAR(first.received.at("cp"), traffic.context, kFewBytes);
    EXPECT_NEAR(first.received.at("pp"), traffic.pipeline, kFewBytes);
    if (layout.num_experts > 0) {
      EXPECT_NEAR(first.received.at("ep"), traffic.expert, kFewBytesOfRouters);
    }
  }
  const NamedPlan plan =
      plan_of_config(config, whole, {layout.num_processes, layout.num_processes});
  int64_t largest_held = 0;
  for (const Measured& measured : of_ranks) {
    largest_held = std::max(largest_held, measured.held_bytes);
  }
  const HeldBytes& held = plan.plan.held;
  // One process has the tied weight twice if the schedule is zb-v. The second copy's gradient is
  // planned, but it is freed when the first copy has been updated, before the measurement.
  const int64_t freed = layout.parallel.schedule == "zb-v"
                            ? kVocabularySize * config.model.width * int64_t{sizeof(float)}
                            : 0;
  EXPECT_NEAR(largest_held, held.parameters + held.gradients + held.optimizer_state - freed,
              kFewBytes);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, PartSizes,
    ::testing::Values(
        PlannedLayout{"tensor", 2, {.tensor = 2}},
        PlannedLayout{"tensor_sequence", 2, {.tensor = 2, .sequence = true}},
        PlannedLayout{"tensor_4", 4, {.tensor = 4}}, PlannedLayout{"pipeline", 2, {.pipeline = 2}},
        PlannedLayout{"pipeline_4", 4, {.pipeline = 4}},
        PlannedLayout{"ddp_pipeline", 4, {.pipeline = 2}},
        PlannedLayout{"pipeline_interleaved",
                      2,
                      {.pipeline = 2, .schedule = "interleaved-1f1b", .virtual_stages = 2}},
        PlannedLayout{"pipeline_zb_v", 2, {.pipeline = 2, .schedule = "zb-v", .virtual_stages = 2}},
        PlannedLayout{
            "pipeline_tensor_sequence", 4, {.tensor = 2, .sequence = true, .pipeline = 2}},
        PlannedLayout{"context", 2, {.context = 2}},
        PlannedLayout{"context_all_to_all", 2, {.context = 2, .attention = "all_to_all"}},
        PlannedLayout{"context_tensor", 4, {.tensor = 2, .context = 2}},
        PlannedLayout{"expert", 2, {.expert = 2}, 4},
        PlannedLayout{"expert_4", 4, {.expert = 4}, 8},
        PlannedLayout{"expert_tensor", 4, {.tensor = 2, .expert = 2}, 4}),
    ::testing::PrintToStringParamName());

}  // namespace
}  // namespace cadre::train
