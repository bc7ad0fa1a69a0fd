"""The peer of launch_barrier.cpp in PyTorch: joins over gloo, does one barrier, leaves."""

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
