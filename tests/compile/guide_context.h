// Declarations that the C++ blocks of docs/guide and the examples of the topic headers use but do
// not contain. guide_blocks_test.py puts each block into a function in the namespace of its page.
// The blocks are compiled but not linked, so these functions have no bodies. Only the two headers
// that the guide tells users to include are included here; a block must include any other header
// that it needs itself.
#pragma once
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace any_page {

using torch::Tensor;

struct Net : torch::nn::Module {
  Tensor forward(const Tensor& x);
};

Tensor loss_of(const Tensor& output);
Tensor loss_of(const Tensor& output, const Tensor& rows);
Tensor load_batch();

extern cadre::ProcessGroup world;
extern std::shared_ptr<Net> net;
extern cadre::DistributedDataParallel<Net> model;
extern torch::optim::AdamW optimizer;
extern const Tensor x, y, images, labels, rows;
extern const int64_t step;

}  // namespace any_page

namespace any_topic {
using namespace any_page;
extern cadre::Communicator& group;
extern const std::unique_ptr<cadre::os::System> system;
extern const cadre::Deadline deadline;
extern const int rank, world_size;
extern const std::vector<Tensor> parts;
}  // namespace any_topic

namespace store {
extern const int rank, world_size;
extern const std::shared_ptr<cadre::Store> store;
extern const std::unique_ptr<cadre::os::System> system;
extern const cadre::Deadline deadline;
}  // namespace store

// Checks that a program may use both namespaces: no inner namespace of Cadre may have the same name
// as an inner namespace of torch.
namespace both_opened {
using namespace torch;
using namespace cadre;
using LocalOptimizer = optim::SGD;
using Layer = nn::Linear;
}  // namespace both_opened

namespace averaging {
using namespace any_page;
extern const int64_t num_steps;
void evaluate(const Net& net);
}  // namespace averaging

namespace tensor_parallel {
using any_page::world;
extern std::shared_ptr<any_page::Net> model;
extern cadre::DeviceMesh mesh;
extern const std::vector<cadre::PlanEntry> plan;
extern const std::vector<cadre::ParameterShard> records;
extern const int64_t step;
extern const int64_t first_row_of_this_rank;
}  // namespace tensor_parallel

namespace combining {
using any_page::Tensor;
extern const cadre::DeviceMesh mesh;
extern const Tensor logits, targets;
extern const std::shared_ptr<const cadre::Dataset> dataset;
extern cadre::SnapshotFolder folder;
extern const std::shared_ptr<cadre::DropoutStream> stream;
extern const cadre::DataRanks data;
extern const int64_t rows_of_a_rank;
}  // namespace combining

namespace context_parallel {
using any_page::world, any_page::load_batch;
extern any_page::Net decoder;
}  // namespace context_parallel

namespace expert_parallel {
using namespace any_page;
struct DecoderImpl : torch::nn::Module {
  std::tuple<Tensor, cadre::RouterLosses> forward(const Tensor& ids);
};
extern const Tensor ids, targets;
extern DecoderImpl decoder;
extern const cadre::DeviceMesh mesh;
extern const cadre::ExpertParallel experts;
extern cadre::SnapshotFolder folder;
}  // namespace expert_parallel

namespace data {
using namespace any_page;
}  // namespace data

namespace data_parallel {
using namespace any_page;
extern cadre::DataLoader loader;
extern const int64_t epoch;
extern const Tensor loss;
extern const std::vector<cadre::Batch> parts;
extern const int64_t num_own;
extern const int rank;
}  // namespace data_parallel

namespace differentiable_collectives {
using namespace any_page;
extern const Tensor embeddings;
Tensor contrastive_loss(const Tensor& own, const Tensor& all);
}  // namespace differentiable_collectives

namespace errors {
using namespace any_page;
void train(const cadre::ProcessGroup& group);
void train(cadre::FullyShardedDataParallel<Net>& model,
           cadre::ShardedOptimizer<cadre::AdamW>& optimizer, const cadre::ProcessGroup& group,
           cadre::SnapshotFolder& folder);
extern cadre::ProcessGroup group;
extern cadre::SnapshotFolder folder;
}  // namespace errors

namespace first_program {
using namespace any_page;
}  // namespace first_program

namespace fsdp {
using namespace any_page;
struct Config {};
extern const Config config;
extern const cadre::DeviceMesh mesh;
struct BlockImpl : torch::nn::Module {
  Tensor forward(const Tensor& x);
};
struct GptImpl : torch::nn::Module {
  GptImpl();
  explicit GptImpl(const Config& config);
  Tensor forward(const Tensor& rows);
  std::vector<torch::nn::ModuleHolder<cadre::ShardUnit<BlockImpl>>> blocks;
  torch::nn::Linear head{nullptr};
};
// The class that TORCH_MODULE(Gpt) would declare. The macro cannot be used inside a function, where
// the blocks are.
struct Gpt : torch::nn::ModuleHolder<GptImpl> {
  using torch::nn::ModuleHolder<GptImpl>::ModuleHolder;
};
void init_weights(torch::nn::Module& module);
extern Gpt gpt;
extern cadre::FullyShardedDataParallelOptions options;
extern cadre::FullyShardedDataParallel<GptImpl> model;
}  // namespace fsdp

namespace gdb {}

namespace gradients {
using namespace any_page;
extern cadre::GradScaler scaler;
}  // namespace gradients

namespace groups_and_messages {
using namespace any_page;
extern const cadre::ProcessGroup row_group, column_group;
extern const Tensor activations, all, gradients, mine, received;
extern cadre::Communicator& group;
extern cadre::os::System* const system;
extern int value;
void fill(const Tensor& buffer);
}  // namespace groups_and_messages

namespace main_rank {
using any_page::world;
std::string read_or_convert(const std::string& folder);
extern const double loss;
}  // namespace main_rank

namespace memory {
using namespace fsdp;
}  // namespace memory
namespace mesh {
extern const cadre::ProcessGroup world;
extern const at::Tensor tensor;
}  // namespace mesh
namespace my_run_hangs {}

namespace one_program {
using any_page::Tensor, any_page::world, any_page::x, any_page::step;
struct NetImpl : torch::nn::Module {
  NetImpl(int64_t width, int64_t num_classes);
  Tensor forward(const Tensor& x);
};
struct Net : torch::nn::ModuleHolder<NetImpl> {
  using torch::nn::ModuleHolder<NetImpl>::ModuleHolder;
};
extern cadre::Training<NetImpl, torch::optim::AdamWOptions> training;
}  // namespace one_program

namespace fine_tuning {
using one_program::Net;
}  // namespace fine_tuning

namespace optimizers {
using namespace any_page;
extern const Tensor loss;
}  // namespace optimizers

namespace pipeline_parallel {
using any_page::world, any_page::Tensor;
struct Half : any_page::Net {
  explicit Half(int stage);
};
extern std::shared_ptr<Half> part;
extern cadre::Pipeline pipeline;
extern const std::vector<cadre::PipelineStage> stages;
extern const std::vector<std::pair<Tensor, Tensor>> batches;
extern const Tensor inputs, labels;
extern cadre::SnapshotFolder folder;
extern const int64_t step;
extern const int rank, size;
}  // namespace pipeline_parallel

namespace snapshots {
using namespace any_page;
extern cadre::FullyShardedDataParallel<Net> model;
extern cadre::ShardedOptimizer<cadre::AdamW> optimizer;
extern cadre::ZeroRedundancyOptimizer<cadre::AdamW> zero_optimizer;
extern cadre::SnapshotFolder folder;
extern cadre::SnapshotParts parts;
extern const std::vector<Tensor> leaves;
extern const int64_t num_steps;
}  // namespace snapshots

namespace verify {
using namespace any_page;
struct NetImpl : torch::nn::Module {
  NetImpl(int64_t num_inputs, int64_t width);
  Tensor forward(const Tensor& rows);
};
struct Net : torch::nn::ModuleHolder<NetImpl> {
  using torch::nn::ModuleHolder<NetImpl>::ModuleHolder;
};
Tensor rows_of(int64_t step);
}  // namespace verify

namespace without_a_launcher {
extern const int rank;
}  // namespace without_a_launcher

namespace zero {
using namespace any_page;
}  // namespace zero
