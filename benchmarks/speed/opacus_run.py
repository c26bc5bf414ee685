"""The same models in PyTorch, with Opacus; for an interpreter that has both.

    python benchmarks/speed/opacus_run.py [--rounds N] [--models NAME ...]
        [--output FILE]

A gradient is forward, backward, clip and sum, without noise, on two threads. Memory
is the peak of a process that computes nothing else. A mode that fails on a model is
recorded with its error.
"""

# pyright: basic, reportMissingImports=false
# PyTorch and Opacus are no dependencies of this project.

import argparse
import functools
import json
import pathlib
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import opacus
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.layers import DPLSTM
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

RESULTS = pathlib.Path(__file__).with_name("opacus_results.json")
BASELINE = "non-private"
L2_CLIP_NORM = 1.0
CALLS = 3

Call = Callable[[], Any]


class Problem(NamedTuple):
    """A model whose outputs are the logits of labels, and a batch."""

    name: str
    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    labels: torch.Tensor

    @property
    def batch_size(self) -> int:
        return len(self.labels)


class Block(nn.Module):
    """Causal attention and a dense part, each normalized before."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x):
        split = lambda x: x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(
            split(self.q(x)), split(self.k(x)), split(self.v(x)), is_causal=True
        )
        return self.o(mixed.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        hidden = self.up(self.norm_2(x))
        return x + self.down(nn.functional.gelu(hidden, approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, width, layers, heads, length, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        # Opacus needs the batch axis in the input of every layer.
        positions = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
        x = self.tokens(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


class GCN(nn.Module):
    def __init__(self, features, latent, classes):
        super().__init__()
        self.encoder = nn.Linear(features, latent)
        self.convolution = nn.Linear(latent, latent)
        self.decoder = nn.Linear(latent, latent)
        self.head = nn.Linear(latent, classes)

    def forward(self, x, is_valid):
        weights = is_valid / is_valid.sum(dim=1, keepdim=True)
        mean = (torch.tanh(self.encoder(x)) * weights[..., None]).sum(dim=1)
        x = torch.tanh(self.convolution(mean)) + mean
        return self.head(torch.tanh(self.decoder(x)))


class LSTM(nn.Module):
    def __init__(self, inputs, hidden, layers, classes):
        super().__init__()
        self.lstm = DPLSTM(inputs, hidden, num_layers=layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def transformer(
    batch_size, width=512, layers=4, heads=8, length=64, vocabulary=5000
) -> Problem:
    tokens = torch.randint(vocabulary, (batch_size, length + 1))
    # Opacus needs contiguous indices of embeddings.
    inputs = (tokens[:, :-1].contiguous(),)
    name = f"transformer, width {width}, {layers} layers, length {length}"
    model = Transformer(width, layers, heads, length, vocabulary)
    return Problem(name, model, inputs, tokens[:, 1:])


def mlp(batch_size, sizes=(784, 1024, 1024, 10)) -> Problem:
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return Problem(
        f"MLP {'-'.join(map(str, sizes))}",
        nn.Sequential(*layers[:-1]),
        (torch.randn(batch_size, sizes[0]),),
        torch.randint(sizes[-1], (batch_size,)),
    )


def cnn5(batch_size, channels=(32, 64, 128, 256, 10), side=32) -> Problem:
    layers = []
    for i, (inputs, outputs) in enumerate(zip((3, *channels), channels, strict=False)):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding="same" if i else "valid"))
        layers += [nn.Tanh()] if i < 4 else []
        layers += [nn.MaxPool2d(2)] if i < 3 else []
    return Problem(
        f"CNN5, {side}x{side}x3",
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        (torch.randn(batch_size, 3, side, side),),
        torch.randint(channels[-1], (batch_size,)),
    )


def gcn(num_roots=2000, rows=8, features=128, latent=255, classes=40) -> Problem:
    num_valid = torch.randint(1, rows + 1, (num_roots, 1))
    return Problem(
        f"DP-GCN, {rows} rows",
        GCN(features, latent, classes),
        (torch.randn(num_roots, rows, features), torch.arange(rows) < num_valid),
        torch.randint(classes, (num_roots,)),
    )


def lstm(
    batch_size=64, hidden=256, layers=2, length=64, inputs=256, classes=10
) -> Problem:
    return Problem(
        f"LSTM, {layers} layers of {hidden}, length {length}",
        LSTM(inputs, hidden, layers, classes),
        (torch.randn(batch_size, length, inputs),),
        torch.randint(classes, (batch_size, length)),
    )


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "transformer-64": functools.partial(transformer, 64),
    "transformer-256": functools.partial(transformer, 256),
    "mlp-256": functools.partial(mlp, 256),
    "mlp-1024": functools.partial(mlp, 1024),
    "cnn5-256": functools.partial(cnn5, 256),
    "gcn": gcn,
    "lstm-64": lstm,
}


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def non_private(problem: Problem) -> Call:
    """The gradient of the mean loss."""

    def call():
        problem.model.zero_grad()
        mean_loss(problem.model(*problem.inputs), problem.labels).backward()

    return call


def hooks(problem: Problem) -> Call:
    """Gradients of all examples from hooks, then clipped and summed."""
    model = GradSampleModule(problem.model)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters()),
        noise_multiplier=0.0,
        max_grad_norm=L2_CLIP_NORM,
        expected_batch_size=problem.batch_size,
    )

    def call():
        optimizer.zero_grad(set_to_none=True)
        mean_loss(model(*problem.inputs), problem.labels).backward()
        optimizer.clip_and_accumulate()

    return call


def ghost(problem: Problem) -> Call:
    """Norms first, then a second backward pass of the weighted losses."""
    model = GradSampleModuleFastGradientClipping(
        problem.model, max_grad_norm=L2_CLIP_NORM
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters()),
        noise_multiplier=0.0,
        max_grad_norm=L2_CLIP_NORM,
        expected_batch_size=problem.batch_size,
    )
    criterion = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss())

    def call():
        optimizer.zero_grad(set_to_none=True)
        logits = model(*problem.inputs)
        shape = logits.shape if logits.ndim == 3 else None
        labels = problem.labels.flatten()
        criterion(logits.flatten(0, -2), labels, shape=shape).backward()

    return call


MODES = {BASELINE: non_private, "hooks": hooks, "ghost": ghost}


def build(model: str, mode: str) -> Call:
    torch.manual_seed(0)
    return MODES[mode](PROBLEMS[model]())


def peak_megabytes() -> float:
    """The most memory that this process has had.

    `ru_maxrss` would not do: a process inherits it from the one that started it.
    """
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM:"))
    return float(line.split()[1]) * 1024 / 1e6


def run_case(model: str, mode: str, memory_limit: int) -> None:
    """Runs one case in this process and prints its memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_limit, memory_limit))
    call = build(model, mode)
    for _ in range(CALLS):
        call()
    print(f"{peak_megabytes():.1f}")


def try_case(model: str, mode: str, memory_limit: int) -> dict[str, Any]:
    """The memory of one case in a process of its own, or its error."""
    command = [sys.executable, __file__, "--case", model, mode]
    command += ["--memory-limit", str(memory_limit / 2**30)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode == 0:
        return {"resident_megabytes": float(process.stdout)}
    last_line = process.stderr.strip().split("\n")[-1]
    return {"error": last_line or f"exit status {process.returncode}"}


def interleaved_times(calls: dict[str, Call], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each call, shape (rounds,), after two warm rounds."""
    times = {name: [] for name in calls}
    for _ in range(rounds + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: np.array(t[2:]) for name, t in times.items()}


def quartiles(values: np.ndarray) -> dict[str, float]:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(median), "q1": float(low), "q3": float(high)}


def measure_model(model: str, rounds: int, memory_limit: int) -> dict[str, Any]:
    """Memory of all modes, and times of those that work."""
    results = {mode: try_case(model, mode, memory_limit) for mode in MODES}
    calls = {mode: build(model, mode) for mode in MODES if "error" not in results[mode]}
    times = interleaved_times(calls, rounds)
    for mode, seconds in times.items():
        results[mode]["milliseconds"] = quartiles(1e3 * seconds)
        results[mode]["time_ratio"] = quartiles(seconds / times[BASELINE])
    problem = PROBLEMS[model]()
    return {
        "model": problem.name,
        "batch_size": problem.batch_size,
        "num_params": sum(p.numel() for p in problem.model.parameters()),
        "gradients": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--models", nargs="+", choices=PROBLEMS, default=[*PROBLEMS])
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-limit", type=float, default=12, help="in GiB")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    memory_limit = int(args.memory_limit * 2**30)
    if args.case:
        model, mode = args.case
        run_case(model, mode, memory_limit)
        return
    results = {
        "command": " ".join(["python", *sys.argv]),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "opacus": opacus.__version__,
            "threads": args.threads,
        },
        "models": {},
    }
    for model in args.models:
        results["models"][model] = measure_model(model, args.rounds, memory_limit)
        args.output.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{model}: done", file=sys.stderr)


if __name__ == "__main__":
    main()
