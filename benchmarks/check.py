"""Recomputes the figures of the first screens from the records, with their sentences.

    python -m benchmarks.check

Each claim is a sentence with places for its figures, and the page that states it. The
command makes the sentence from the records, and fails where the page lacks it. The
tables of the studies are compared too, as by `python -m benchmarks.pages --check`.
"""

import collections
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from benchmarks import pages, rates, records
from benchmarks.cifar10 import published
from benchmarks.language import sst2 as finetuned
from benchmarks.methods import run as methods
from benchmarks.speed import gpu

ROOT = pathlib.Path(__file__).parents[1]
README, OPTIMIZERS = "README.md", "docs/guides/optimizers.md"
CIFAR10 = "benchmarks/cifar10/README.md"
SMOLLM = "benchmarks/language/smollm/README.md"
RECIPE = "AUTO-S, DP-Adam"
Seeds = Mapping[int, float]  # what was measured, by seed


def signed(x: float, digits: int = 2) -> str:
    """With a sign, the minus of prose, and none for zero."""
    text = f"{x:+.{digits}f}".replace("-", "−")
    return text if text.strip("+−0.") else text[1:]


def paired(ours: Seeds, theirs: Seeds) -> str:
    """The mean difference in points, and its standard error over pairs of a seed."""
    points = [100 * (ours[seed] - theirs[seed]) for seed in ours.keys() & theirs.keys()]
    return f"{signed(fmean(points))} ({stdev(points) / len(points) ** 0.5:.2f})"


def rows(name: str) -> list[records.Row]:
    return records.read(ROOT / "benchmarks" / name)


def grouped(found: Iterator[tuple[Any, int, float]]) -> dict[Any, dict[int, float]]:
    groups: dict[Any, dict[int, float]] = collections.defaultdict(dict)
    for key, seed, value in found:
        groups[key][seed] = value
    return groups


@functools.cache
def trials() -> methods.Scores:
    """Test accuracies of the equal trials."""
    return methods.scores(rows("methods/results.jsonl"))


def equal_trials(task: str, epsilon: float, method: str, other: str) -> str:
    of_block = trials()[task, epsilon]
    return paired(*(dict(enumerate(of_block[name])) for name in (method, other)))


def in_the_mean(method: str, other: str, digits: int = 2) -> tuple[str, str]:
    """The mean difference over all blocks, and p where a task counts once."""
    points, test = methods.compared_by_task(trials(), method, other)
    return signed(fmean(points), digits), f"{test.pvalue:.2f}"


def published_rates() -> dict[str, dict[float, float]]:
    """Test accuracy in percent of the run whose settings are printed, by rate."""
    known = records.read(published.RESULTS)
    return {
        name: {
            x.learning_rate: 100 * published.trained(known, x)[0]["accuracy"]
            for x in settings
        }
        for name, settings in published.VARIED.items()
    }


@functools.cache
def probe(name: str) -> dict[Any, dict[int, float]]:
    """Test accuracies of a linear probe, by method and epsilon."""
    found = (row for row in rows(name) if row["what"] == "probe")
    key = lambda row: (row["method"], row["target_epsilon"])
    return grouped((key(row), row["seed"], row["accuracy"]) for row in found)


def best_on_validation(name: str, epsilon: float) -> str:
    """Its test accuracy in percent: that of the method with the best trial."""
    found = [row for row in rows(name) if row["what"] == "trial of the probe"]
    there = [row for row in found if row["target_epsilon"] == epsilon]
    best = max(there, key=lambda row: row["accuracy"])
    return f"{100 * fmean(probe(name)[best['method'], epsilon].values()):.1f}"


@functools.cache
def graph(name: str, which: str) -> dict[Any, dict[int, float]]:
    """Test accuracies with neighbors of the last iterate, or of the mean."""
    found = (
        row for row in rows(name) if "test" in row["accuracy"].get("inductive", {})
    )

    def key(row):
        s = row["setting"]
        numbers = s["target_epsilon"], s["expected_batch_size"], s["learning_rate"]
        return s["method"], *numbers, s["max_memberships"]

    value = lambda row: row[which]["inductive"]["test"]
    return grouped((key(row), row["seed"], value(row)) for row in found)


# BLEU of LoRA in GPT-2, by Li et al.
PUBLISHED = {3.0: 58.2, 8.0: 63.4}
LAST, MEAN = "accuracy", "averaged_accuracy"
ARXIV = "ogbn_arxiv_gcn/results.jsonl"
# The settings of the tables: batch and learning rate.
ADAM_BC = 10_000, 0.0062
ADAM = {
    1.0: (2500, 0.014),
    3.0: (2500, 0.014),
    6.0: (2500, 0.014),
    12.0: (5000, 0.0034),
}
AUTO_S = ADAM | {12.0: (10_000, 0.021)}


def on_graph(which: str, epsilon: float, method: str) -> Seeds:
    of = {"DP-Adam": ADAM, RECIPE: AUTO_S}
    size, rate = of[method][epsilon] if method in of else ADAM_BC
    return graph(ARXIV, which)[method, epsilon, size, rate, 1]


def less_control(which: str, epsilon: float, rate: float) -> str:
    control = graph("ogbn_arxiv_gcn/control.jsonl", which)
    theirs = control["DP-AdamBC", epsilon, 10_000, rate, 1]
    return paired(on_graph(which, epsilon, "DP-AdamBC"), theirs)


def bleu(epsilon: float | None, epochs: float) -> str:
    """Of SmolLM2 by a beam, with the larger learning rate."""
    found = rows("language/smollm/e2e.jsonl")
    asked = epsilon, epochs
    of = lambda row: (row["setting"]["target_epsilon"], row["setting"]["epochs"])
    there = [row for row in found if of(row) == asked]
    best = max(there, key=lambda row: row["setting"]["learning_rate"])
    return f"{best['beam']['bleu']:.1f}"


def sst2(way: str, epsilon: float | None, method: str) -> Seeds:
    """Test accuracies at the rate of the best trial."""
    get = rates.reader(rows("language/sst2.jsonl"), finetuned.identity)
    tasks = finetuned.plan(way).results(get, [method])
    asked = [task for task in tasks if task[0].target_epsilon == epsilon]
    found = {seed: get(setting, seed, split) for setting, seed, split in asked}
    return {seed: row["accuracy"] for seed, row in found.items() if row}


def on_gpu(row: str, case: str = "private") -> tuple[float, float | None]:
    """Time and memory over an ordinary gradient, of the later measurement."""
    cases = gpu.load(gpu.RESULTS, gpu.PEERS)[row]
    memory = gpu.memory_ratio(cases[case], cases["ordinary"])
    return cases[case]["ratio"]["median"], memory


EPSILONS = 1.0, 3.0, 8.0
SCATTERED, PRETRAINED = "cifar10/scattered.jsonl", "cifar10/pretrained.jsonl"
SST2 = "language/probe.jsonl"


def listed(figures: Callable[[float], str], epsilons: Sequence[float]) -> str:
    return ", ".join(map(figures, epsilons))


def of_the_optimizers() -> Iterator[tuple[str, str]]:
    """The recipe, the correction and its control, on tasks of examples."""
    level = in_the_mean(RECIPE, "DP-Adam")
    yield README, "an ordinary clip ({} points, p = {})".format(*level)
    yield OPTIMIZERS, f"with DP-Adam: {level[0]} points on average over"
    yield OPTIMIZERS, f"16 blocks (p = {level[1]}, counting"
    gain = in_the_mean("DP-AdamBC", "DP-Adam", 1)
    yield README, f"gains {gain[0][1:]} points over DP-Adam (p = {gain[1]})"
    for task in dict.fromkeys(task for task, _ in trials()):
        of = lambda e, t=task: equal_trials(t, e, "DP-AdamBC", "DP-Adam")
        cells = listed(of, (0.5, *EPSILONS))
        yield OPTIMIZERS, f"equal trials | 0.5, 1, 3, 8 | {cells}"
    gain = equal_trials("digits", 0.5, "DP-AdamBC", "floor alone")
    yield OPTIMIZERS, f"and {gain[1:]} on digits at ε 0.5"
    ours, theirs = (published_rates()[x] for x in ("DP-AdamBC", "DP-Adam"))
    printed = ours[1e-3] - theirs[1e-3]
    behind = max(theirs.values()) - max(ours.values())
    words = f"gains {printed:.1f} at the printed rate, and loses {behind:.1f} with each"
    yield README, words
    words = f"correction gains {printed:.1f} points (3.9 in the paper)."
    yield CIFAR10, f"{words} At the best rate of each optimizer it loses {behind:.1f}"
    for name in (SCATTERED, PRETRAINED, SST2):
        found = probe(name)
        for method in ("DP-AdamBC", RECIPE):
            of = lambda e, f=found, m=method: paired(f[m, e], f["DP-Adam", e])
            yield OPTIMIZERS, f"| 1, 3, 8 | {listed(of, EPSILONS)}"


def of_the_graph() -> Iterator[tuple[str, str]]:
    """The same on nodes, and on sentences by a last block."""
    for which, label in ((LAST, "last iterate"), (MEAN, "means of iterates")):
        both = "DP-AdamBC", "DP-Adam"
        of = lambda e, w=which, b=both: paired(*(on_graph(w, e, m) for m in b))
        yield OPTIMIZERS, f"{label} | 1, 3, 6, 12 | {listed(of, tuple(ADAM))}"
    of = lambda e: paired(on_graph(LAST, e, RECIPE), on_graph(LAST, e, "DP-Adam"))
    yield OPTIMIZERS, f"| 1, 3, 6, 12 | {listed(of, tuple(ADAM))} |"
    equal = paired(on_graph(MEAN, 12.0, "DP-AdamBC"), on_graph(MEAN, 12.0, RECIPE))
    yield OPTIMIZERS, f"is level with AUTO-S: {equal} by the mean"
    by_epsilon = {3.0: 0.0062, 12.0: 0.0124}
    for which, words in (
        (LAST, "{} and {} at ε 3 and 12 by the last iterate"),
        (MEAN, "and {} and {} by the mean"),
    ):
        found = (less_control(which, *rate) for rate in by_epsilon.items())
        yield OPTIMIZERS, words.format(*found)
    for way in ("last block", "new last block"):
        pair = lambda e, w=way: [sst2(w, e, m) for m in ("DP-AdamBC", "DP-Adam")]
        of = lambda e, p=pair: paired(*p(e))
        yield OPTIMIZERS, f"| 1, 3, 8 | {listed(of, EPSILONS)}"


def of_the_results() -> Iterator[tuple[str, str]]:
    """Accuracies, BLEU, time and memory."""
    for name, label in (
        (SCATTERED, "CIFAR-10, other images synthetic"),
        (PRETRAINED, "CIFAR-10, linear model on ImageNet's features"),
    ):
        without = [r for r in rows(name) if r["what"] == "without privacy"]
        cells = [best_on_validation(name, e) for e in EPSILONS]
        cells.append(f"{100 * without[0]['accuracy']:.1f}")
        yield README, f"| {label} | {' | '.join(cells)} |"
    of = [sst2("LoRA", e, "DP-AdamW") for e in EPSILONS]
    of.append(sst2("LoRA", None, "AdamW, not private"))
    cells = [f"{100 * fmean(seeds.values()):.1f}" for seeds in of]
    yield README, f"error 1.2) | {' | '.join(cells)} |"
    short, long = {e: bleu(e, 1) for e in PUBLISHED}, bleu(8.0, 3)
    yield SMOLLM, f"| here, one epoch | {short[3.0]} | {short[8.0]} |"
    yield SMOLLM, f"| here, three epochs | - | {long} |"
    without = bleu(None, 3)
    cells = f"| {short[3.0]}, one epoch | {long} | {without} |"
    yield "benchmarks/README.md", cells
    cost = f"{float(without) - float(long):.1f}"
    yield SMOLLM, f"has {without}: privacy costs {cost}."
    below = f"{PUBLISHED[8.0] - float(long):.1f} below the published LoRA"
    yield SMOLLM, f"three epochs have {long} BLEU by a beam of five**, {below}"
    below = f"{PUBLISHED[3.0] - float(short[3.0]):.1f} below"
    yield SMOLLM, f"ε 3 one epoch has {short[3.0]}**, {below}"
    ours = "{:.2f} ({:.2f})".format(*on_gpu("encoder, float32"))
    others = "encoder, float32, other libraries", "jax_privacy, microbatches of 8"
    theirs = "{:.1f} ({:.2f}), microbatches of 8".format(*on_gpu(*others))
    modes = (("encoder, float32, PyTorch", f"Opacus, {x}") for x in ("hooks", "ghost"))
    opacus = "{:.1f}, ghost clipping {:.1f}".format(*(on_gpu(*x)[0] for x in modes))
    for page in (README, "docs/index.md"):
        yield page, f"| {ours} | {theirs} | not measured | {opacus} |"


def claims() -> Iterator[tuple[str, str]]:
    """Pages, and the sentences that they have to have."""
    yield from of_the_optimizers()
    yield from of_the_graph()
    yield from of_the_results()


def plain(text: str) -> str:
    return " ".join(text.split())


def is_there(page: str, words: str) -> bool:
    return plain(words) in plain((ROOT / page).read_text())


def main() -> None:
    made = list(claims())
    wrong = [claim for claim in made if not is_there(*claim)]
    for page, words in wrong:
        print(f"{page} lacks: {words}")
    for path, _ in pages.differing():
        print(f"{path.relative_to(ROOT)} has a table that the records do not make")
        wrong.append((str(path), ""))
    print(f"{len(made) - len(wrong)} sentences are as the records have them")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
