#include "cadre/tensor/backends/device_engine.h"

#include <string>
#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/tensor/backends/make_staged_engine.h"
#include "cadre/tensor/backends/nccl/nccl_engine.h"
#include "cadre/tensor/backends/staged_engine.h"

namespace cadre {
namespace {

// One rank writes the line, because the decision is the same on all ranks.
void log_choice(const BackendSetup& setup, LogLevel level, std::string_view engine,
                std::string_view reason) {
  if (setup.rank != 0 || setup.log == nullptr) return;
  setup.log->write(level, "backends",
                   format("group={} device_engine={} reason=\"{}\"", setup.group, engine, reason));
}

nccl::Demand demand_of(DeviceEngineChoice choice) {
  switch (choice) {
    case DeviceEngineChoice::kNccl:
      return {.choice = "DeviceEngineChoice::kNccl", .shared = nccl::SharedDevices::kLeftToNccl};
    case DeviceEngineChoice::kStaged:
      return {.choice = "DeviceEngineChoice::kStaged",
              .why_not = "the program chooses the staged engine"};
    case DeviceEngineChoice::kAuto:
      break;
  }
  return {.choice = "DeviceEngineChoice::kAuto"};
}

}  // namespace

BackendFactory device_engine(DeviceEngineChoice choice, const NcclOptions& options) {
  return [choice, options](const BackendSetup& setup) -> Result<std::unique_ptr<Backend>> {
    const bool is_demanded = choice == DeviceEngineChoice::kNccl;
    Result<nccl::MadeEngine> made = nccl::make_engine(setup, options, demand_of(choice));
    if (!made.ok()) return made.error();
    if (made->engine != nullptr) {
      log_choice(setup, LogLevel::kInfo, "nccl", made->description);
      return std::move(made->engine);
    }
    if (is_demanded) {
      return Error(ErrorCode::kUnavailable,
                   format("DeviceEngineChoice::kNccl was passed, and {}; pass kAuto or kStaged, "
                          "which need no NCCL",
                          made->description));
    }
    const bool is_chosen =
        choice == DeviceEngineChoice::kStaged || setup.device.type != options.device_type;
    log_choice(setup, is_chosen ? LogLevel::kInfo : LogLevel::kWarning, "staged",
               made->description);
    return make_staged_engine(setup, kStagedPieceBytes);
  };
}

}  // namespace cadre
