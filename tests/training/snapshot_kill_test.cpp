// Tests a job that saves sharded snapshots continuously and is killed at random times. The latest
// snapshot must always exist and be complete, and must not be older than the last one that the job
// has reported as saved.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <torch/types.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/parallel/shard/division/boxes.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/process_job.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/snapshot_saver.h"

namespace cadre {
namespace {

using testing::nap;

constexpr int kWorldSize = 2;
constexpr int kNumKills = 300;
constexpr int64_t kRows = 512;
constexpr int64_t kColumns = 64;

// Returns the parts of two tensors, which the ranks divide in the middle of a row. Every element
// equals the step.
SnapshotParts parts_of(int rank, int world_size, int64_t step) {
  SnapshotParts parts;
  for (const std::string name : {"a", "b"}) {
    const Box whole{{0, 0}, {kRows, kColumns}};
    const int64_t numel = whole.numel();
    const int64_t middle = numel / 2 + 7;
    const FlatRange range{rank == 0 ? 0 : middle, rank + 1 == world_size ? numel : middle};
    const at::Tensor values = torch::full({range.size()}, static_cast<double>(step));
    parts.parameters.push_back({name, whole.sizes, shard::boxes_of_range(whole, range), values});
    ParameterState state{.parameter = name};
    state.tensors.emplace_back("exp_avg", values);
    state.scalars.emplace_back("step", torch::tensor(step));
    parts.optimizer.push_back(std::move(state));
  }
  return parts;
}

// Returns the step of the snapshot in the folder. Throws unless all elements of the snapshot equal
// that step.
int64_t checked_step(const std::string& folder) {
  const SnapshotParts parts = parts_of(0, 1, -1);
  const LoadedSnapshot loaded = load_sharded(folder, parts);
  const auto check = [&](const at::Tensor& tensor) {
    if (!tensor.eq(loaded.step).all().item<bool>()) throw std::runtime_error("a mixture");
  };
  for (const SnapshotTensor& tensor : parts.parameters) check(tensor.values);
  for (const ParameterState& state : loaded.optimizer) {
    for (const auto& [key, tensor] : state.tensors) check(tensor);
    for (const auto& [key, tensor] : state.scalars) check(tensor);
  }
  return loaded.step;
}

// A number in memory that all processes of the test share: the last step that a rank has reported
// as saved.
class SharedStep {
 public:
  SharedStep()
      : memory_(::mmap(nullptr, sizeof(Step), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                       -1, 0)),
        step_(std::construct_at(static_cast<Step*>(memory_), 0)) {}
  ~SharedStep() { ::munmap(memory_, sizeof(Step)); }
  SharedStep(const SharedStep&) = delete;
  SharedStep& operator=(const SharedStep&) = delete;

  void set(int64_t step) { *step_ = step; }
  int64_t get() const { return *step_; }

 private:
  using Step = std::atomic<int64_t>;
  void* memory_;
  Step* step_;
};

// Runs a rank of the job: saves one step after the other until this process or its peer is killed.
void save_without_end(const ProcessGroup& group, const std::string& run, bool in_background,
                      int64_t first, SharedStep& saved) {
  SnapshotFolder folder(run);
  std::optional<SnapshotSaver> saver;
  if (in_background) saver.emplace(folder, group);
  for (int64_t step = first;; ++step) {
    const SnapshotParts parts = parts_of(group.rank(), kWorldSize, step);
    const std::string failure = testing::failure_of(
        [&] { saver ? saver->save(step, parts) : save_sharded(folder, step, parts, group); });
    if (!failure.empty()) return;
    if (group.rank() == 0) saved.set(saver ? step - 1 : step);
  }
}

void remove_all_but_the_last(const std::string& run) {
  const SnapshotFolder folder(run);
  const std::vector<int64_t> steps = folder.steps();
  for (size_t i = 0; i + 2 < steps.size(); ++i) {
    std::filesystem::remove_all(folder.path_of(steps[i]));
  }
}

TEST(SnapshotKill, AtAnyInstantTheLatestSnapshotIsWhole) {
  at::set_num_threads(1);
  const auto system = os::make_native_system();
  const testing::TemporaryFolder run;
  const std::string path = run.path();
  SnapshotFolder folder(path);
  save_sharded(folder, 0, parts_of(0, 1, 0));
  SharedStep saved;
  std::set<int64_t> found;
  std::vector<int> rounds(kNumKills);
  std::iota(rounds.begin(), rounds.end(), 0);
  for (const int round : testing::share_of(rounds)) {
    SCOPED_TRACE(cadre::format("kill {}", round));
    Random random(static_cast<uint64_t>(round));
    const int64_t before = *folder.latest_step();
    testing::JobOptions options{.world_size = kWorldSize};
    options.processes.disturb = [&](std::span<const int> pids) {
      // Waits for one to three more saves before the kill: on a slow machine, no save would be
      // complete within the 20 ms below.
      const int64_t awaited = before + 1 + static_cast<int64_t>(random.below(3));
      for (int i = 0; i < 5000 && saved.get() < awaited; ++i) {
        nap(*system, std::chrono::milliseconds(1));
      }
      nap(*system, std::chrono::microseconds(random.below(20'000)));
      // Which ranks are killed: either one, or both.
      const auto choice = static_cast<size_t>(round % 3);
      for (size_t i = 0; i < static_cast<size_t>(kWorldSize); ++i) {
        if (choice == i || choice == 2) ::kill(pids[i], SIGKILL);
      }
    };
    testing::run_job(options, [&](testing::RankContext& context, const Membership& membership) {
      at::set_num_threads(1);
      const ProcessGroup group(testing::connect(context, membership, {}));
      save_without_end(group, path, round % 2 == 0, before + 1, saved);
    });
    ASSERT_GT(saved.get(), before) << "the job never saved";
    const auto latest = folder.latest();
    ASSERT_TRUE(latest);
    const int64_t step = checked_step(*latest);
    EXPECT_GE(step, saved.get());
    found.insert(step - before);
    remove_all_but_the_last(path);
  }
  EXPECT_GT(found.size(), 1u) << "every job was killed at the same step";
}

}  // namespace
}  // namespace cadre
