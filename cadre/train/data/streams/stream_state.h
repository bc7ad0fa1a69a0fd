// The bytes of a stream's state: its kind, the digest of its settings, and its numbers and texts.
//
// Threads: plain values. Blocking: never. Lifetime: a reader borrows the bytes. Errors: kCorruption
// for bytes that are not of a state of that kind; kInvalidArgument for other settings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre {

class StateWriter {
 public:
  // kind: a static text, such as "shuffle_stream". digest: of what must be equal when the state is
  // loaded.
  StateWriter(std::string_view kind, uint64_t digest) {
    out_.text(kind);
    out_.integer(digest);
  }
  StateWriter& number(int64_t value) {
    out_.integer(value);
    return *this;
  }
  StateWriter& text(std::string_view value) {
    out_.text(value);
    return *this;
  }
  std::string bytes() const { return std::string(wire::as_text(out_.bytes())); }

 private:
  wire::ByteWriter out_;
};

class StateReader {
 public:
  StateReader(std::string_view bytes, std::string_view kind, uint64_t digest)
      : kind_(kind), in_(wire::as_bytes(bytes)) {
    const std::string_view found = in_.view(bytes.size());
    const auto of_settings = in_.integer<uint64_t>();
    if (!in_.ok() || found != kind) {
      refuse("it does not begin as such a state; load the bytes that state() returned");
    }
    if (of_settings != digest) {
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("{}: the state was saved with other settings or another source "
                                "(their digest was {:016x} and is {:016x} now); use the settings "
                                "of the run that saved it, or begin an epoch",
                                kind, of_settings, digest));
    }
  }
  // Returns a number, which must be in [0, largest].
  int64_t number(std::string_view name, int64_t largest) {
    const auto value = in_.integer<int64_t>();
    if (!in_.ok()) refuse(cadre::format("it ends before its {}", name));
    if (value < 0 || value > largest) {
      refuse(cadre::format("its {} is {}; expected 0 to {}", name, value, largest));
    }
    return value;
  }
  std::string_view text(std::string_view name) {
    const std::string_view value = in_.view(in_.remaining());
    if (!in_.ok()) refuse(cadre::format("it ends before its {}", name));
    return value;
  }
  // Called after the last field.
  void end() const {
    if (!in_.is_complete()) refuse(cadre::format("{} bytes follow its end", in_.remaining()));
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    throw Error(ErrorCode::kCorruption, cadre::format("{}: the state is damaged: {}", kind_, what));
  }

  std::string_view kind_;
  wire::ByteReader in_;
};

}  // namespace cadre
