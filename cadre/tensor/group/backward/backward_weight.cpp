#include "cadre/tensor/group/backward/backward_weight.h"

#include <utility>
#include <vector>

namespace cadre {
namespace {

// The weights are thread-local, because the nodes of a graph and the wrapper that runs the backward
// have only the thread in common. A wrapper may end its pass in another thread, so the list has
// weak pointers, and expired ones are removed when the list is used.
std::vector<std::weak_ptr<const double>>& weights_of_thread() {
  thread_local std::vector<std::weak_ptr<const double>> weights;
  std::erase_if(weights,
                [](const std::weak_ptr<const double>& weight) { return weight.expired(); });
  return weights;
}

}  // namespace

BackwardWeight::BackwardWeight(double weight) : weight_(std::make_shared<const double>(weight)) {
  weights_of_thread().emplace_back(weight_);
}

std::optional<double> backward_weight() {
  const auto& weights = weights_of_thread();
  if (weights.empty()) return std::nullopt;
  const auto last = weights.back().lock();
  return last ? std::optional(*last) : std::nullopt;
}

}  // namespace cadre
