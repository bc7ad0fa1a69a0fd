#include "cadre/tensor/hooks/activations/saved_tensors.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <memory>
#include <utility>

namespace cadre::wrap {

namespace {

using torch::autograd::Engine;

thread_local SavedTensorStore* store_of_thread = nullptr;

class StoredTensor final : public torch::autograd::SavedVariableHooks {
 public:
  explicit StoredTensor(SavedTensorStore& store) : store_(&store) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    unpack_ = std::exchange(store_, nullptr)->pack(tensor);
  }
  at::Tensor call_unpack_hook() override { return unpack_(); }

 private:
  SavedTensorStore* store_;  // until the tensor is packed, which is at once
  std::function<at::Tensor()> unpack_;
};

// libtorch asks the default engine for the hooks of each tensor that is saved, so that its Python
// bindings can answer; there is no other way in C++. This engine answers, and leaves all work to
// the one that was there before it.
class AskedEngine final : public Engine {
 public:
  AskedEngine() = default;
  ~AskedEngine() override { stop(); }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (store_of_thread == nullptr) return nullptr;
    return std::make_unique<StoredTensor>(*store_of_thread);
  }
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return working().execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task,
      c10::intrusive_ptr<torch::autograd::Node> graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    return working().execute_with_graph_task(graph_task, std::move(graph_root),
                                             std::move(input_buffer));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return working().make_anomaly_metadata();
  }

  Engine& working() const { return *working_.load(); }
  void set_working(Engine& engine) { working_ = &engine; }

 private:
  std::atomic<Engine*> working_ = nullptr;
};

AskedEngine& asked_engine() {
  // Never destroyed, as libtorch's own: threads may still use it while the process ends.
  static auto& engine = *std::make_unique<AskedEngine>().release();
  return engine;
}

// A thread without a scope sees the engine that was there before.
Engine& engine_of_thread() {
  AskedEngine& engine = asked_engine();
  if (store_of_thread == nullptr) return engine.working();
  return engine;
}

}  // namespace

SavedTensorScope::SavedTensorScope(SavedTensorStore& store) : outer_(store_of_thread) {
  // Each time, because Python bindings that are loaded in between put an engine of their own there.
  if (outer_ == nullptr) {
    asked_engine().set_working(Engine::get_default_engine());
    torch::autograd::set_default_engine_stub(&engine_of_thread);
  }
  store_of_thread = &store;
}

SavedTensorScope::~SavedTensorScope() {
  store_of_thread = outer_;
}

}  // namespace cadre::wrap
