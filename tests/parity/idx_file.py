"""Reads and writes the files of MNIST, with Python's standard library alone. Run as a program, it makes a folder of
small images for tests:

    idx_file.py FOLDER [COUNT]      train and t10k, gzip'ed, of ten classes that a model can learn
"""

import gzip
import os
import random
import struct
import sys

SIDE = 28


def write(path, shape, elements):
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "wb") as file:
        file.write(struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape))
        file.write(bytes(elements))


def read(path):
    """Returns (shape, bytes) of an idx file."""
    if not os.path.exists(path):
        path += ".gz"
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rb") as file:
        content = file.read()
    num_axes = content[3]
    shape = struct.unpack(f">{num_axes}I", content[4:4 + 4 * num_axes])
    return shape, content[4 + 4 * num_axes:]


def make_images(folder, count, part="train", seed=0, wrong_labels=0.0):
    """Writes images of random classes. Each class has a picture of random blocks; an image is that picture plus noise.
    A fraction of the labels may be wrong, so that no model can reach a loss of 0."""
    rng = random.Random(1)
    pictures = [[rng.randrange(0, 200) for _ in range(49)] for _ in range(10)]
    rng = random.Random(seed)
    classes = [rng.randrange(10) for _ in range(count)]
    labels = [rng.randrange(10) if rng.random() < wrong_labels else label for label in classes]
    pixels = bytearray()
    for label in classes:
        picture = pictures[label]
        for row in range(SIDE):
            for column in range(SIDE):
                pixels.append(picture[row // 4 * 7 + column // 4] + rng.randrange(0, 56))
    os.makedirs(folder, exist_ok=True)
    write(f"{folder}/{part}-images-idx3-ubyte.gz", (count, SIDE, SIDE), pixels)
    write(f"{folder}/{part}-labels-idx1-ubyte.gz", (count,), labels)


if __name__ == "__main__":
    number = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    make_images(sys.argv[1], number)
    make_images(sys.argv[1], max(number // 5, 1), "t10k", seed=1)
