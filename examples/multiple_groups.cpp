// Makes groups of some of the ranks: the rows and columns of a grid, and a list of ranks.
//   cadre run --nproc-per-node 4 ./multiple_groups [COLUMNS]
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

// Returns the sum of `value` over the ranks of the group.
static int64_t sum_over(const cadre::ProcessGroup& group, int64_t value) {
  auto sum = torch::tensor({value});
  group.all_reduce(sum);
  return sum.item<int64_t>();
}

int main(int argc, char** argv) try {
  const int num_columns = argc > 1 ? std::atoi(argv[1]) : 2;
  if (num_columns < 1) {
    std::cerr << "multiple_groups: COLUMNS must be a number from 1, is " << argv[1] << std::endl;
    return 2;
  }
  auto world = cadre::init_process_group();
  const int rank = world.rank();
  const int row = rank / num_columns;
  const int column = rank % num_columns;

  // Ranks that pass the same color form a group, ordered by their keys.
  const auto row_group =
      *world.split({.color = row, .key = column, .name = "row" + std::to_string(row)});
  const auto column_group =
      *world.split({.color = column, .key = row, .name = "column" + std::to_string(column)});

  // All ranks must call new_group with the same list. It returns nullopt on a rank that is not in
  // the list.
  std::vector<int> even_ranks;
  for (int i = 0; i < world.world_size(); i += 2) even_ranks.push_back(i);
  const auto evens = world.new_group(even_ranks);

  // Each group counts its own operations, so different groups may run operations at different
  // times.
  std::ostringstream line;
  line << "rank " << rank << ": row " << row << " sums to " << sum_over(row_group, rank)
       << ", column " << column << " to " << sum_over(column_group, rank);
  if (evens) line << ", as " << evens->rank() << " of the even ones to " << sum_over(*evens, rank);
  std::cout << line.str() + '\n' << std::flush;

  if (evens) evens->close();
  column_group.close();
  row_group.close();
  world.close();
} catch (const cadre::Error& error) {
  std::cerr << "multiple_groups: " << error.what() << std::endl;
  return 1;
}
