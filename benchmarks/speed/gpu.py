"""The cost of privacy on an accelerator, within a few minutes of its time.

    python -m benchmarks.speed.gpu [--seconds N] [--commit NAME] [--output FILE]
    python -m benchmarks.speed.gpu --table          # of what is on record
    python -m benchmarks.speed.gpu --small          # a trial, on a processor too

Of each model: the gradient against the ordinary one, or a whole step (clip, noise,
DP-AdamBC) against the ordinary gradient with `optax.adam`; and JAX-Privacy, with the
largest microbatches that fit. The programs of a row are compiled, warm, and interleaved
in one process; ratios are medians within a round. Rows are written as they come, the
most important first, until the seconds are spent. Of a row that was measured twice the
table has the later one.
"""

import argparse
import functools
import importlib.metadata
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.speed import contenders, models, run, timing
from dpadambc.clipping import memory

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")
PEERS = RESULTS.with_name("gpu_peers.jsonl")  # until they are measured here
BY_OTHERS = ", other libraries"  # after the name of a row
ROUNDS = 10
RANK = 8  # of the low-rank updates
MICROBATCH_SIZE = 8
LONGEST = 45.0  # seconds that a row may take

SIZES: Mapping[str, dict[str, Any]] = {
    "decoder": dict(
        batch_size=32, width=768, layers=12, heads=12, length=256, vocabulary=32_000
    ),
    "encoder": dict(batch_size=512, length=64),
    "cnn5": dict(batch_size=2_048),
    "resnet18": dict(batch_size=512),
    "unet": dict(batch_size=256),
}
SMALL: Mapping[str, dict[str, Any]] = {
    "decoder": dict(
        batch_size=2, width=48, layers=2, heads=4, length=16, vocabulary=99
    ),
    "encoder": dict(batch_size=4, length=8, width=48, layers=1, vocabulary=99),
    "cnn5": dict(batch_size=4),
    "resnet18": dict(batch_size=2, widths=(8, 16), side=8),
    "unet": dict(batch_size=2, widths=(8, 16), side=8),
}


def cast(problem: models.Problem, dtype: Any) -> models.Problem:
    """Parameters and inputs in another precision."""
    real = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    to = lambda tree: jax.tree.map(lambda x: x.astype(dtype) if real(x) else x, tree)
    return problem._replace(params=to(problem.params), batch=to(problem.batch))


def without_types(problem: models.Problem) -> models.Problem:
    """An encoder whose two types of tokens are not trained.

    In bfloat16 XLA adds up their gradient, without privacy, ten times as long as it
    takes for all of the rest.
    """
    types = problem.params["types"]
    rest = {name: x for name, x in problem.params.items() if name != "types"}
    loss_fn = lambda params, *x: problem.loss_fn({**params, "types": types}, *x)
    return problem._replace(params=rest, loss_fn=loss_fn, batch_loss=loss_fn)


def gradients(
    problem: models.Problem, microbatch_size: int | None = None
) -> timing.Cases:
    args = (problem.params, *problem.arguments)
    return {
        "ordinary": (contenders.non_private(problem), args),
        "private": (contenders.private(problem, microbatch_size), args),
    }


def beside_vmap(problem: models.Problem) -> timing.Cases:
    """Also by all gradients at once, which take less memory in some convolutions."""
    args = (problem.params, *problem.arguments)
    return {**gradients(problem), "vmap": (contenders.vmapped(problem), args)}


def by_jax_privacy(problem: models.Problem) -> timing.Cases:
    """Its gradient, in the largest microbatches that fit, by halves of the batch."""
    limit = memory.stated_bytes() or np.inf
    args = (problem.params, *problem.arguments)
    size = problem.batch_size
    while size > 1:
        grad_fn = contenders.jax_privacy(problem, size)
        compiled = jax.jit(grad_fn).lower(*args).compile()
        if timing.peak_bytes(compiled) <= limit:
            break
        size //= 2
    return {
        "ordinary": (contenders.non_private(problem), args),
        f"jax_privacy, microbatches of {size}": (
            contenders.jax_privacy(problem, size),
            args,
        ),
    }


def low_rank(problem: models.Problem) -> models.Problem:
    """Updates of q and v of an encoder, and its head; all else is frozen."""
    frozen, rng = problem.params, np.random.default_rng(0)
    dtype = frozen["tokens"].dtype

    def update(kernel):
        rows, columns = kernel.shape
        a, b = ((rows, RANK), (RANK, columns))
        draw = lambda shape: jnp.asarray(rng.normal(scale=0.02, size=shape), dtype)
        return {"a": draw(a), "b": draw(b)}

    blocks = [
        {name: update(block[name]["kernel"]) for name in "qv"}
        for block in frozen["blocks"]
    ]
    params = {"blocks": blocks, "head": frozen["head"]}

    def loss_fn(params, frozen, *example):
        blocks = [
            {**block, **{name: {**block[name], **updates[name]} for name in updates}}
            for updates, block in zip(params["blocks"], frozen["blocks"], strict=True)
        ]
        return problem.loss_fn(
            {**frozen, "blocks": blocks, "head": params["head"]}, *example
        )

    return problem._replace(
        loss_fn=loss_fn, batch_loss=loss_fn, params=params, frozen=(frozen,)
    )


def steps(problem: models.Problem) -> timing.Cases:
    cases = run.step_cases(problem)
    return {"ordinary": cases[run.ADAM], "private": cases["private"]}


def after_the_gradient(problem: models.Problem) -> timing.Cases:
    """Adam, and what takes its place: noise and DP-AdamBC; and the noise alone."""
    cases = run.chain_cases(problem)
    names = {"ordinary": run.ADAM, "private": "noise and DP-AdamBC", "noise": "noise"}
    return {name: cases[case] for name, case in names.items()}


def rows(sizes: Mapping[str, dict[str, Any]]) -> dict[str, Callable[[], timing.Cases]]:
    """What is measured, the most important first."""
    decoder = lambda **options: models.decoder(**sizes["decoder"], **options)
    plain = functools.cache(lambda: decoder(rematerialized=False))
    encoder = functools.cache(lambda: models.encoder(**sizes["encoder"]))
    cnn5 = functools.cache(lambda: models.cnn5(**sizes["cnn5"]))
    half = lambda problem: cast(problem, jnp.bfloat16)
    return {
        "decoder, float32": lambda: gradients(plain()),
        "decoder, bfloat16": lambda: gradients(half(plain())),
        "encoder, float32": lambda: gradients(encoder()),
        "encoder without types, bfloat16": lambda: gradients(
            without_types(half(encoder()))
        ),
        "CNN5, float32": lambda: gradients(cnn5()),
        "ResNet-18, float32": lambda: beside_vmap(models.resnet18(**sizes["resnet18"])),
        "U-Net, float32": lambda: beside_vmap(models.unet(**sizes["unet"])),
        "step of the decoder, float32": lambda: steps(plain()),
        "step of CNN5, float32": lambda: steps(cnn5()),
        "step of the encoder, float32": lambda: steps(encoder()),
        "low-rank updates of the encoder, float32": lambda: gradients(
            low_rank(encoder())
        ),
        "step of low-rank updates of the encoder, float32": lambda: steps(
            low_rank(encoder())
        ),
        f"decoder, remat, microbatches of {MICROBATCH_SIZE}, float32": lambda: (
            gradients(decoder(), MICROBATCH_SIZE)
        ),
        "after the gradient of the decoder, float32": lambda: after_the_gradient(
            plain()
        ),
        f"CNN5, float32{BY_OTHERS}": lambda: by_jax_privacy(cnn5()),
        f"encoder, float32{BY_OTHERS}": lambda: by_jax_privacy(encoder()),
    }


def measure(label: str, cases: timing.Cases) -> list[dict[str, Any]]:
    compiled, about = {}, {}
    for name, (fun, args) in cases.items():
        started = time.perf_counter()
        lowered = jax.jit(fun).lower(*args)
        traced = time.perf_counter()
        compiled[name] = lowered.compile()
        about[name] = {
            "trace_seconds": round(traced - started, 1),
            "compile_seconds": round(time.perf_counter() - traced, 1),
            "peak_megabytes": round(timing.peak_bytes(compiled[name]) / 1e6),
        }
    times = timing.interleaved_times(cases, compiled, ROUNDS)
    found = []
    for name, seconds in times.items():
        ratio = timing.quartiles(seconds / times["ordinary"][: len(seconds)])
        found.append(
            {
                "row": label,
                "case": name,
                "milliseconds": round(1e3 * float(np.median(seconds)), 3),
                "ratio": {key: round(value, 3) for key, value in ratio.items()},
                **about[name],
            }
        )
    return found


def about(commit: str) -> dict[str, Any]:
    packages = ("jax", "jaxlib", "optax", "numpy", "jax-privacy")
    found = {x: [*importlib.metadata.distributions(name=x)] for x in packages}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": jax.devices()[0].device_kind,
        "commit": commit,
        "rounds": ROUNDS,
        **{name: each[0].version for name, each in found.items() if each},
    }


Records = dict[str, dict[str, dict[str, Any]]]  # by row and case


def records(lines: Iterable[dict[str, Any]]) -> Records:
    """What is on record, with the device, the later where a row was measured twice."""
    found, device = {}, None
    for line in lines:
        device = line.get("device", device)
        if "case" in line:
            found.setdefault(line["row"], {})[line["case"]] = line | {"device": device}
    return found


def load(*files: pathlib.Path) -> Records:
    return records(
        json.loads(x) for file in files for x in file.read_text().splitlines()
    )


def memory_ratio(case: dict[str, Any], ordinary: dict[str, Any]) -> float | None:
    if "peak_megabytes" not in case or "peak_megabytes" not in ordinary:
        return None
    return case["peak_megabytes"] / ordinary["peak_megabytes"]


def table(found: Records) -> str:
    """One line for each program but the ordinary ones."""
    body = []
    for row, cases in found.items():
        ordinary = cases["ordinary"]
        for name, case in cases.items():
            if name == "ordinary":
                continue
            ratio = memory_ratio(case, ordinary)
            compiled = [str(x.get("compile_seconds", "-")) for x in (ordinary, case)]
            cells = (
                row + ("" if name == "private" else f": {name}"),
                f"{ordinary['milliseconds']:.1f}",
                f"{case['ratio']['median']:.2f}",
                "-" if ratio is None else f"{ratio:.2f}",
                ", ".join(compiled),
            )
            body.append(f"| {' | '.join(cells)} |")
    head = "| gradient or step | ordinary, ms | ratio | memory | compile s |"
    return "\n".join([head, "| --- | ---: | ---: | ---: | ---: |", *body])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--commit", default="not told")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--small", action="store_true", help="writes no file")
    parser.add_argument("--table", action="store_true", help="measures nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(load(arguments.output, PEERS)))
        return
    end = time.monotonic() + arguments.seconds
    least, sizes = (0.0, SMALL) if arguments.small else (LONGEST, SIZES)
    lines = []
    output = os.devnull if arguments.small else arguments.output
    with open(output, "a") as file:

        def write(line):
            print(json.dumps(line), file=file, flush=True)
            print(json.dumps(line), flush=True)
            lines.append(line)

        write(about(arguments.commit))
        for label, make in rows(sizes).items():
            if time.monotonic() > end - least:
                write({"row": label, "left out": "no time"})
                continue
            try:
                cases = make()
            except ImportError as error:
                write({"row": label, "left out": str(error)})
                continue
            for line in measure(label, cases):
                write(line)
    print(table(records(lines)))


if __name__ == "__main__":
    main()
