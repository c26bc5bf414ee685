r"""Private aggregation: noise on the sums over neighbors, once, and not on gradients.

    python -m benchmarks.ogbn_arxiv_gcn.aggregation --data-dir DIR [--seeds 5]
    python -m benchmarks.ogbn_arxiv_gcn.aggregation      # prints the tables

After GAP (`Sajadmanesh et al. 2023 <https://arxiv.org/abs/2203.00949>`_), for nodes:

1. An encoder is trained on nodes alone. Node s gets the row x_s of length one, made of
   its features and the encoder.
2. Node s sends x_s to at most K nodes of its own list, those with the least hash.
   Every node receives a sum with noise, which is divided by its length. A second hop
   sends what was received.
3. A classifier is trained on x_s and all that s received, node by node.

**Theorem.** The data of a node are its features, its label and its list of edges, as in
`dpadambc.graphs`; a node goes or comes with its data, and the lists of others stay.
Each of the three is then a sum of one clipped term for each node: the sensitivities are
C, sqrt(K) and C, and the three compose.

*Proof.* Encoder and classifier: for given released rows the term of a node depends on
its own data alone. A hop releases a row for every number that a node can have, whether
or not it is there: the sum over nodes s of the matrix with x_s in the rows of its K
receivers and 0 elsewhere. Who receives depends on the list of s alone, and x_s on the
features of s and on what was released before. So that matrix is a term of s, gone when
s is, and its length is at most sqrt(K), K rows of length one. What s *receives* is in
the terms of others, and their lists name s as before. ∎

Prediction as in the other experiments reads exact sums and is *not private*; beside it
is prediction from sums with noise.
"""

import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.sparse

import dpadambc
from benchmarks import experiment
from benchmarks.ogbn_arxiv_gcn import data, run, settings, table
from dpadambc import accounting, graphs

RESULTS = pathlib.Path(__file__).with_name("aggregation.jsonl")
METHOD = "DP-Adam"

# Where the encoder's setting is from, for all epsilons: a step of it takes 2,500 nodes.
TARGET_EPSILON_OF_ENCODER = 3.0

# What encoder and sums would cost alone, in parts of the epsilon of all three.
SHARES = ((0.5, 0.5), (0.7, 0.4), (0.4, 0.7))
MAX_RECEIVERS = (2, 4, 8, 16)
NUM_HOPS = (1, 2)
ENCODINGS = ("probabilities", "logits")
LEARNING_RATES = (3e-3, 1e-1)  # of the classifier
CLASSIFIER_BATCH_SIZE = 2_500
CLASSIFIER_ITERATIONS = 100
CLASSIFIER_CLIP_NORM = 1.0
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
    rng = np.random.default_rng(20_232)
    count = settings.NUM_TRIALS
    column = lambda values: [
        values[i] for i in rng.permutation(np.resize(range(len(values)), count))
    ]
    low, high = LEARNING_RATES
    places = (rng.permutation(count) + rng.random(count)) / count
    rows = zip(
        column(SHARES),
        column(MAX_RECEIVERS),
        column(NUM_HOPS),
        column(ENCODINGS),
        (low * (high / low) ** places).tolist(),
        strict=True,
    )
    return [
        Setting(
            target_epsilon=target_epsilon,
            max_memberships=max_receivers,
            num_hops=num_hops,
            encoding=encoding,
            encoder_share=encoder_share,
            aggregation_share=aggregation_share,
            learning_rate=float(f"{learning_rate:.2g}"),
            encoder=dataclasses.replace(
                alone, target_epsilon=encoder_share * target_epsilon
            ),
        )
        for (
            encoder_share,
            aggregation_share,
        ), max_receivers, num_hops, encoding, learning_rate in rows
    ]


@dataclasses.dataclass(frozen=True)
class Mechanisms:
    """The three, each a sum of one clipped term for each node."""

    encoder: dpadambc.PoissonGaussian
    aggregation: dpadambc.PoissonGaussian
    classifier: dpadambc.PoissonGaussian

    @property
    def spending(self) -> accounting.Spending:
        return accounting.compose([self.encoder, self.aggregation, self.classifier])


def aggregation_mechanism(
    target_epsilon: float, max_receivers: int, num_hops: int
) -> dpadambc.PoissonGaussian:
    """Every node takes part in every hop, with K rows of length one."""
    return dpadambc.PoissonGaussian.calibrate(
        target_epsilon=target_epsilon,
        target_delta=settings.TARGET_DELTA,
        l2_clip_norm=math.sqrt(max_receivers),
        sampling_prob=1.0,
        iterations=num_hops,
        normalize_by=1.0,
    )


@functools.cache
def mechanisms(setting: Setting, num_roots: int) -> Mechanisms:
    """Encoder and sums at their shares; the classifier has what is left."""
    encoder = setting.encoder.mechanism(num_roots)
    assert isinstance(encoder, dpadambc.PoissonGaussian)
    aggregation = aggregation_mechanism(
        setting.aggregation_share * setting.target_epsilon,
        setting.max_memberships,
        setting.num_hops,
    )

    # The least noise that the classifier could have, if the rest cost nothing.
    alone = dpadambc.PoissonGaussian.calibrate(
        target_epsilon=setting.target_epsilon,
        target_delta=settings.TARGET_DELTA,
        l2_clip_norm=CLASSIFIER_CLIP_NORM,
        sampling_prob=min(1.0, CLASSIFIER_BATCH_SIZE / num_roots),
        iterations=CLASSIFIER_ITERATIONS,
        normalize_by=CLASSIFIER_BATCH_SIZE,
    )

    def together(factor: float) -> Mechanisms:
        level: Any = alone.noise_multiplier
        classifier = dataclasses.replace(alone, noise_multiplier=factor * level)
        return Mechanisms(encoder, aggregation, classifier)

    def excess(factor: float) -> float:
        epsilon = together(factor).spending.epsilon(settings.TARGET_DELTA)
        return epsilon - setting.target_epsilon

    factor: Any = scipy.optimize.brentq(excess, 1.0, 10.0, xtol=1e-4)
    while excess(factor) > 0:
        factor += 1e-4
    return together(factor)


def links(
    senders: np.ndarray, receivers: np.ndarray, num_nodes: int
) -> scipy.sparse.csr_matrix:
    """Entry (r, s) is 1 where s sends to r."""
    ones, shape = np.ones(len(senders), np.float32), (num_nodes, num_nodes)
    return scipy.sparse.csr_matrix((ones, (receivers, senders)), shape)


def bounded_links(
    owners: np.ndarray, listed: np.ndarray, num_nodes: int, max_receivers: int
) -> scipy.sparse.csr_matrix:
    """Each node sends to the K nodes of its list with the least hash.

    `graphs.subgraphs` takes both ends of an edge exchanged: what bounds the degree of a
    root there bounds the receivers of a node here, by its own list alone.

    Args:
      owners: shape (num_edges,), the nodes in whose lists edges are.
      listed: shape (num_edges,), the nodes that they name.
      num_nodes: all numbers that a node can have are below.
      max_receivers: K.
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
    return links(senders, lists[senders, places], num_nodes)


def unit_rows(x: np.ndarray) -> np.ndarray:
    """Rows of length one, or zero: one that is not finite would reach its receivers."""
    # In single precision the squares of small entries are lost, and rows get too long.
    wide = x.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    is_right = np.isfinite(lengths) & (lengths > 0)
    return np.where(is_right, wide / np.where(is_right, lengths, 1), 0).astype(x.dtype)


def received(
    who_sends: scipy.sparse.csr_matrix,
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


class Laboratory(run.Laboratory):
    """Encoders are kept: several settings share one."""

    def __init__(self, graph: data.Graph):
        super().__init__(graph)
        self.encoder = functools.cache(self._encoder)
        edges = graphs.undirected(self.graph.senders, self.graph.receivers)
        self.links = links(*edges, self.graph.num_nodes)
        self.bounded_links = functools.cache(
            functools.partial(bounded_links, *edges, self.graph.num_nodes)
        )

    def _encoder(
        self, setting: settings.Setting, seed: int
    ) -> tuple[np.ndarray, dict[str, float]]:
        """The logits of all nodes by themselves; its accuracy with neighbors."""
        roots = self.roots(setting)
        mechanism = setting.mechanism(roots.num_examples)
        trainer = experiment.Trainer(setting.method, mechanism, self.task)
        training_run = experiment.Run(setting.learning_rate, jax.random.key(seed))
        state, _ = trainer.advance(
            training_run,
            trainer.start(training_run),
            roots,
            jnp.arange(mechanism.iterations),
        )
        logits = self.evaluators["alone"].logits(state.params)
        inductive = self.evaluators["inductive"].accuracies(state.params, run.PARTS)
        return logits, inductive


def encoded(logits: np.ndarray, encoding: str) -> np.ndarray:
    """Of each node by itself, the row that it sends."""
    if encoding == "probabilities":
        return unit_rows(np.asarray(jax.nn.softmax(logits)))
    return unit_rows(logits - logits.mean(axis=1, keepdims=True))


def measure(laboratory: Laboratory, setting: Setting, seed: int) -> run.Row:
    """Trains all three, and tests on exact sums and on those with noise."""
    graph = laboratory.graph
    train = graph.splits["train"]
    found = mechanisms(setting, len(train))
    noise_stddev = found.aggregation.noise_stddev
    assert not callable(noise_stddev)
    logits, encoder_accuracy = laboratory.encoder(setting.encoder, seed)
    sent = encoded(logits, setting.encoding)
    # Other keys than those of the encoder.
    sums_key, classifier_key = jax.random.split(jax.random.key(100_000 + seed))
    hops = setting.num_hops
    noisy = received(
        laboratory.bounded_links(setting.max_memberships),
        sent,
        hops,
        noise_stddev,
        sums_key,
    )
    exact = received(laboratory.links, sent, hops, 0.0, sums_key)
    sizes = (noisy.shape[1], HIDDEN_SIZE, graph.num_classes)
    trainer = experiment.Trainer(METHOD, found.classifier, experiment.Mlp(sizes))
    training_run = experiment.Run(setting.learning_rate, classifier_key)
    rows = experiment.Data(jnp.asarray(noisy[train]), jnp.asarray(graph.labels[train]))
    state, _ = trainer.advance(
        training_run,
        trainer.start(training_run),
        rows,
        jnp.arange(found.classifier.iterations),
    )

    def accuracies(features):
        return {
            part: float(
                experiment.accuracy(
                    state.params,
                    experiment.Data(
                        jnp.asarray(features[graph.splits[part]]),
                        jnp.asarray(graph.labels[graph.splits[part]]),
                    ),
                )
            )
            for part in run.PARTS
        }

    return {
        "setting": dataclasses.asdict(setting),
        "seed": seed,
        "noise_multipliers": {
            name: getattr(found, name).noise_multiplier
            for name in ("encoder", "aggregation", "classifier")
        },
        "aggregation_noise_stddev": noise_stddev,
        "epsilon": found.spending.epsilon(settings.TARGET_DELTA),
        "accuracy": {"inductive": accuracies(exact), "with noise": accuracies(noisy)},
        "encoder_accuracy": {"inductive": encoder_accuracy},
    }


def lines(searched: Sequence[run.Row]) -> list[list[Setting]]:
    """The trials at each epsilon, in the order of the search."""
    chosen = table.lines(searched)[METHOD, TARGET_EPSILON_OF_ENCODER, True][0]
    alone = settings.Setting(**chosen["setting"])
    return [trials(target, alone) for target in settings.TARGET_EPSILONS]


def _setting(rows: Sequence[run.Row]) -> str:
    s = rows[0]["setting"]
    sigma = statistics.fmean(row["aggregation_noise_stddev"] for row in rows)
    return (
        f"K {s['max_memberships']}, hops {s['num_hops']}, {s['encoding']}, parts"
        f" {s['encoder_share']:g} and {s['aggregation_share']:g},"
        f" η {s['learning_rate']:g}, noise {sigma:.1f}"
    )


def render(searched: Sequence[run.Row], rows: Sequence[run.Row]) -> str:
    """Against nodes alone at the whole epsilon."""
    found, alone = table.lines(rows), table.lines(searched)
    targets = sorted(target for _, target, _ in found if target is not None)
    of = lambda target: found[METHOD, target, False]
    cells = {
        "nodes alone": lambda t: table.test(alone[METHOD, t, True], "inductive"),
        "nodes alone, no neighbors at prediction": lambda t: table.test(
            alone[METHOD, t, True], "alone"
        ),
        "private aggregation": lambda t: table.test(of(t), "inductive"),
        "the same, noise at prediction too": lambda t: table.test(of(t), "with noise"),
        "its encoder without the rest": lambda t: table.test(
            of(t), "inductive", "encoder_accuracy"
        ),
        "settings": lambda t: _setting(of(t)),
    }
    return table.markdown(
        ["trained", *(f"ε = {target:g}" for target in targets)],
        [[name, *map(cell, targets)] for name, cell in cells.items()],
    )


def main() -> None:
    arguments = table.options(__doc__, RESULTS)
    searched = table.read(table.RESULTS)
    if arguments.data_dir:
        graph = data.load(arguments.data_dir)
        run.search(
            lines(searched),
            run.Results(arguments.output, graph),
            functools.partial(measure, Laboratory(graph)),
            range(arguments.seeds),
        )
    print(render(searched, table.read(arguments.output)))


if __name__ == "__main__":
    main()
