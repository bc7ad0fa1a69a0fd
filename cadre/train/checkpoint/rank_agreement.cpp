#include "cadre/train/checkpoint/rank_agreement.h"

#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/tensor/group/agreement.h"

namespace cadre {

Result<std::vector<Result<std::string>>> RankAgreement::outcomes_of(
    const Result<std::string>& own) const {
  if (!group_) return std::vector<Result<std::string>>{own};
  try {
    return gather_outcomes(*group_, {"saving or loading a snapshot", timeout_}, [&own] {
      if (!own.ok()) throw own.error();
      return *own;
    });
  } catch (const Error& error) {
    return error;
  }
}

Result<std::vector<std::string>> RankAgreement::gather(const Result<std::string>& own) const {
  auto outcomes = outcomes_of(own);
  if (!outcomes.ok()) return outcomes.error();
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < outcomes->size(); ++rank) {
    Result<std::string>& outcome = (*outcomes)[rank];
    if (!outcome.ok()) {
      if (world_size() == 1) return outcome.error();
      return outcome.error().with_context(cadre::format("rank {}", rank));
    }
    texts.push_back(std::move(outcome).value());
  }
  return texts;
}

Status RankAgreement::follow_first(const Status& own) const {
  const auto outcomes = outcomes_of(own.ok() ? Result<std::string>(std::string()) : own.error());
  if (!outcomes.ok()) return own.ok() ? outcomes.error() : own.error();
  const Result<std::string>& first = outcomes->front();
  if (first.ok()) return {};
  return first.error();
}

}  // namespace cadre
