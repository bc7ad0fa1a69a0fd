#include "cadre/tensor/hooks/named_tensors.h"

#include <torch/nn/module.h>

#include <cstddef>
#include <optional>
#include <unordered_set>

namespace cadre {

namespace {

std::vector<NamedTensor> distinct(const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::vector<NamedTensor> result;
  for (const auto& item : tensors) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    result.push_back({item.key(), item.value()});
  }
  return result;
}

}  // namespace

std::vector<NamedTensor> distinct_parameters(const torch::nn::Module& module) {
  return distinct(module.named_parameters());
}

std::vector<NamedTensor> distinct_buffers(const torch::nn::Module& module) {
  return distinct(module.named_buffers());
}

int64_t num_elements(const std::vector<at::Tensor>& tensors) {
  int64_t sum = 0;
  for (const at::Tensor& tensor : tensors) sum += tensor.numel();
  return sum;
}

// A mismatch extends the text of the last star only, by one character. Earlier stars need no
// extension: the text between two stars has matched at the first possible place, and if that text
// has a dot, it can match at one place only.
bool wrap::matches_pattern(std::string_view pattern, std::string_view name) {
  size_t at = 0;  // the next character of the pattern
  // The next character of the name; the name before it matches the pattern before `at`.
  size_t in_name = 0;
  std::optional<size_t> last_star;
  size_t star_end = 0;  // the end, in the name, of the text that the last star has taken
  while (in_name < name.size()) {
    if (at < pattern.size() && pattern[at] == '*') {
      last_star = at++;
      star_end = in_name;
    } else if (at < pattern.size() && pattern[at] == name[in_name]) {
      ++at;
      ++in_name;
    } else if (last_star && name[star_end] != '.') {
      in_name = ++star_end;
      at = *last_star + 1;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', at) == std::string_view::npos;
}

}  // namespace cadre
