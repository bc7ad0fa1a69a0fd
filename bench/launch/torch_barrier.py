"""The counterpart of launch_barrier.cpp in PyTorch: joins over gloo, runs one barrier and leaves."""

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
