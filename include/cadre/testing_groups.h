// Tests of training code in one process: ranks with a ProcessGroup each, and groups for dry runs.
//
//   #include <cadre/testing_groups.h>
//   #include <torch/torch.h>
//   #include <cstdio>
//   namespace testing = cadre::testing;
//   const auto result = testing::run_groups(2, [](const cadre::ProcessGroup& group) {
//     const auto tensor = torch::full({3}, group.rank() + 1.0);
//     group.all_reduce(tensor);
//     testing::require(tensor[0].item<double>() == 3, "the sum over both ranks");
//   });
//   if (!result.ok()) std::fprintf(stderr, "%s", result.failures().c_str());
//   const cadre::ProcessGroup thousand = testing::make_fake_group(1000, {.rank = 7});
//   const auto all = torch::empty({1000, 3});
//   thousand.all_gather(all, torch::ones({3}));  // the other ranks do not exist
//
// Declares:
// - `testing::run_groups()`, `testing::GroupMain`, `testing::RunGroupsOptions`: ranks that are
//   threads of this process; testing::RanksResult, of <cadre/testing.h>, has their failures.
// - `testing::run_groups_in_simulator()`: runs ranks in virtual time, with planned faults.
// - `testing::run_group_of_rank()`: the code that both run on each rank.
// - `testing::make_fake_group()`: a group of any size of which only one rank exists.
//
// Guide: docs/guide/running/testing-programs.md. PyTorch: MultiThreadedTestCase of
// torch.testing._internal.common_distributed, and init_process_group(backend="fake").
#pragma once

#include "cadre/testing/torch/fake_process_group.h"
#include "cadre/testing/torch/process_group_ranks.h"
