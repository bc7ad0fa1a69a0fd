// Tests which engine of a group runs a collective, and what no engine runs.
#include "cadre/core/comm/engine_set.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace cadre {
namespace {

class NamedEngine final : public Backend {
 public:
  NamedEngine(std::string_view name, DeviceType type, std::vector<std::string>* ended = nullptr)
      : name_(name), type_(type), ended_(ended) {}
  ~NamedEngine() override {
    if (ended_ != nullptr) ended_->emplace_back(name_);
  }
  Capabilities capabilities() const override {
    Capabilities can = full_capabilities(name_);
    can.devices = {type_};
    return can;
  }
  Completion submit(const OpContext&, std::span<const Collective>) override { return Status(); }

 private:
  const std::string_view name_;
  const DeviceType type_;
  std::vector<std::string>* const ended_;
};

constexpr Device kOwn{DeviceType::kPrivateUse1, 2};

EngineSet make_set(std::vector<std::string>* ended = nullptr) {
  EngineSet set;
  set.set_host(std::make_unique<NamedEngine>("of the CPU", DeviceType::kCpu, ended));
  set.set_device(kOwn, std::make_unique<NamedEngine>("of the device", kOwn.type, ended));
  return set;
}

Collective moved_on(Device device) {
  Collective collective = Collective::broadcast({}, DType::kFloat32, 0);
  collective.device = device;
  return collective;
}

std::string refusal_of(const Status& status) {
  return status.ok() ? "" : status.error().message();
}

TEST(EngineSetTest, EachTypeOfMemoryHasItsEngine) {
  const EngineSet set = make_set();
  EXPECT_EQ(set.capabilities_for(DeviceType::kCpu).name, "of the CPU");
  EXPECT_EQ(set.capabilities_for(kOwn.type).name, "of the device");
  EXPECT_EQ(set.engine_for(DeviceType::kCpu), set.host());
  EXPECT_NE(set.engine_for(kOwn.type), set.host());
  EXPECT_EQ(set.device(), kOwn);
  EXPECT_TRUE(set.is_on_device(kOwn.type));
  EXPECT_FALSE(set.is_on_device(DeviceType::kCpu));
  EXPECT_EQ(refusal_of(set.check(moved_on({}))), "");
  EXPECT_EQ(refusal_of(set.check(moved_on(kOwn))), "");
  // A barrier has no memory.
  EXPECT_EQ(refusal_of(set.check(Collective::barrier())), "");
}

TEST(EngineSetTest, RefusesMemoryThatIsElsewhere) {
  const EngineSet set = make_set();
  EXPECT_EQ(refusal_of(set.check(moved_on({kOwn.type, 0}))),
            "broadcast: the buffers are on privateuseone:0, but this rank's device in the group is "
            "privateuseone:2; move them there, or connect the group with the other device");
  EXPECT_EQ(refusal_of(set.check(moved_on({DeviceType::kCuda, 2}))),
            "broadcast: the buffers are on cuda:2, but this rank's device in the group is "
            "privateuseone:2; move them there, or connect the group with the other device");
  const std::vector<Collective> both = {moved_on(kOwn), moved_on(kOwn), moved_on({})};
  EXPECT_EQ(refusal_of(set.check_together(both)),
            "broadcast: collective 2 of the call (broadcast) has buffers on cpu, the first one "
            "on privateuseone:2; pass those of each device in a call of their own");
  EXPECT_EQ(refusal_of(set.check_together(std::span(both).first(2))), "");
}

// The engine for the CPU may know devices, too. Then it runs all collectives.
TEST(EngineSetTest, WithoutAnEngineForDevicesThatOfTheCpuDecides) {
  EngineSet set;
  EXPECT_EQ(set.host(), nullptr);
  EXPECT_EQ(set.host_capabilities().name, "solo");
  EXPECT_EQ(refusal_of(set.check(moved_on(kOwn))),
            "broadcast: the buffers are on privateuseone:2, backend \"solo\" works on cpu; move "
            "them there, or connect the group with another backend");
  set.set_host(std::make_unique<NamedEngine>("of all", DeviceType::kCuda));
  EXPECT_EQ(refusal_of(set.check(moved_on({DeviceType::kCuda, 5}))), "");
  EXPECT_EQ(set.device(), std::nullopt);
  EXPECT_FALSE(set.is_on_device(DeviceType::kCuda));
}

TEST(EngineSetTest, EndsTheEngineOfTheDeviceFirstAndKeepsTheCapabilities) {
  std::vector<std::string> ended;
  EngineSet set = make_set(&ended);
  EngineSet taken = std::move(set);
  EXPECT_EQ(set.engine_for(kOwn.type), nullptr);  // NOLINT: what a moved-from set has is defined
  EXPECT_EQ(set.capabilities_for(kOwn.type).name, "of the device");
  taken.clear();
  EXPECT_EQ(ended, (std::vector<std::string>{"of the device", "of the CPU"}));
  EXPECT_EQ(taken.host_capabilities().name, "of the CPU");
}

}  // namespace
}  // namespace cadre
