// Compares which unit the ranks use, before they gather a unit that the last pass did not predict.
//
// Threads: one. Blocking: the call is collective, until the group's deadline. Lifetime: shares the
// group. Errors: kInvalidArgument on all ranks, with what two of them use; those of the group.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/fsdp/unit_schedule.h"
#include "cadre/tensor/hooks/located_group.h"

namespace cadre::parallel {

class UseComparison {
 public:
  // names[u] is the name of unit u; it is "" for the root.
  UseComparison(wrap::LocatedGroup group, std::vector<std::string> names)
      : group_(std::move(group)), names_(std::move(names)) {}

  void operator()(const UnitSchedule::Use& use) const;

 private:
  std::string text_of_code(int64_t code) const;

  wrap::LocatedGroup group_;
  std::vector<std::string> names_;
};

}  // namespace cadre::parallel
