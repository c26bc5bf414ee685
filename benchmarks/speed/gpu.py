"""The cost of privacy on an accelerator, within a few minutes of its time.

    python -m benchmarks.speed.gpu [--seconds N] [--commit NAME] [--output FILE]
    python -m benchmarks.speed.gpu --table          # of what is on record
    python -m benchmarks.speed.gpu --small          # a trial, on a processor too

Of each model: the gradient against the ordinary one, or a whole step (clip, noise,
DP-AdamBC) against the ordinary gradient with `optax.adam`. The programs of a row are
compiled, warm, and interleaved in one process; ratios are medians within a round. Rows
are written as they come, the most important first, until the seconds are spent.
"""

import argparse
import functools
import importlib.metadata
import json
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpadambc
from benchmarks.speed import contenders, models, run, timing

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")
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
}
SMALL: Mapping[str, dict[str, Any]] = {
    "decoder": dict(
        batch_size=2, width=48, layers=2, heads=4, length=16, vocabulary=99
    ),
    "encoder": dict(batch_size=4, length=8, width=48, layers=1, vocabulary=99),
    "cnn5": dict(batch_size=4),
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
    args = (problem.params, *problem.batch)
    return {
        "ordinary": (contenders.non_private(problem), args),
        "private": (contenders.private(problem, microbatch_size), args),
    }


def low_rank(problem: models.Problem) -> timing.Cases:
    """The gradient of updates of q and v of an encoder, and of its head."""
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

    grad_fn = dpadambc.clipped_grad(
        loss_fn,
        l2_clip_norm=contenders.L2_CLIP_NORM,
        normalize_by=problem.batch_size,
        batch_argnums=tuple(range(2, 2 + len(problem.batch))),
    )
    args = (params, frozen, *problem.batch)
    private = lambda *args: dpadambc.materialize(grad_fn(*args))
    return {"ordinary": (jax.grad(loss_fn), args), "private": (private, args)}


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
        "step of the decoder, float32": lambda: steps(plain()),
        "step of CNN5, float32": lambda: steps(cnn5()),
        "low-rank updates of the encoder, float32": lambda: low_rank(encoder()),
        f"decoder, remat, microbatches of {MICROBATCH_SIZE}, float32": lambda: (
            gradients(decoder(), MICROBATCH_SIZE)
        ),
        "after the gradient of the decoder, float32": lambda: after_the_gradient(
            plain()
        ),
        "step of the encoder, float32": lambda: steps(encoder()),
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
    packages = ("jax", "jaxlib", "optax", "numpy")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": jax.devices()[0].device_kind,
        "commit": commit,
        "rounds": ROUNDS,
        **{name: importlib.metadata.version(name) for name in packages},
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Of what is on record, one line for each private program."""
    head = "| gradient or step | ordinary, ms | ratio | memory | compile s |"
    ordinary = {
        x["row"]: x for x in lines if "row" in x and x.get("case") == "ordinary"
    }
    body = []
    for line in lines:
        if line.get("case") in (None, "ordinary"):
            continue
        base = ordinary[line["row"]]
        memory = line["peak_megabytes"] / base["peak_megabytes"]
        name = line["row"] + ("" if line["case"] == "private" else f": {line['case']}")
        body.append(
            f"| {name} | {base['milliseconds']:.1f} | {line['ratio']['median']:.2f}"
            f" | {memory:.2f} | {base['compile_seconds']}, {line['compile_seconds']} |"
        )
    return "\n".join([head, "|---|---|---|---|---|", *body])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--commit", default="not told")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--table", action="store_true", help="measures nothing")
    arguments = parser.parse_args()
    if not arguments.table:
        end = time.monotonic() + arguments.seconds
        with arguments.output.open("w") as file:

            def write(line):
                print(json.dumps(line), file=file, flush=True)
                print(json.dumps(line), flush=True)

            write(about(arguments.commit))
            for label, make in rows(SMALL if arguments.small else SIZES).items():
                if time.monotonic() > end - (0 if arguments.small else LONGEST):
                    write({"row": label, "left out": "no time"})
                    continue
                for line in measure(label, make()):
                    write(line)
    lines = arguments.output.read_text().splitlines()
    print(table([json.loads(line) for line in lines]))


if __name__ == "__main__":
    main()
