"""The trainer's models, data order and training loop in plain PyTorch, with which the trainer is compared. This code is
independent of Cadre, except for the names of parameters."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import idx_file

END_OF_TEXT = 256
VOCABULARY = 257


class Block(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.attn_c_attn = nn.Linear(width, 3 * width)
        self.attn_c_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp_c_fc = nn.Linear(width, 4 * width)
        self.mlp_c_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        size, length, width = x.shape
        query, key, value = (part.view(size, length, self.heads, -1).transpose(1, 2)
                             for part in self.attn_c_attn(self.ln_1(x)).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attn_c_proj(mixed.transpose(1, 2).reshape(size, length, width))
        return x + self.mlp_c_proj(F.gelu(self.mlp_c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, heads, width, context):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Embedding(context, width)
        for i in range(layers):
            self.add_module(f"h_{i}", Block(heads, width))
        self.ln_f = nn.LayerNorm(width)
        self.layers = layers
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for i in range(self.layers):
            x = getattr(self, f"h_{i}")(x)
        return F.linear(self.ln_f(x), self.wte.weight)

    @staticmethod
    def loss(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())


class MnistCnn(nn.Module):
    """The network of PyTorch's basic MNIST example."""

    def __init__(self, dropout=True):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25 if dropout else 0.0)
        self.dropout2 = nn.Dropout(0.5 if dropout else 0.0)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)

    @staticmethod
    def loss(output, target):
        return F.nll_loss(output, target)


class WindowMlp(nn.Module):
    """A perceptron over the last `window` tokens, with zeros before the first token."""

    def __init__(self, layers, width, window):
        super().__init__()
        self.window = window
        self.embedding = nn.Embedding(VOCABULARY, width)
        for i in range(layers):
            self.add_module(f"hidden_{i}", nn.Linear(window * width if i == 0 else width, width))
        self.head = nn.Linear(width, VOCABULARY)
        self.layers = layers

    def forward(self, tokens):
        embedded = self.embedding(tokens)
        length = tokens.shape[1]
        x = torch.cat([F.pad(embedded, (0, 0, back, 0))[:, :length]
                       for back in reversed(range(self.window))], dim=2)
        # The trainer's model orders its input by features, and for each feature the tokens of the
        # window.
        x = x.view(*x.shape[:2], self.window, -1).transpose(2, 3).flatten(2)
        for i in range(self.layers):
            x = F.gelu(getattr(self, f"hidden_{i}")(x))
        return self.head(x)

    loss = staticmethod(Gpt.loss)


class ImageMlp(nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        for i in range(layers):
            self.add_module(f"hidden_{i}", nn.Linear(784 if i == 0 else width, width))
        self.head = nn.Linear(width, 10)
        self.layers = layers

    def forward(self, x):
        x = x.flatten(1)
        for i in range(self.layers):
            x = F.relu(getattr(self, f"hidden_{i}")(x))
        return F.log_softmax(self.head(x), dim=1)

    loss = staticmethod(MnistCnn.loss)


def text_samples(path, context, held_out, num_evaluated):
    """Returns (data, target) of the training samples, then those of the held-out samples. Samples are consecutive,
    without overlap."""
    tokens = torch.tensor(list(open(path, "rb").read()) + [END_OF_TEXT])
    cut = len(tokens) - int(len(tokens) * held_out)
    return *cut_samples(tokens[:cut], context), *cut_samples(tokens[cut:cut + num_evaluated], context)


def cut_samples(tokens, context):
    count = (len(tokens) - 1) // context
    rows = torch.stack([tokens[i * context:i * context + context + 1] for i in range(count)])
    return rows[:, :-1], rows[:, 1:]


def images(folder, part):
    """Returns (data, target) of all images, scaled as torchvision's ToTensor and Normalize do."""
    shape, pixels = idx_file.read(f"{folder}/{part}-images-idx3-ubyte")
    _, labels = idx_file.read(f"{folder}/{part}-labels-idx1-ubyte")
    data = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(shape[0], 1, *shape[1:])
    target = torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()
    return data.float().div(255).sub(0.1307).div(0.3081), target


def batches(num_samples, batch_size, seed, rank=0, world_size=1):
    """Yields for each step the indices of this rank's share, in the order of DistributedSampler. Never ends: each
    epoch is shuffled anew, and its last batch is skipped if it is short."""
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(num_samples, generator=generator)
        for begin in range(0, num_samples - batch_size + 1, batch_size):
            yield order[begin + rank:begin + batch_size:world_size]
        epoch += 1


def make_optimizer(model, kind, options, sharded=None):
    """Makes the optimizer. Weight decay applies to matrices only; a fused step does not accept a mixture of DTensors
    and tensors. With `sharded` it is a ZeroRedundancyOptimizer."""
    options = dict(options)
    decay = options.pop("weight_decay", 0.0)
    groups = {}
    for parameter in model.parameters():
        groups.setdefault((parameter.dim() >= 2, isinstance(parameter, DTensor)), []).append(parameter)
    groups = [{"params": parameters, "weight_decay": decay if is_matrix else 0.0}
              for (is_matrix, _), parameters in groups.items()]
    if sharded:
        return sharded(groups, getattr(torch.optim, kind), **options)
    return getattr(torch.optim, kind)(groups, **options)
