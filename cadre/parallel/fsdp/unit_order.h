// Records the order in which a rank uses its units in each forward and backward. The next unit of
// that order is prefetched. If a rank uses another unit than the order predicts, the ranks first
// compare what they use, and only then gather.
//
// The comparison is needed because two units may have the same size: an all_gather of one unit on
// one rank and of another unit on another rank would succeed and mix up their parameters. Ranks
// that have used their units in the same order have equal objects of this class. So a use that
// visit() expects is expected on every rank and needs no communication. A rank that leaves the
// order calls a collective for the comparison; if the other ranks do not, the mismatch of the
// collectives is reported as an error.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace cadre::parallel {

class UnitOrder {
 public:
  // A pass is one forward or backward, in which units are used; a sequence of uses outside of them
  // (kOutside); or an update of the shards (kUpdate), in which no unit is used.
  enum class Pass : uint8_t { kForward, kForwardWithoutGrad, kBackward, kUpdate, kOutside };

  void begin(Pass pass);
  // Records a use of the unit. Returns whether it was expected; if not, the ranks must compare what
  // they use.
  bool visit(size_t unit);
  // Called after the ranks have compared a use and found it equal.
  void set_agreed() { is_expected_ = true; }
  // Returns the unit that is likely to follow the last one visited; nullopt if none is known.
  std::optional<size_t> next() const;
  // Returns the unit that is likely to follow `unit`, if that is visited now.
  std::optional<size_t> after(size_t unit) const;
  void end();
  // Called after an event that may have happened on this rank only, such as an exception. The next
  // use is then not expected, so that the ranks compare it.
  void doubt() { is_expected_ = false; }
  // Called instead of end() if an exception has ended the pass. The next pass is then not checked
  // against the order of passes.
  void abandon();

  Pass pass() const { return pass_; }

 private:
  static constexpr size_t kNumPasses = 5;
  static size_t index(Pass pass) { return static_cast<size_t>(pass); }

  Pass pass_ = Pass::kForward;
  std::vector<size_t> current_;  // the units used in the current pass
  // The units of the last pass of each kind.
  std::array<std::vector<size_t>, kNumPasses> known_;
  // The kind of the pass that followed the last pass of each kind.
  std::array<std::optional<Pass>, kNumPasses> follows_;
  std::optional<Pass> last_;
  bool is_expected_ = false;
};

}  // namespace cadre::parallel
