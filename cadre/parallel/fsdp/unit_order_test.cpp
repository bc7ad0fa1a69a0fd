#include "cadre/parallel/fsdp/unit_order.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

namespace cadre::unit_order_test {
namespace {

using parallel::UnitOrder;
using Pass = UnitOrder::Pass;

// Runs a pass that uses these units in this order. Returns for each use whether it was expected.
std::vector<bool> pass_of(UnitOrder& order, Pass pass, const std::vector<size_t>& units) {
  order.begin(pass);
  std::vector<bool> expected;
  for (const size_t unit : units) {
    expected.push_back(order.visit(unit));
    order.set_agreed();
  }
  order.end();
  return expected;
}

// Returns an order that has recorded two equal steps, so that every use of a third equal step is
// expected.
UnitOrder known_order() {
  UnitOrder order;
  for (int step = 0; step < 2; ++step) {
    pass_of(order, Pass::kForward, {0, 1, 2});
    pass_of(order, Pass::kBackward, {0, 2, 1});
    pass_of(order, Pass::kUpdate, {});
  }
  return order;
}

TEST(UnitOrder, ExpectsWhatTheLastPassDid) {
  UnitOrder order = known_order();
  EXPECT_EQ(pass_of(order, Pass::kForward, {0, 1, 2}), (std::vector<bool>{true, true, true}));
  EXPECT_EQ(pass_of(order, Pass::kBackward, {0, 2, 1}), (std::vector<bool>{true, true, true}));
}

TEST(UnitOrder, AUseOutOfOrderAndItsPassAreNotExpected) {
  UnitOrder order = known_order();
  EXPECT_EQ(pass_of(order, Pass::kForward, {0, 2, 1}), (std::vector<bool>{true, false, false}));
  // If a forward leaves out its last unit, the first use of the next pass is not expected.
  order = known_order();
  pass_of(order, Pass::kForward, {0, 1});
  EXPECT_EQ(pass_of(order, Pass::kBackward, {0}), (std::vector<bool>{false}));
  // A backward directly after an update is not expected, because a forward followed before.
  order = known_order();
  EXPECT_EQ(pass_of(order, Pass::kBackward, {0}), (std::vector<bool>{false}));
}

TEST(UnitOrder, ADoubtHoldsUntilTheRanksAgree) {
  UnitOrder order = known_order();
  order.doubt();
  order.begin(Pass::kForward);
  EXPECT_FALSE(order.visit(0));
  EXPECT_FALSE(order.visit(1)) << "nothing was agreed";
  order.set_agreed();
  EXPECT_TRUE(order.visit(2));
  order.abandon();
  order.begin(Pass::kForward);
  EXPECT_FALSE(order.visit(0)) << "after an exception";
}

TEST(UnitOrder, PredictsTheNextUnit) {
  UnitOrder order;
  order.begin(Pass::kForward);
  order.visit(0);
  EXPECT_EQ(order.next(), std::nullopt) << "nothing is known";
  order.visit(1);
  order.visit(2);
  order.end();
  // The prediction for the first backward is the root, and then the units in reverse order.
  order.begin(Pass::kBackward);
  EXPECT_EQ(order.next(), std::nullopt) << "before the first use";
  order.visit(0);
  EXPECT_EQ(order.next(), 2U);
  order.visit(2);
  EXPECT_EQ(order.next(), 1U);
  order.visit(1);
  EXPECT_EQ(order.next(), std::nullopt) << "the last one";
  order.end();
  order.begin(Pass::kForward);
  order.visit(1);
  EXPECT_EQ(order.next(), std::nullopt) << "another unit than the last time";
}

}  // namespace
}  // namespace cadre::unit_order_test
