#include "cadre/tensor/group/main_rank.h"

#include "cadre/tensor/group/agreement.h"

namespace cadre {

bool is_main_rank(const ProcessGroup& group, const MainRankOptions& options) {
  return (options.of_each_node ? group.local_rank() : group.rank()) == 0;
}

void on_main_rank(const ProcessGroup& group, const std::function<void()>& work,
                  const MainRankOptions& options) {
  const bool is_main = is_main_rank(group, options);
  check_on_all_ranks(group, {"on_main_rank", options.timeout}, [&] {
    if (is_main) work();
  });
}

void run_main_rank_first(const ProcessGroup& group, const std::function<void()>& work,
                         const MainRankOptions& options) {
  const bool is_main = is_main_rank(group, options);
  for (const bool is_turn_of_main : {true, false}) {
    check_on_all_ranks(group, {"main_rank_first", options.timeout}, [&] {
      if (is_main == is_turn_of_main) work();
    });
  }
}

}  // namespace cadre
