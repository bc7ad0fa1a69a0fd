#include "cadre/tensor/group/backward/backward_collectives.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <map>

namespace cadre {
namespace {

// Maps the global ranks of a group to the number of the newest backward that has run a collective
// of a group with these ranks. A nested backward has a larger number than the outer one. The map is
// thread-local, because the nodes of a graph and the data-parallel wrapper that calls
// collectives_since() have only the thread in common. An entry holds no group, so it may outlive
// the group.
std::map<std::vector<int>, int>& newest_backwards() {
  thread_local std::map<std::vector<int>, int> newest;
  return newest;
}

}  // namespace

int current_backward() {
  return torch::autograd::get_current_graph_task_id();
}

void note_backward_collective(const ProcessGroup& group) {
  const int backward = current_backward();
  const auto [entry, is_new] = newest_backwards().try_emplace(group.global_ranks(), backward);
  if (!is_new) entry->second = std::max(entry->second, backward);
}

std::vector<std::vector<int>> collectives_since(int backward) {
  std::vector<std::vector<int>> found;
  for (const auto& [ranks, newest] : newest_backwards()) {
    if (newest >= backward) found.push_back(ranks);
  }
  return found;
}

}  // namespace cadre
