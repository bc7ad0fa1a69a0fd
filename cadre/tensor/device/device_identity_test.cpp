#include "cadre/tensor/device/device_identity.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "cadre/core/os/system.h"
#include "cadre/testing/core/forwarding_system.h"

namespace cadre::device {
namespace {

// A container of this machine with a name and a network namespace of its own.
class InContainer final : public testing::ForwardingSystem {
 public:
  InContainer(os::System& inner, std::string name)
      : ForwardingSystem(inner), name_(std::move(name)) {}

  os::HostInfo host() override {
    os::HostInfo info = inner_.host();
    info.name = name_;
    info.boot_id += "-net-" + name_;
    return info;
  }

 private:
  const std::string name_;
};

TEST(DeviceIdentityTest, IsThatOfTheDeviceInEveryContainerOfAMachine) {
  const std::unique_ptr<os::System> system = os::make_native_system();
  InContainer one(*system, "one");
  InContainer other(*system, "other");
  for (const DeviceType type : {DeviceType::kCuda, DeviceType::kPrivateUse1}) {
    const Device device{type, 1};
    EXPECT_EQ(identity_of(device, one), identity_of(device, other));
    EXPECT_NE(identity_of(device, one), identity_of({type, 2}, other));
    EXPECT_EQ(identity_of(device, one).name.rfind("one/", 0), 0U);
  }
  EXPECT_NE(identity_of({DeviceType::kCuda, 1}, one),
            identity_of({DeviceType::kPrivateUse1, 1}, one));
}

}  // namespace
}  // namespace cadre::device
