// Measures the cost of a sharded snapshot for the training of an MLP under FullyShardedDataParallel
// with fused AdamW: the stall of the step that begins a save in the background, the time until that
// save is committed, and the time of a save and of a load that training waits for. Rank 0 prints
// the medians as one line of JSON. Blocks until done; FOLDER is filled and emptied again.
//
//   cadre run --nproc-per-node 2 --no-python snapshot_stall FOLDER [--form gathered|mapped]
//     [steps [layers [width [batch [saves]]]]]
//   steps: the undisturbed step is the median of so many. saves: the number of background saves, of
//   saves and of loads; one more of each comes first and is not counted, because it allocates the
//   memory that the others reuse.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

namespace {

namespace nn = torch::nn;
using torch::Tensor;
using Clock = std::chrono::steady_clock;

constexpr double kLongestSaveMs = 60'000;

struct LayerImpl : nn::Module {
  explicit LayerImpl(int64_t width) : linear(register_module("linear", nn::Linear(width, width))) {}
  Tensor forward(const Tensor& x) { return torch::relu(linear(x)); }
  nn::Linear linear;
};
using Layer = nn::ModuleHolder<cadre::ShardUnit<LayerImpl>>;

struct MlpImpl : nn::Module {
  MlpImpl(int layers, int64_t width) {
    for (int i = 0; i < layers; ++i) {
      units.push_back(register_module("layer_" + std::to_string(i), Layer(width)));
    }
  }
  Tensor forward(Tensor x) {
    for (Layer& layer : units) x = layer->forward(x);
    return x;
  }
  std::vector<Layer> units;
};
TORCH_MODULE(Mlp);

struct Settings {
  std::string folder;
  cadre::ShardForm form = cadre::ShardForm::kGathered;
  int steps = 5;
  int layers = 6;
  int width = 1024;
  int batch = 64;
  int saves = 3;
};

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Throws unless the condition holds, so that no time of an incorrect operation is reported.
void require(bool holds, const std::string& what) {
  if (holds) return;
  std::cerr << "snapshot_stall: " << what << std::endl;
  std::exit(1);
}

// Notices when rank 0's snapshot is committed, which is when `latest` names it. The saver would
// report that only to the next call that waits for it, so a thread reads `latest` every few
// milliseconds while training continues.
class CommitWatch {
 public:
  CommitWatch(const cadre::SnapshotFolder& folder, int64_t step, Clock::time_point start)
      : thread_([this, folder, step, start] {
          while (!is_ended_ && folder.latest_step() != step) {
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
          }
          elapsed_ms_ = ms_since(start);
        }) {}
  ~CommitWatch() {
    is_ended_ = true;
    if (thread_.joinable()) thread_.join();
  }
  bool is_committed() const { return elapsed_ms_ > 0; }
  double elapsed_ms() const { return elapsed_ms_; }

 private:
  std::atomic<bool> is_ended_ = false;
  std::atomic<double> elapsed_ms_ = 0;
  std::thread thread_;
};

// The results: medians in milliseconds.
struct Figures {
  double step, stall, call, commit, extra, save, load, load_unchecked;
};

class Bench {
 public:
  Bench(const cadre::ProcessGroup& world, const Settings& settings)
      : world_(world),
        settings_(settings),
        net_(make_net(settings)),
        model_(net_, world, {.form = settings.form}),
        optimizer_(model_, torch::optim::AdamWOptions(1e-4)),
        folder_(settings.folder) {
    torch::manual_seed(1 + world.rank());
    x_ = torch::randn({settings.batch, settings.width});
  }

  Figures run() {
    constexpr int kWarmUp = 4;
    for (int i = 0; i < kWarmUp; ++i) train_step();
    measure_background_saves();
    measure_saves_and_loads();
    return {.step = median_of(steps_),
            .stall = median_of(stalls_),
            .call = median_of(calls_),
            .commit = median_of(commits_),
            .extra = median_of(extras_),
            .save = median_of(saves_),
            .load = median_of(loads_),
            .load_unchecked = median_of(unchecked_loads_)};
  }

 private:
  static Mlp make_net(const Settings& settings) {
    torch::manual_seed(0);
    Mlp net(settings.layers, settings.width);
    for (const Layer& unit : net->units) cadre::fully_shard(unit);
    return net;
  }

  void train_step() {
    optimizer_.zero_grad();
    const Tensor loss = (model_(x_) - 1).pow(2).mean();
    loss.backward();
    optimizer_.step();
    loss_ = loss.item<double>();
  }

  double timed_step() {
    const auto start = Clock::now();
    train_step();
    return ms_since(start);
  }

  cadre::SnapshotParts parts() {
    cadre::SnapshotParts parts = cadre::parts_of(model_.parameter_shards(), *net_);
    parts.optimizer = cadre::state_dict(optimizer_, parts.parameters, {.is_shared = true});
    return parts;
  }

  bool agree(bool of_rank_0) {
    Tensor flag = torch::tensor(of_rank_0 ? 1.0F : 0.0F);
    world_.broadcast(flag);
    return flag.item<float>() > 0;
  }

  double median_step() {
    std::vector<double> times;
    for (int i = 0; i < settings_.steps; ++i) times.push_back(timed_step());
    return median_of(std::move(times));
  }

  // The save is the first operation of its step, so the collectives of the step wait for the rank
  // that copies its shard most slowly. Then training continues until the snapshot is committed.
  void measure_background_saves() {
    cadre::SnapshotSaver saver(folder_, world_, {.strategy = "fsdp"});
    for (int i = 0; i <= settings_.saves; ++i) {
      const int64_t number = ++last_step_;
      const double step = median_step();
      world_.barrier();
      const auto start = Clock::now();
      saver.save(number, parts());
      const double call = ms_since(start);
      train_step();
      const double stall = ms_since(start) - step;
      const CommitWatch watch(folder_, number, start);
      double extra = stall;
      while (!agree(watch.is_committed())) {
        require(ms_since(start) < kLongestSaveMs, "a background save was not committed in time");
        extra += timed_step() - step;
      }
      saver.finish();
      remove(number);
      if (i == 0) continue;
      steps_.push_back(step);
      stalls_.push_back(stall);
      calls_.push_back(call);
      commits_.push_back(watch.elapsed_ms());
      extras_.push_back(extra);
    }
    saver.close();
  }

  void measure_saves_and_loads() {
    for (int i = 0; i <= settings_.saves; ++i) {
      const int64_t number = ++last_step_;
      world_.barrier();
      const auto start = Clock::now();
      cadre::save_sharded(folder_, number, parts(), world_);
      const double save = ms_since(start);
      train_step();
      const double expected = loss_;
      const double load = timed_load(number, true);
      const double unchecked = timed_load(number, false);
      train_step();
      require(loss_ == expected, "a loaded snapshot has another loss");
      remove(number);
      if (i == 0) continue;
      saves_.push_back(save);
      loads_.push_back(load);
      unchecked_loads_.push_back(unchecked);
    }
  }

  double timed_load(int64_t number, bool with_digests) {
    world_.barrier();
    const auto start = Clock::now();
    const cadre::SnapshotParts into = cadre::parts_of(model_.parameter_shards(), *net_);
    const cadre::LoadedSnapshot loaded =
        cadre::load_sharded(folder_.path_of(number), into, world_, {.with_digests = with_digests});
    cadre::load_state_dict(optimizer_, into.parameters, loaded.optimizer);
    return ms_since(start);
  }

  void remove(int64_t number) {
    world_.barrier();
    if (world_.rank() == 0) std::filesystem::remove_all(folder_.path_of(number));
    world_.barrier();
  }

  const cadre::ProcessGroup& world_;
  const Settings& settings_;
  Mlp net_;
  cadre::FullyShardedDataParallel<MlpImpl> model_;
  cadre::ShardedOptimizer<cadre::AdamW> optimizer_;
  cadre::SnapshotFolder folder_;
  Tensor x_;
  int64_t last_step_ = 0;
  double loss_ = 0;
  std::vector<double> steps_, stalls_, calls_, commits_, extras_, saves_, loads_, unchecked_loads_;
};

// Returns false if the arguments are invalid.
bool parse(std::vector<std::string> arguments, Settings& settings) {
  if (arguments.empty()) return false;
  settings.folder = arguments[0];
  std::vector<int*> numbers = {&settings.steps, &settings.layers, &settings.width, &settings.batch,
                               &settings.saves};
  size_t num_given = 0;
  for (size_t i = 1; i < arguments.size(); ++i) {
    const std::string next = i + 1 < arguments.size() ? arguments[i + 1] : "";
    if (arguments[i] == "--form" && (next == "gathered" || next == "mapped")) {
      settings.form = next == "mapped" ? cadre::ShardForm::kMapped : cadre::ShardForm::kGathered;
      ++i;
    } else if (num_given < numbers.size()) {
      *numbers[num_given] = std::atoi(arguments[i].c_str());
      if (*numbers[num_given++] <= 0) return false;
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  if (!parse({argv + 1, argv + argc}, settings)) {
    std::cerr << "usage: snapshot_stall FOLDER [--form gathered|mapped] "
                 "[steps [layers [width [batch [saves]]]]], numbers above 0"
              << std::endl;
    return 2;
  }
  at::set_num_threads(1);
  const auto world = cadre::init_process_group();
  const Figures figures = Bench(world, settings).run();
  if (world.rank() == 0) {
    std::cout << "{\"step_ms\": " << figures.step << ", \"stall_ms\": " << figures.stall
              << ", \"call_ms\": " << figures.call << ", \"commit_ms\": " << figures.commit
              << ", \"extra_ms\": " << figures.extra << ", \"save_ms\": " << figures.save
              << ", \"load_ms\": " << figures.load
              << ", \"load_unchecked_ms\": " << figures.load_unchecked << "}" << std::endl;
  }
  world.close();
  return 0;
}
