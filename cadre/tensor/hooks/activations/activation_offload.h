// Activation offload: what the forward of a module saves for backward is written to a file and read
// again in backward, so that memory holds the activations of one module at a time.
//
//   net_file = cadre::ActivationFile::make({.folder = "/scratch"});
//   {
//     cadre::OffloadActivations offload(net_file, *net);  // a scope, as Autocast
//     loss = torch::nll_loss(model(images), labels);
//   }
//   loss.backward();
//
// Or by module, where only some of them are worth it:
//
//   using Block = torch::nn::ModuleHolder<cadre::ActivationOffload<BlockImpl>>;
//   cadre::offload_activations(*net, net_file);   // all ActivationOffload modules in net
//
// An ActivationOffload<M> is an M with the same constructors, names of parameters and signature of
// forward(). With ActivationCheckpoint inside of it only the arguments are saved, and those are in
// the file. A unit of FullyShardedDataParallel is a ShardUnit<ActivationOffload<BlockImpl>>.
//
// Values come back bit for bit, so the numbers are those without offload. Parameters and buffers of
// the module stay where they are; so do tensors below `min_bytes`, on other devices, sparse ones,
// and those whose memory libtorch does not own as plain bytes.
//
// Threads: a scope is that of the calling thread; a file takes any threads. Blocking: forward and
// backward, for the time of the disk. What is written lies in the page cache until the kernel wants
// the memory. Lifetime: a graph keeps the file and its part of it. Errors: cadre::Error,
// kUnavailable out of the operation that saves (full disk) or out of backward(); kInvalidArgument
// where a tensor that stays in memory was changed in place before backward.
// Source: torch.autograd.graph.save_on_cpu and FSDP's offload_wrapper.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "cadre/core/base/export.h"
#include "cadre/tensor/hooks/activations/saved_tensors.h"
#include "cadre/tensor/hooks/forward_signature.h"

namespace torch::nn {
class Module;
}

namespace cadre {

struct ActivationOffloadOptions {
  // On a disk; a file system in memory would save nothing. The file has no name there, and its
  // space is free when the process ends.
  std::string folder;
  // A tensor whose memory is smaller stays.
  int64_t min_bytes = int64_t{64} << 10;
};

class CADRE_EXPORT ActivationFile {
  struct State;

 public:
  static std::shared_ptr<ActivationFile> make(const ActivationOffloadOptions& options);
  explicit ActivationFile(std::shared_ptr<State> state);  // for make()
  ~ActivationFile();
  ActivationFile(const ActivationFile&) = delete;
  ActivationFile& operator=(const ActivationFile&) = delete;

  // Bytes of the activations that graphs keep in the file: now, and the most at one time.
  int64_t used_bytes() const;
  int64_t peak_bytes() const;
  // Bytes written since the file was made.
  int64_t written_bytes() const;

 private:
  friend class OffloadActivations;
  std::shared_ptr<State> state_;  // shared with the graphs
};

class [[nodiscard]] CADRE_EXPORT OffloadActivations {
 public:
  // module: its parameters and buffers stay in memory. A null file leaves everything in memory.
  OffloadActivations(const std::shared_ptr<ActivationFile>& file, const torch::nn::Module& module);
  ~OffloadActivations();
  OffloadActivations(const OffloadActivations&) = delete;
  OffloadActivations& operator=(const OffloadActivations&) = delete;

 private:
  class OffloadedBytes;
  class Store;
  std::unique_ptr<Store> store_;
  std::unique_ptr<wrap::SavedTensorScope> scope_;
};

// What offload_activations() looks for.
class CADRE_EXPORT ActivationOffloadBase {
 public:
  virtual ~ActivationOffloadBase() = default;
  void set_activation_file(std::shared_ptr<ActivationFile> file) { file_ = std::move(file); }

 protected:
  const std::shared_ptr<ActivationFile>& file() const { return file_; }

 private:
  std::shared_ptr<ActivationFile> file_;  // shared by the modules; null: everything stays in memory
};

// Gives the file to every ActivationOffload in the module, itself included. Returns their number;
// kInvalidArgument if there is none.
CADRE_EXPORT int offload_activations(torch::nn::Module& module,
                                     const std::shared_ptr<ActivationFile>& file);

template <typename M, typename Forward = wrap::ForwardPointer<M>>
class ActivationOffload : public M {
  static_assert(!std::is_same_v<Forward, wrap::NoSingleForward>,
                "cadre::ActivationOffload<M>: M must have exactly one public forward(), which is "
                "not a template (torch::nn::Sequential has a template): put the module into one of "
                "your own whose forward() has one signature");
};

template <typename M, typename C, typename Output, typename... Args>
class ActivationOffload<M, Output (C::*)(Args...)> : public M, public ActivationOffloadBase {
 public:
  using M::M;
  Output forward(Args... args) {
    const OffloadActivations offload(file(), *this);
    return M::forward(std::forward<Args>(args)...);
  }
};

template <typename M, typename C, typename Output, typename... Args>
class ActivationOffload<M, Output (C::*)(Args...) const> : public M, public ActivationOffloadBase {
 public:
  using M::M;
  Output forward(Args... args) const {
    const OffloadActivations offload(file(), *this);
    return M::forward(std::forward<Args>(args)...);
  }
};

}  // namespace cadre
