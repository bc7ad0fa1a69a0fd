// A short secret in memory that core files leave out.
//
// Threads: safe to share, like a std::shared_ptr to constant text. Blocking: never. Lifetime:
// copies share one page, which is overwritten when the last of them is destroyed. Errors:
// std::bad_alloc.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "cadre/core/base/export.h"

namespace cadre::os {

class CADRE_EXPORT Secret {
 public:
  Secret() = default;  // empty
  Secret(std::string_view text);
  Secret(const char* text) : Secret(std::string_view(text)) {}
  Secret(const std::string& text) : Secret(std::string_view(text)) {}
  // Overwrites `text` after copying it.
  Secret(std::string&& text);

  std::string_view view() const;
  bool empty() const { return page_ == nullptr; }

  // The comparison does not take constant time: its duration may reveal where the texts differ, so
  // do not compare with bytes that a peer sent.
  friend bool operator==(const Secret& a, const Secret& b) { return a.view() == b.view(); }

 private:
  class Page;

  std::shared_ptr<const Page> page_;
};

}  // namespace cadre::os
