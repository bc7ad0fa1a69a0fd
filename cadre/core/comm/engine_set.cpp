#include "cadre/core/comm/engine_set.h"

#include <algorithm>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre {
EngineSet::EngineSet(EngineSet&& other) noexcept
    : host_{std::move(other.host_.engine), other.host_.capabilities} {
  if (!other.device_) return;
  device_.emplace(other.device_->device);
  device_->engine = std::move(other.device_->engine);
  device_->capabilities = other.device_->capabilities;
}

void EngineSet::set_host(std::unique_ptr<Backend> engine) {
  host_.capabilities = engine->capabilities();
  host_.engine = std::move(engine);
}

std::unique_ptr<Backend> EngineSet::exchange_host(std::unique_ptr<Backend> engine) {
  return std::exchange(host_.engine, std::move(engine));
}

void EngineSet::set_device(Device device, std::unique_ptr<Backend> engine) {
  device_.emplace(device);
  device_->capabilities = engine->capabilities();
  device_->engine = std::move(engine);
}

Status EngineSet::check(const Collective& collective) const {
  const Device& of_buffers = collective.device;
  if (is_on_device(of_buffers.type) && of_buffers != device_->device) {
    return Error(
        ErrorCode::kInvalidArgument,
        format("{}: the buffers are on {}, but this rank's device in the group is {}; move "
               "them there, or connect the group with the other device",
               collective.kind, to_string(of_buffers), to_string(device_->device)));
  }
  return check_supported(capabilities_for(of_buffers.type), collective);
}

Status EngineSet::check_together(std::span<const Collective> collectives) const {
  const Collective& first = collectives.front();
  const auto other = std::ranges::find_if(collectives, [&](const Collective& c) {
    return is_on_device(c.device.type) != is_on_device(first.device.type);
  });
  if (other == collectives.end()) return {};
  return Error(ErrorCode::kInvalidArgument,
               format("{}: collective {} of the call ({}) has buffers on {}, the first one on "
                      "{}; pass those of "
                      "each device in a call of their own",
                      first.kind, other - collectives.begin(), other->kind,
                      to_string(other->device), to_string(first.device)));
}

void EngineSet::clear() {
  if (device_) device_->engine.reset();
  host_.engine.reset();
}

}  // namespace cadre
