"""Does what libraries on top of torch.distributed do with torchrun's variables, on each of two workers, and prints
"all is well"."""

import os
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed.elastic.utils.store import barrier, synchronize

# The state of a process as a library of accelerate's kind reads it.
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
num_nodes, node = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["GROUP_RANK"])
assert (local_size, num_nodes) == (size // num_nodes, 2), (size, local_size, num_nodes)
assert rank == node * local_size + local_rank, (rank, node, local_rank)
assert distributed.is_torchelastic_launched()
assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])

# A program that uses the agent's store itself, as a client, and the barrier of elastic over it.
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
store = distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                             timeout=timedelta(seconds=120))
own = distributed.PrefixStore("program", store)
assert synchronize(own, f"data of {rank}".encode(), rank, size, "data") == [f"data of {r}".encode() for r in range(size)]
own.add("count", 1)
barrier(own, size, "counted")
assert own.add("count", 0) == size
assert own.compare_set("owner", "", str(rank)).decode() in map(str, range(size))

# The default group: a number from each process, a group of two, and the mean of a metric.
distributed.init_process_group("gloo", init_method="env://")
numbers = [torch.zeros(1) for _ in range(size)]
distributed.all_gather(numbers, torch.tensor([float(rank)]))
assert [number.item() for number in numbers] == list(range(size))
group = distributed.new_group([0, size - 1])
metric = torch.tensor([float(rank)])
distributed.all_reduce(metric)
assert metric.item() == sum(range(size))
distributed.barrier()
distributed.destroy_process_group()
print("all is well")
