// Compares which unit each rank is about to use. It is called before a gather that the order of the
// last pass did not predict (unit_order.h).
//
// Blocking: operator() is a collective, until the group's deadline. Lifetime: shares the group.
// Errors: kInvalidArgument on all ranks if two ranks differ, with the units that both use; those of
// the group.
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
  // names[u]: the name of unit u; "" for the root.
  UseComparison(wrap::LocatedGroup group, std::vector<std::string> names)
      : group_(std::move(group)), names_(std::move(names)) {}

  void operator()(const UnitSchedule::Use& use) const;

 private:
  std::string text_of_code(int64_t code) const;

  wrap::LocatedGroup group_;
  std::vector<std::string> names_;
};

}  // namespace cadre::parallel
