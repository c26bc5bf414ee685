r"""Private aggregation: noise on the sums over neighbors, once, and not on gradients.

    python -m benchmarks.ogbn_arxiv_gcn.aggregation [--data-dir DIR]

After GAP (`Sajadmanesh et al. 2023 <https://arxiv.org/abs/2203.00949>`_), for nodes: an
encoder is trained on nodes alone, its rows of length one are summed over neighbors, and
a classifier is trained on a node's own row and the rows it receives. Each is a sum of
one clipped term for each node, of length C, sqrt(K) and C; README.md has the proof.
Prediction reads exact sums, as in the other studies, and is *not private*; the table
also has prediction from sums with noise.
"""

import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import dp_accounting
import flax.linen as nn
import jax
import numpy as np
import optax

import dpadambc
from benchmarks import experiment
from benchmarks.ogbn_arxiv_gcn import data, laboratory, model, run, settings
from benchmarks.records import Row
from benchmarks.study import Cell, Find
from benchmarks.tables import markdown
from dpadambc import accounting, graphs, training

RESULTS = pathlib.Path(__file__).with_name("aggregation.jsonl")
METHOD = "DP-Adam"
TARGET_DELTA = settings.Setting.target_delta

# Of the encoder's setting, for all epsilons: a step of it takes 2,500 nodes.
EPSILON_OF_SETTING = 3.0

DRAWN = {
    # What encoder and sums would cost alone, in parts of the epsilon of all three.
    "shares": ((0.5, 0.5), (0.7, 0.4), (0.4, 0.7)),
    "max_memberships": (2, 4, 8, 16),
    "num_hops": (1, 2),
    "encoding": ("probabilities", "logits"),
}
LEARNING_RATES = (3e-3, 1e-1)  # of the classifier
CLASSIFIER_BATCH_SIZE = 2_500
CLASSIFIER_ITERATIONS = 100
HIDDEN_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Setting:
    """One training of all three parts, but for its seed."""

    target_epsilon: float
    max_memberships: int  # K, the most nodes that receive from one
    num_hops: int
    encoding: str
    encoder_share: float
    aggregation_share: float
    learning_rate: float
    encoder: settings.Setting  # on nodes alone, at its share of epsilon
    method: str = METHOD

    def __post_init__(self):
        if isinstance(self.encoder, dict):  # as a line of a record has it
            object.__setattr__(self, "encoder", settings.Setting(**self.encoder))


def trials(target_epsilon: float, alone: settings.Setting) -> list[Setting]:
    """As many as of the graph convolution; the encoder has a setting of nodes alone."""
    rng, found = np.random.default_rng(20_232), []
    rates = settings.draw_rates(rng, *LEARNING_RATES)
    for numbers, rate in zip(settings.draw(rng, DRAWN), rates, strict=True):
        share, aggregation_share = numbers.pop("shares")
        encoder = dataclasses.replace(alone, target_epsilon=share * target_epsilon)
        found.append(
            Setting(
                target_epsilon=target_epsilon,
                encoder_share=share,
                aggregation_share=aggregation_share,
                learning_rate=settings.two_digits(rate),
                encoder=encoder,
                **numbers,
            )
        )
    return found


def cells(find: Find, graph: str) -> Iterator[Cell]:
    searched = run.searched(graph)
    alone = laboratory.chosen(searched, METHOD, EPSILON_OF_SETTING, alone=True)
    lines = [trials(target, alone) for target in settings.TARGET_EPSILONS]
    return laboratory.search(find, lines, graph)


class Mechanisms(NamedTuple):
    """The three, each a sum of one clipped term for each node."""

    encoder: dpadambc.PoissonGaussian
    aggregation: dpadambc.PoissonGaussian
    classifier: dpadambc.PoissonGaussian

    @property
    def spending(self) -> accounting.Spending:
        return accounting.compose(list(self))


def aggregation_mechanism(
    target_epsilon: float, max_receivers: int, num_hops: int
) -> dpadambc.PoissonGaussian:
    """Every node takes part in every hop, with K rows of length one."""
    return dpadambc.PoissonGaussian.calibrate(
        target_epsilon=target_epsilon,
        target_delta=TARGET_DELTA,
        l2_clip_norm=math.sqrt(max_receivers),
        sampling_prob=1.0,
        iterations=num_hops,
        normalize_by=1.0,
    )


@functools.cache
def mechanisms(setting: Setting, num_roots: int) -> Mechanisms:
    """Encoder and sums at their shares; the classifier has what is left."""
    encoder = setting.encoder.mechanism(num_roots)
    share = setting.aggregation_share * setting.target_epsilon
    numbers = setting.max_memberships, setting.num_hops
    aggregation = aggregation_mechanism(share, *numbers)
    classifier = functools.partial(
        dpadambc.PoissonGaussian,
        l2_clip_norm=1.0,
        sampling_prob=min(1.0, CLASSIFIER_BATCH_SIZE / num_roots),
        iterations=CLASSIFIER_ITERATIONS,
        normalize_by=CLASSIFIER_BATCH_SIZE,
    )
    of = lambda z: Mechanisms(encoder, aggregation, classifier(noise_multiplier=z))
    least = accounting.calibrate(
        lambda z: dp_accounting.ComposedDpEvent([x.dp_event() for x in of(z)]),
        "noise_multiplier",
        target_epsilon=setting.target_epsilon,
        target_delta=TARGET_DELTA,
        neighboring_relation=encoder.neighboring_relation,
    )
    return of(least)


def bounded_links(
    owners: np.ndarray, listed: np.ndarray, num_nodes: int, max_receivers: int
) -> data.Matrix:
    """Each node sends to the K nodes of its list with the least hash.

    Owners have in their lists whom the edges name. `graphs.subgraphs` takes both
    exchanged: its bound on the degree of a root is here one on the receivers of a node,
    by its own list alone. All numbers that a node can have are below `num_nodes`.
    """
    found = graphs.subgraphs(
        listed,
        owners,
        np.arange(num_nodes),
        max_memberships=num_nodes,
        max_degree=max_receivers,
    )
    lists = np.asarray(found.members)[:, 1:]
    senders, places = np.nonzero(lists >= 0)
    return data.links(senders, lists[senders, places], num_nodes)


def unit_rows(x: np.ndarray) -> np.ndarray:
    """Rows of length one, or zero: one that is not finite would reach its receivers."""
    # In single precision the squares of small entries are lost, and rows get too long.
    wide = x.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    is_right = np.isfinite(lengths) & (lengths > 0)
    return np.where(is_right, wide / np.where(is_right, lengths, 1), 0).astype(x.dtype)


def received(
    who_sends: data.Matrix,
    sent: np.ndarray,
    num_hops: int,
    noise_stddev: float,
    key: jax.Array,
) -> np.ndarray:
    """What the nodes have after each hop, themselves first, side by side."""
    rows = [sent]
    for hop_key in jax.random.split(key, num_hops):
        total = np.asarray(who_sends @ rows[-1])
        noise = np.asarray(jax.random.normal(hop_key, total.shape))
        rows.append(unit_rows(total + noise_stddev * noise))
    return np.concatenate(rows, axis=1)


def encoded(logits: np.ndarray, encoding: str) -> np.ndarray:
    """Of each node by itself, the row that it sends."""
    if encoding == "probabilities":
        return unit_rows(np.asarray(jax.nn.softmax(logits)))
    return unit_rows(logits - logits.mean(axis=1, keepdims=True))


class Laboratory(laboratory.Laboratory):
    """Encoders are kept: several settings share one."""

    def __init__(self, graph: data.Graph):
        super().__init__(graph)
        self.encoder = functools.cache(self._encoder)
        edges = graphs.undirected(self.graph.senders, self.graph.receivers)
        self.links = data.links(*edges, self.graph.num_nodes)
        self.bounded_links = functools.cache(
            functools.partial(bounded_links, *edges, self.graph.num_nodes)
        )

    def _encoder(self, setting: Any, seed: int) -> tuple[np.ndarray, dict[str, float]]:
        """The logits of all nodes by themselves; its accuracy with neighbors."""
        params = self.fit(setting, seed).params
        logits = self.evaluators["alone"].logits(params)
        inductive = self.evaluators["inductive"].accuracies(params, *laboratory.PARTS)
        return logits, inductive

    def measure(self, setting: Setting, seed: int) -> Row:
        """Trains all three, and tests on exact sums and on those with noise."""
        graph, roots = self.graph, self.graph.splits["train"]
        found = mechanisms(setting, len(roots))
        noise: Any = found.aggregation.noise_stddev
        logits, encoder_accuracy = self.encoder(setting.encoder, seed)
        sent = encoded(logits, setting.encoding)
        # Other keys than those of the encoder.
        keys = jax.random.split(jax.random.key(100_000 + seed), 3)
        who_sends, hops = self.bounded_links(setting.max_memberships), setting.num_hops
        noisy = received(who_sends, sent, hops, noise, keys[0])
        exact = received(self.links, sent, hops, 0.0, keys[0])
        network = nn.Sequential(
            [nn.Dense(HIDDEN_SIZE), nn.tanh, nn.Dense(graph.num_classes)]
        )

        def loss_fn(params: Any, row: jax.Array, label: jax.Array) -> jax.Array:
            logits: Any = network.apply(params, row)
            return model.cross_entropy(logits, label)

        result = training.fit(
            loss_fn,
            network.init(keys[1], noisy[0]),
            (noisy[roots], graph.labels[roots]),
            found.classifier,
            optax.adam(setting.learning_rate, b2=experiment.B2),
            key=keys[2],
            target_delta=TARGET_DELTA,
            steps_per_call=CLASSIFIER_ITERATIONS,
        )

        def accuracies(rows: np.ndarray) -> dict[str, float]:
            params: Any = result.params
            logits = np.asarray(network.apply(params, rows))
            return model.accuracies(logits, graph, *laboratory.PARTS)

        return {
            "noise_multipliers": {
                name: mechanism.noise_multiplier
                for name, mechanism in found._asdict().items()
            },
            "aggregation_noise_stddev": noise,
            "epsilon": found.spending.epsilon(TARGET_DELTA),
            "accuracy": {
                "inductive": accuracies(exact),
                "with noise": accuracies(noisy),
            },
            "encoder_accuracy": {"inductive": encoder_accuracy},
        }


def _setting(rows: Sequence[Row]) -> str:
    s = rows[0]["setting"]
    sigma = statistics.fmean(row["aggregation_noise_stddev"] for row in rows)
    return (
        f"K {s['max_memberships']}, hops {s['num_hops']}, {s['encoding']}, parts"
        f" {s['encoder_share']:g} and {s['aggregation_share']:g},"
        f" η {s['learning_rate']:g}, noise {sigma:.1f}"
    )


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Compares with training on nodes alone at the whole epsilon."""
    found = laboratory.lines(rows)
    alone = laboratory.lines(run.searched(rows[0]["graph"]))
    targets = sorted(target for _, target, _ in found if target is not None)
    test = lambda source, *how, is_alone=False: [
        laboratory.test(source[METHOD, t, is_alone], *how) for t in targets
    ]
    body = {
        "nodes alone": test(alone, "inductive", is_alone=True),
        "nodes alone, no neighbors at prediction": test(alone, "alone", is_alone=True),
        "private aggregation": test(found, "inductive"),
        "private aggregation, noise at prediction too": test(found, "with noise"),
        "encoder of private aggregation, without the rest": test(
            found, "inductive", "encoder_accuracy"
        ),
        "settings": [_setting(found[METHOD, t, False]) for t in targets],
    }
    head = ["trained", *(f"ε = {target:g}" for target in targets)]
    return {"sums": markdown(head, [[name, *row] for name, row in body.items()])}


STUDY = laboratory.make_study(RESULTS, cells, tables, Laboratory, Setting)

if __name__ == "__main__":
    STUDY.main(__doc__)
