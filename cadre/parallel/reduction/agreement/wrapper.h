// Identifies a wrapper of a model, and its rank, in errors and log lines.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/core/base/types.h"

namespace cadre::reduction {

// Where the values of a wrapper's parameters are between two forwards.
enum class ParameterValues : uint8_t {
  kWhole,      // every rank has all values of all parameters
  kSharded,    // each rank has shards; a forward gathers the whole parameters
  kUnwatched,  // the wrapper itself checks whether its parameters are changed
};

struct Wrapper {
  const char* name;       // static text such as "DistributedDataParallel"
  std::string component;  // the component in log lines, such as "ddp"
  std::string module;     // the name of the module's class, such as "Net"
  int rank;
  std::string rank_text;  // LocatedGroup::rank_text()
  uint32_t number = 0;    // equal on all ranks, different for each wrapper of a group

  // Returns the beginning of the wrapper's errors: "DistributedDataParallel, rank 2".
  std::string place() const;
  // Returns "DistributedDataParallel of Net, rank 2", for errors about several wrappers.
  std::string place_with_module() const;
};

}  // namespace cadre::reduction
