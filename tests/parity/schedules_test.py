#!/usr/bin/env python3
"""Compares the schedules of `cadre schedule` with those of torch.distributed.pipelining: for 2 to 8
ranks, 1 to 16 microbatches and 1 to 4 stages a rank, the order of every rank, and the lowered form
with its sends, receives, UNSHARD, RESHARD and REDUCE_GRAD. Also checks that Cadre reads a CSV file
of PyTorch as the same schedule.

    schedules_test.py CADRE [--one-in N]

CADRE is the command; --one-in 4 runs the quarter of the cases that the number in CADRE_CASES_SEED
(default 1) picks. PyTorch's classes get stages that compute nothing; no process group is made.
Exits 1 when a schedule differs, when only one of the two makes a schedule (except in the cases of
DIFFERENT_REFUSALS), or when a planted difference is not noticed.
"""

import argparse
import csv
import io
import logging
import pathlib
import subprocess
import sys
import tempfile

from torch.distributed.pipelining import schedules as torch_schedules

from case_share import share_of

RANKS = range(2, 9)
MICROBATCHES = range(1, 17)
STAGES_PER_RANK = range(1, 5)
NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
         "DualPipeV")
ONE_STAGE_A_RANK = ("GPipe", "1F1B")
MAX_UNSHARDED_STAGES = 3  # the default of PyTorch's lowering and of `cadre schedule --lower`
# PyTorch makes 1F1B only with at least as many microbatches as stages. Cadre also makes it with
# fewer, for which the schedule runs, too.
DIFFERENT_REFUSALS = {"1F1B": lambda ranks, microbatches, stages: microbatches < ranks}


def all_cases():
    for name in NAMES:
        for ranks in RANKS:
            for microbatches in MICROBATCHES:
                for stages in (1,) if name in ONE_STAGE_A_RANK else STAGES_PER_RANK:
                    yield name, ranks, microbatches, stages


class StubStage:
    """Has the members of a stage that PyTorch's schedules use. It computes nothing and records the calls."""

    def __init__(self, index, ranks, stages):
        self.stage_index, self.num_stages = index, ranks * stages
        self.group_rank, self.group_size = index % ranks, ranks
        self.is_first, self.is_last = index == 0, index == ranks * stages - 1
        self.submod = None
        self.computed = []

    def _write(self, kind, microbatch):
        self.computed.append(torch_schedules._Action(self.stage_index, kind, microbatch))

    def forward_one_chunk(self, microbatch, *_, **__):
        self._write(torch_schedules.FORWARD, microbatch)

    def backward_one_chunk(self, microbatch, *_, **__):
        self._write(torch_schedules.FULL_BACKWARD, microbatch)

    def no_messages(self, _):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages

    def perform_reduce_grad(self, _):
        pass


def single_stage_order(made_of, rank, ranks, microbatches):
    """Returns the order in which a schedule with one stage on each rank calls its stages. Its attribute pipeline_order
    is not used, because in 1F1B of PyTorch 2.13 it gives the last rank the forwards 1 to m instead of 0 to m - 1."""
    stage = StubStage(rank, ranks, 1)
    schedule = made_of(stage, microbatches)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches()
    return stage.computed


def torch_orders(name, ranks, microbatches, stages):
    """Returns (order with idle cells, order, lowered order) of each rank; None if PyTorch raises an error."""
    made_of = torch_schedules.get_schedule_class(name)
    try:
        if name in ONE_STAGE_A_RANK:
            order = {rank: single_stage_order(made_of, rank, ranks, microbatches) for rank in range(ranks)}
        else:
            schedule = made_of([StubStage(index * ranks, ranks, stages) for index in range(stages)],
                               microbatches)
            order = schedule.pipeline_order
    except ValueError:
        return None
    computed = {rank: [action for action in actions if action is not None] for rank, actions in order.items()}
    rank_of_stage = torch_schedules._validate_schedule(computed, ranks, ranks * stages, microbatches)
    lowered = {rank: torch_schedules._add_reduce_grad(
        torch_schedules._add_unshard_reshard(actions, MAX_UNSHARDED_STAGES), microbatches)
        for rank, actions in computed.items()}
    lowered = torch_schedules._add_send_recv(lowered, lambda stage: rank_of_stage[stage], ranks * stages)
    if name not in ONE_STAGE_A_RANK:
        assert lowered == schedule.pipeline_order_with_comms, (name, ranks, microbatches, stages)
    return order, to_texts(computed), to_texts(lowered)


def to_texts(orders):
    return [[str(action) for action in orders[rank]] for rank in sorted(orders)]


def in_order_of_stages(actions):
    """Sorts neighbouring RESHARD actions, which PyTorch emits in the undefined order of a Python set."""
    result, run = [], []
    for action in actions + [""]:
        if action.endswith("RESHARD"):
            run.append(action)
            continue
        result += sorted(run, key=lambda text: int(text.removesuffix("RESHARD"))) + [action]
        run = []
    return result[:-1]


def as_compared(orders):
    return [in_order_of_stages(actions) for actions in orders]


def run_cadre(command, *words):
    """Returns the rows of the CSV that the command prints; None if it fails for the schedule."""
    done = subprocess.run([command, "schedule", "--csv", "-", *map(str, words)], capture_output=True,
                          text=True, timeout=60)
    if done.returncode == 2:
        return None
    assert done.returncode == 0, done.stderr
    return list(csv.reader(io.StringIO(done.stdout)))


def written_by_torch(folder, order):
    """Writes a file as PyTorch's _dump_csv() does, with its empty cells."""
    path = pathlib.Path(folder) / "torch.csv"
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(order[rank] for rank in sorted(order))
    return path


def is_noticed(ours, orders):
    """Returns whether the comparison would notice two swapped neighbours in one rank's order."""
    changed = [list(actions) for actions in orders]
    changed[-1][0], changed[-1][1] = changed[-1][1], changed[-1][0]
    return ours != changed


def compare(command, cases):
    num_equal = num_refused = 0
    failed = []
    with tempfile.TemporaryDirectory(prefix="cadre_schedules_") as folder:
        for case in cases:
            name, ranks, microbatches, stages = case
            words = ["--name", name, "--ranks", ranks, "--microbatches", microbatches]
            words += ["--virtual", stages]
            ours = run_cadre(command, *words)
            theirs = torch_orders(*case)
            if theirs is None or ours is None:
                allowed = DIFFERENT_REFUSALS.get(name, lambda *_: False)(*case[1:])
                good = (ours is None) == (theirs is None) or (allowed and theirs is None)
                num_refused += good
                failed += [] if good else [f"{case}: refused by {'PyTorch' if theirs is None else 'Cadre'} alone"]
                continue
            order, computed, lowered = theirs
            our_lowered = run_cadre(command, *words, "--lower", "as-sent")
            read = run_cadre(command, "--from", written_by_torch(folder, order))
            differences = [what for what, equal in (
                ("the order", ours == computed),
                ("the lowered form", as_compared(our_lowered) == as_compared(lowered)),
                ("what is read of PyTorch's file", read == computed),
                ("a planted swap is not noticed; the order", is_noticed(ours, computed))) if not equal]
            failed += [f"{case}: {what} differs" for what in differences]
            num_equal += not differences
    for line in failed:
        print(line)
    print(f"schedules: {num_equal} equal, {num_refused} refused, {len(failed)} failed")
    return 1 if failed or num_equal == 0 else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", metavar="CADRE")
    parser.add_argument("--one-in", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    return compare(options.command, share_of(list(all_cases()), options.one_in))


if __name__ == "__main__":
    sys.exit(main())
