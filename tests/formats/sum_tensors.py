"""Reads every safetensors file of a folder and prints, for each tensor, the sum of its elements over
all files: one line "name dtype sum", by name.

It reads with the package `safetensors` if this Python has it, otherwise with the standard library, by the definition
of the format. It also checks the offsets that torch.distributed.checkpoint expects.
"""

import collections
import json
import pathlib
import struct
import sys

try:
    import safetensors
except ImportError:
    safetensors = None

CODES = {"BOOL": "?", "U8": "B", "I64": "q", "F16": "e", "F32": "f", "F64": "d"}


def values_of(dtype, data):
    if dtype == "BF16":  # the upper half of a float32
        data = b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))
        dtype = "F32"
    return struct.unpack(f"<{len(data) // struct.calcsize(CODES[dtype])}{CODES[dtype]}", data)


def by_definition(content):
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + length])
    header.pop("__metadata__", None)
    data = content[8 + length:]
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        yield name, entry["shape"], entry["dtype"], data[begin:end]


def tensors_in(content):
    if safetensors is None:
        yield from by_definition(content)
        return
    for name, entry in safetensors.deserialize(content):
        yield name, entry["shape"], entry["dtype"], bytes(entry["data"])


def main(folder):
    sums = collections.defaultdict(float)
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        content = path.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        metadata = json.loads(content[8:8 + length])["__metadata__"]
        info = json.loads(metadata["DCP_SHARDING_INFO"])
        for name, shape, dtype, data in tensors_in(content):
            if len(info[name]["saved_offsets"]) != len(shape):
                sys.exit(f"{path}: the offsets of {name} have another length than its shape")
            sums[f"{name} {dtype}"] += sum(values_of(dtype, data))
    for name in sorted(sums):
        print(name, f"{sums[name]:.0f}")


if __name__ == "__main__":
    main(sys.argv[1])
