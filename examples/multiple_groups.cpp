// Groups of some of the ranks: a grid's rows and columns, and a list of ranks.
//   cadre run --nproc-per-node 4 ./multiple_groups [COLUMNS]
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

// The sum of `value` over the ranks of a group.
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

  // Ranks with one color form a group, in the order of their keys.
  const auto row_group =
      *world.split({.color = row, .key = column, .name = "row" + std::to_string(row)});
  const auto column_group =
      *world.split({.color = column, .key = row, .name = "column" + std::to_string(column)});

  // All ranks call new_group with the same list; it returns nullopt on ranks that are not in the
  // list.
  std::vector<int> even_ranks;
  for (int i = 0; i < world.world_size(); i += 2) even_ranks.push_back(i);
  const auto evens = world.new_group(even_ranks);

  // Each group numbers its own operations: ranks of different groups need not be synchronous.
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
