// The engines of a group: one for memory of the CPU, and optionally one for memory of this rank's
// device. A collective runs on the engine of the memory that its buffers are in; all collectives of
// the group have one numbering, whichever engine runs them.
//
// Threads: as Backend; capabilities may be read by any thread once the set is complete. Lifetime:
// owns the engines; the capabilities outlive them.
// Errors: check() returns kInvalidArgument that begins with the kind of the collective.
// Source: c10d's device map "cpu:gloo,cuda:nccl", with one order instead of one for each backend.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/backend.h"
#include "cadre/core/collective/collective.h"

namespace cadre {

class EngineSet final {
 public:
  EngineSet() = default;
  ~EngineSet() { clear(); }
  EngineSet(const EngineSet&) = delete;
  EngineSet& operator=(const EngineSet&) = delete;
  // An EngineSet that was moved from has capabilities, but no engines.
  EngineSet(EngineSet&& other) noexcept;
  EngineSet& operator=(EngineSet&&) = delete;

  void set_host(std::unique_ptr<Backend> engine);
  // Replaces the engine for memory of the CPU by one with its capabilities, which stands in front
  // of it, and returns the previous one; null if there was none.
  std::unique_ptr<Backend> exchange_host(std::unique_ptr<Backend> engine);
  // REQUIRES: device.type is not kCpu.
  void set_device(Device device, std::unique_ptr<Backend> engine);

  // Returns null for a world of one without a chosen engine, whose collectives are copies in memory
  // of the CPU.
  Backend* host() const { return host_.engine.get(); }
  // Returns the engine of collectives whose buffers are in memory of this type of device: that of
  // the device if there is one, else that of the CPU, which may know devices, too.
  Backend* engine_for(DeviceType type) const { return entry_for(type).engine.get(); }
  const Capabilities& capabilities_for(DeviceType type) const {
    return entry_for(type).capabilities;
  }
  const Capabilities& host_capabilities() const { return host_.capabilities; }
  // Returns whether the device has an engine of its own for this type of memory.
  bool is_on_device(DeviceType type) const { return device_ && type != DeviceType::kCpu; }
  std::optional<Device> device() const {
    return device_ ? std::optional(device_->device) : std::nullopt;
  }

  // Returns an error if no engine runs the collective. REQUIRES: validate() has succeeded.
  Status check(const Collective& collective) const;
  // Returns an error if the collectives of a call are not all for one engine.
  Status check_together(std::span<const Collective> collectives) const;

  // Destroys the engines, that of the device first. The capabilities stay.
  void clear();

 private:
  struct Entry {
    std::unique_ptr<Backend> engine = nullptr;
    Capabilities capabilities = full_capabilities("solo");
  };
  struct DeviceEntry : Entry {
    explicit DeviceEntry(Device of) : device(of) {}
    Device device;
  };
  const Entry& entry_for(DeviceType type) const { return is_on_device(type) ? *device_ : host_; }

  Entry host_;
  std::optional<DeviceEntry> device_;
};

}  // namespace cadre
