#include "cadre/cli/num_workers.h"

#include <string>

#include "cadre/base/format.h"
#include "cadre/cli/launch_job.h"

namespace cadre::cli {

Result<int> num_workers_of(const GivenOption& given, const os::MachineInfo& machine) {
  const std::string& text = given.value;
  if (text == "cpu") return machine.num_cores;
  if (text == "auto") return machine.num_gpus > 0 ? machine.num_gpus : machine.num_cores;
  if (text == "gpu") {
    if (machine.num_gpus > 0) return machine.num_gpus;
    return Error(ErrorCode::kInvalidArgument,
                 given.text() + ": this machine has no GPU; say auto or a number");
  }
  const auto count = parse_integer(text);
  if (!count || *count < 1 || *count > kMaxWorkers) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("{}: expected a number from 1 to {}, auto, gpu or cpu", given.text(),
                               kMaxWorkers));
  }
  return *count;
}

}  // namespace cadre::cli
