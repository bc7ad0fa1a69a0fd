"""The PyTorch side of torch_peer_test.cpp: PyTorch's TCPStore as client, as server or under gloo.

    torch_peer.py client PORT     runs every verb against a server on 127.0.0.1
    torch_peer.py gloo            runs a rank with init_method env:// and a launcher's variables
    torch_peer.py serve           runs two servers, one with libuv and one without; prints
                                  their ports; ends when key "stop" is set in the first

Prints "ok" as its last line if every verb behaved as with PyTorch's own server and client.
"""

import datetime
import sys

import torch
import torch.distributed as dist

SHORT = datetime.timedelta(milliseconds=200)
LONG = datetime.timedelta(seconds=30)


def expect(got, wanted):
    if got != wanted:
        raise AssertionError(f"got {got!r}, expected {wanted!r}")


def expect_raises(kind, call):
    try:
        call()
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}")


def run_verbs(port, use_libuv):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False,
                          timeout=LONG, use_libuv=use_libuv)
    key = f"uv{use_libuv}/"
    before = store.num_keys()
    store.set(key + "k", b"bytes\x00\xff")
    expect(store.get(key + "k"), b"bytes\x00\xff")
    expect(store.add(key + "n", 5), 5)
    expect(store.add(key + "n", -7), -2)
    expect(store.check([key + "k", key + "n"]), True)
    expect(store.check([key + "k", key + "absent"]), False)
    expect(store.num_keys(), before + 2)
    store.wait([key + "k", key + "n"], LONG)
    expect_raises(dist.DistStoreError, lambda: store.wait([key + "absent"], SHORT))
    expect(store.get(key + "k"), b"bytes\x00\xff")  # the connection is still usable
    expect(store.compare_set(key + "cas", "", "one"), b"one")
    expect(store.compare_set(key + "cas", "one", "two"), b"two")
    expect(store.compare_set(key + "cas", "one", "three"), b"two")
    expect(store.compare_set(key + "absent", "x", "y"), b"x")
    store.append(key + "log", "a")
    store.append(key + "log", "b" * 100_000)
    expect(store.get(key + "log"), b"a" + b"b" * 100_000)
    store.multi_set([key + "m1", key + "m2"], ["1", "2"])
    expect(store.multi_get([key + "m1", key + "m2"]), [b"1", b"2"])
    expect(store.delete_key(key + "m1"), True)
    expect(store.delete_key(key + "m1"), False)
    if use_libuv:  # without libuv PyTorch's client rejects queues
        store.queue_push(key + "q", "first")
        store.queue_push(key + "q", "second")
        expect(store.queue_len(key + "q"), 2)
        expect(store.queue_pop(key + "q"), b"first")
        expect(store.queue_pop(key + "q"), b"second")
        expect_raises(dist.QueueEmptyError, lambda: store.queue_pop(key + "q", False))
        expect(key + "k" in store.list_keys(), True)
    if hasattr(store, "barrier"):
        store.barrier(key + "barrier", 1, LONG)
    other = store.clone()
    other.set(key + "cloned", "yes")
    expect(store.get(key + "cloned"), b"yes")
    prefixed = dist.PrefixStore("pre", store)
    prefixed.set(key + "p", "v")
    expect(store.get("pre/" + key + "p"), b"v")


def run_gloo():
    dist.init_process_group("gloo", timeout=LONG)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    numbers = torch.arange(1000, dtype=torch.float64) * (rank + 1)
    dist.all_reduce(numbers)
    expected = torch.arange(1000, dtype=torch.float64) * (world_size * (world_size + 1) // 2)
    expect(torch.equal(numbers, expected), True)
    dist.barrier()
    dist.destroy_process_group()


def serve():
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG,
                            use_libuv=use_libuv) for use_libuv in (True, False)]
    print(*(store.port for store in stores), flush=True)
    stores[0].wait(["stop"], datetime.timedelta(seconds=120))


if sys.argv[1] == "client":
    run_verbs(int(sys.argv[2]), True)
    run_verbs(int(sys.argv[2]), False)
elif sys.argv[1] == "gloo":
    run_gloo()
else:
    serve()
print("ok")
