// Remembers over which connection a status question came first, so that its answers can return.
//
// Threads: one. Blocking: never. Errors: none.
// The last 8 questions of each asking rank are remembered; a rank has fewer open at a time.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>

#include "cadre/core/wire/control.h"

namespace cadre {

class StatusRoutes {
 public:
  static constexpr size_t kPerOrigin = 8;

  // Returns false if the question has come before, or is older than the remembered ones.
  bool add(const wire::StatusQuestion& question, uint64_t link) {
    Route& route = routes_[question.origin][question.number % kPerOrigin];
    if (question.number <= route.number) return false;
    route = {question.number, link};
    return true;
  }

  // Returns the connection over which the answered question came; nullopt if it is not remembered.
  std::optional<uint64_t> way_back(const wire::StatusAnswer& answer) const {
    const auto found = routes_.find(answer.origin);
    if (found == routes_.end()) return std::nullopt;
    const Route& route = found->second[answer.number % kPerOrigin];
    if (route.number != answer.number) return std::nullopt;
    return route.link;
  }

 private:
  struct Route {
    uint64_t number = 0;  // number of a question, from 1
    uint64_t link = 0;
  };
  std::map<int, std::array<Route, kPerOrigin>> routes_;  // by origin
};

}  // namespace cadre
