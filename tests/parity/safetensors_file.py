"""Writes tensors in the safetensors format by hand, so that no package is needed."""

import ctypes
import json
import struct

import torch

DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


def write(path, tensors):
    """Writes the tensors to the file; `tensors` maps names to dense CPU tensors."""
    header, data, offset = {}, [], 0
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        num_bytes = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + num_bytes]}
        data.append(ctypes.string_at(tensor.data_ptr(), num_bytes))
        offset += num_bytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data))
