// The order in which a rank uses its units, pass after pass: what comes next is prefetched, and a
// use that is not the expected one is compared with the other ranks before anything is gathered.
//
// Threads: one. Blocking: never. Lifetime: a value. Errors: none.
// Two units may have the same size, so an all-gather of one unit on one rank and of another unit on
// another rank would succeed and mix their parameters. Ranks that have used their units in the same
// order hold equal objects of this class. A use that visit() expects needs no message, because
// every rank expects it; a rank that leaves the expected order asks the others, and the group
// notices that they run another operation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace cadre::parallel {

class UnitOrder {
 public:
  // kUpdate is an update of the shards, which uses no unit.
  enum class Pass : uint8_t { kForward, kForwardWithoutGrad, kBackward, kUpdate };

  void begin(Pass pass);
  // Returns whether this use of the unit was expected. If not, the ranks have to compare it.
  bool visit(size_t unit);
  // Called when the ranks have compared a use and agree.
  void set_agreed() { is_expected_ = true; }
  // Returns the unit that is likely to follow the last one visited; nullopt if none is known.
  std::optional<size_t> next() const;
  void end();
  // Called when something happened that may have happened on this rank only: the next use is
  // compared.
  void doubt() { is_expected_ = false; }
  // Called when the pass ended by an exception: the next pass then follows no pass.
  void abandon();

  Pass pass() const { return pass_; }

 private:
  static constexpr size_t kNumPasses = 4;
  static size_t index(Pass pass) { return static_cast<size_t>(pass); }

  Pass pass_ = Pass::kForward;
  std::vector<size_t> current_;                        // the units of the pass that runs
  std::array<std::vector<size_t>, kNumPasses> known_;  // the units of the last pass of each kind
  // The pass that followed the last pass of each kind.
  std::array<std::optional<Pass>, kNumPasses> follows_;
  std::optional<Pass> last_;
  bool is_expected_ = false;
};

}  // namespace cadre::parallel
