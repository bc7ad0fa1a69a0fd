// The configuration of a training run: one struct for each section of the TOML file.
//
// Threads: plain values. Blocking: never. config_fields.cpp has the explanation and the allowed
// values of each key; config_file.h reads files.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cadre/parallel/shard/data_strategy.h"

namespace cadre::train {

struct ModelConfig {
  std::string kind = "gpt";
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t width = 128;
  int64_t context = 128;
  int64_t window = 8;
  bool dropout = true;
  double dropout_rate = 0;
  bool tied = true;
  int64_t experts = 0;
  int64_t experts_per_token = 2;
  double capacity_factor = 0;
  double auxiliary_loss = 0.01;
  std::string checkpoint_activations = "none";
  std::string weights;
};

struct DataConfig {
  std::string kind = "text";
  std::string path = "python-stdlib";
  std::vector<std::string> suffixes;
  std::vector<std::string> skipped_folders;
  double held_out = 0.05;
  int64_t samples = 4096;
  int64_t threads = 0;
};

struct OptimizerConfig {
  std::string kind = "adamw";
  double learning_rate = 3e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double alpha = 0.99;
  double rho = 0.9;
  double rate_decay = 0;
  double momentum = 0.9;
  bool nesterov = false;
  double weight_decay = 0.1;
  double clip_norm = 1.0;
};

struct ScheduleConfig {
  std::string kind = "cosine";
  int64_t warmup_steps = -1;  // -1 means a default: see resolved_warmup_steps()
  double final_fraction = 0.1;
  int64_t step_size = 0;
  double gamma = 0.1;
};

struct RunConfig {
  std::string name = "run";
  std::string folder = "runs";
  int64_t steps = 1000;
  int64_t epochs = 0;
  int64_t global_batch_size = 32;
  int64_t accumulate = 1;
  std::string autocast = "float32";
  std::string device = "auto";
  int64_t seed = 0;
  int64_t threads = 1;
  int64_t evaluate_every = 0;
  int64_t evaluate_tokens = 65536;
  int64_t snapshot_every = 0;
  bool keep_best = false;
  std::string resume = "none";
  std::string recovery = "restart";
};

// Returns the defaults for a kind of optimizer. They are those of PyTorch with two exceptions:
// adamw has the defaults of OptimizerConfig, and sgd has a momentum of 0.9.
OptimizerConfig default_optimizer(const std::string& kind);

struct ParallelConfig {
  std::string strategy = "ddp";
  int64_t replicas = 0;  // 0: see place_replicas()
  std::string form = "auto";
  std::string reshard = "after_forward";
  std::string offload = "none";
  std::string parameter_dtype = "float32";
  std::string reduce_dtype = "float32";
  int64_t tensor = 1;
  bool sequence = false;
  int64_t pipeline = 1;
  std::string schedule = "1f1b";
  int64_t microbatches = 0;  // 0 means a default: see pipeline_schedule()
  int64_t virtual_stages = 1;
  int64_t context = 1;
  std::string attention = "ring";
  int64_t expert = 1;

  // Returns whether processes hold different parts of the model's layers, or different tokens of
  // one sample.
  bool divides_model() const { return tensor > 1 || pipeline > 1 || context > 1 || expert > 1; }
};

// Returns parallel.strategy as an enumerator.
DataStrategy data_strategy(const ParallelConfig& parallel);
// Returns the form of the shards of fsdp and hsdp. "auto" is mapped, unless the shards are
// offloaded to files.
ShardForm shard_form(const ParallelConfig& parallel);

struct SampleConfig {
  int64_t tokens = 400;
  std::string prompt = "\n";
  double temperature = 0.8;
  int64_t top_k = 40;
};

struct Config {
  ModelConfig model;
  DataConfig data;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  RunConfig run;
  ParallelConfig parallel;
  SampleConfig sample;
};

}  // namespace cadre::train
