// How each method of averaging_method.h changes the parameters of a rank.
//
// Threads: one. Blocking: average() and synchronize() are collective. Lifetime: shares the tensors
// and the group. Errors: those of the group; they leave the parameters unchanged.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cadre/parallel/averaging/averaging_method.h"
#include "cadre/parallel/averaging/saved_tensors.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::averaging {

// The tensors that a rule averages.
struct Averaged {
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;  // those that are averaged with them
};

class Rule {
 public:
  virtual ~Rule() = default;
  // step: the number of the step, from 1.
  virtual bool is_due(int64_t step) const = 0;
  // Returns whether the parameters of all ranks are equal after average(step).
  virtual bool makes_all_equal(int64_t step) const = 0;
  virtual void average(int64_t step) = 0;
  virtual void synchronize() = 0;
  virtual void save(NamedState&) const {}
  // Reads the state without a change, and returns the function that applies it.
  virtual std::function<void()> load(SavedTensors&) {
    return [] {};
  }
};

// Splits groups from `group` if the method needs them; collective.
std::unique_ptr<Rule> make_rule(const AveragingMethod& method, const Averaged& averaged,
                                const ProcessGroup& group);

}  // namespace cadre::averaging
