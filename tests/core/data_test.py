"""Data of every kind is taken, or named by its path; no error shows a row of it."""

import collections
import functools
import io
import traceback

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from flax import core
from PIL import Image

import dpadambc
from dpadambc import training
from dpadambc.core import data as training_data
from dpadambc.core import leaves
from tests import common

pytestmark = pytest.mark.guarantee

N, MARK = 60, 31_337
MECHANISM = common.poisson_gaussian(
    noise_multiplier=1.0, sampling_prob=0.5, iterations=2, normalize_by=30.0
)
ROWS = np.arange(N) % 10 + MARK  # exact in float32, and in no other number here


def fit(data, loss=None, **options):
    options = {"optimizer": optax.sgd(0.1), "mechanism": MECHANISM} | options
    numbers = lambda row: sum(
        jnp.sum(x.astype(float)) for x in jax.tree.leaves(row) if not is_key(x)
    )
    loss = loss or (lambda w, *row: w * numbers(row))
    return training.fit(
        loss,
        options.pop("params", jnp.zeros(())),
        data,
        key=jax.random.key(0),
        target_delta=1e-3,
        **options,
    )


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def texts(error):
    """All that a traceback or a log shows of an error, and of those behind it."""
    while error is not None:
        yield str(error)
        yield repr(error)
        yield from getattr(error, "__notes__", ())
        yield "".join(traceback.format_exception_only(error))
        error = error.__cause__ or error.__context__


def refused(call, name):
    """Calls; the error names the argument and shows no row of the data."""
    with pytest.raises((TypeError, ValueError), match=name) as caught:
        call()
    for text in texts(caught.value):
        assert str(MARK)[:4] not in text and f"{MARK:,}" not in text, text


class OnDisk:
    """An array of HDF5 or Zarr, as far as others see it."""

    def __init__(self, rows):
        self.rows, self.shape, self.dtype = rows, rows.shape, rows.dtype

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.rows, dtype)

    def __repr__(self):
        return f"OnDisk({self.rows})"


class Source:
    """A source of rows, one of which may be of another kind."""

    def __init__(self, make, odd=None):
        self.make, self.odd = make, odd

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.odd if self.odd is not None and index % 2 else self.make(index)

    def __repr__(self):
        return f"Source({ROWS})"


def structured():
    text = "age,income\n" + "\n".join(f"{20 + i},{x}" for i, x in enumerate(ROWS))
    return np.genfromtxt(io.StringIO(text), delimiter=",", names=True)


def picture(number):
    return Image.new("F", (4, 4), float(number))


def on_disk(tmp_path):
    found = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(N,))
    found[:] = ROWS
    return found


WRONG = {
    "structured": structured,
    "record": lambda: structured().view(np.recarray),
    "longdouble": lambda: ROWS.astype(np.longdouble),
    "complex longdouble": lambda: ROWS.astype(np.clongdouble),
    "swapped bytes": lambda: ROWS.astype(">f8"),
    "masked": lambda: np.ma.masked_array(ROWS, ROWS == MARK),
    "objects": lambda: np.array([*ROWS[1:], None], object),
    "ragged": lambda: np.array([np.ones(i) * MARK for i in range(N)], object),
    "text": lambda: ROWS.astype(str),
    "StringDType": lambda: ROWS.astype(str).astype(np.dtypes.StringDType()),
    "bytes": lambda: ROWS.astype("S"),
    "dates": lambda: np.datetime64("2020-01-01") + ROWS,
    "void": lambda: ROWS.astype(np.int64).view("V8"),
    "on disk": lambda: OnDisk(ROWS),
    "table": lambda: pd.DataFrame({"x": ROWS}),
    "column": lambda: pd.Series(ROWS),
    "pictures": lambda: [picture(x) for x in ROWS],
    "strings": lambda: [str(x) for x in ROWS],
    "range": lambda: range(MARK, MARK + N),
    "set": lambda: {*ROWS.tolist()},
}
# Without a path to say: they are the data.
AS_DATA = {
    "an array": lambda: ROWS,
    "a list": lambda: ROWS.tolist(),
    "a list of rows": lambda: [(x, x) for x in ROWS.tolist()],
    "a table": lambda: pd.DataFrame({"x": ROWS}),
    "a generator": lambda: (x for x in ROWS),
    "structured": structured,
    "a text": lambda: str(MARK),
    "None": lambda: None,
}


@pytest.mark.parametrize("name", WRONG)
def test_no_row_is_in_an_error(name):
    wrong = WRONG[name]()
    right = ROWS.astype(np.float32)
    refused(lambda: fit((right, wrong)), r"data\[1\]")
    refused(lambda: fit({"y": right, "x": wrong}), r"data\['x'\]")
    refused(lambda: fit(({"x": {"z": wrong}}, right)), r"data\[0\]\['x'\]\['z'\]")
    refused(lambda: fit(collections.UserDict(x=wrong)), r"data\['x'\]")
    refused(
        lambda: fit((right,), frozen={"x": wrong}, loss=with_frozen), r"frozen\['x'"
    )
    refused(lambda: fit((right,), params={"x": wrong}, loss=first), r"params\['x'\]")


def with_frozen(w, frozen, x):
    return w * x


def first(w, x):
    return x


@pytest.mark.parametrize("name", WRONG)
def test_no_row_is_in_an_error_of_a_loop_of_ones_own(name):
    wrong, right = WRONG[name](), ROWS.astype(np.float32)
    loss = lambda w, x: w * x["x"] if isinstance(x, dict) else w * x
    options = dict(l2_clip_norm=1.0, normalize_by=1.0)
    for grad in (
        dpadambc.per_example_grad(loss),
        dpadambc.clipped_grad(loss, **options),
        dpadambc.clipped_grad(loss, microbatch_size=4, **options),
    ):
        refused(lambda: grad(jnp.zeros(()), wrong), r"args\[1\]")  # noqa: B023
        refused(lambda: grad({"x": wrong}, right), r"params\['x'\]")  # noqa: B023
    refused(
        lambda: dpadambc.explain(loss, jnp.zeros(()), wrong, batch_size=4), r"args\[1\]"
    )
    batch = MECHANISM.sample_step(jax.random.key(0), 0, num_examples=N)
    if not isinstance(wrong, np.ndarray) or name in ("range", "set"):
        refused(lambda: batch.gather((wrong,)), "data")
    step = training.Step(loss, MECHANISM, optax.sgd(0.1))
    state = step.init(jnp.zeros(()), key=jax.random.key(0))
    refused(lambda: step(state, (wrong,), np.zeros(N, bool)), r"args\[\d\]")
    refused(lambda: training.PublicScore(loss, (wrong,)), "data")
    refused(lambda: training.group_by_user((wrong,), np.arange(N), max_rows=1), "data")


@pytest.mark.parametrize("name", AS_DATA)
def test_no_row_is_in_an_error_about_the_data_as_a_whole(name):
    wrong = AS_DATA[name]()
    refused(lambda: fit(wrong), "data")
    refused(lambda: training.PublicScore(lambda w, x: x, wrong), "data|score")


@pytest.mark.parametrize(
    "odd",
    [
        {"x": str(MARK)},
        {"x": MARK, "z": MARK},
        {"y": MARK},
        [MARK],
        MARK,
        None,
        {"x": None},
        {"x": np.ones(3) * MARK},
        {"x": np.longdouble(MARK)},
        {"x": MARK * 10**20},
        {"x": structured()[0]},
        {"x": object()},
    ],
)
def test_no_row_of_a_source_is_in_an_error(odd):
    good = lambda i: {"x": np.float32(ROWS[i])}
    if odd is not None:
        refused(lambda: fit(Source(good, odd)), "data")
    if not isinstance(odd, dict) or odd.keys() != {"x"} or odd["x"] is None:
        return
    if not isinstance(odd["x"], np.ndarray):
        refused(lambda: fit(Source(lambda i: odd)), "data")


def test_arguments_in_another_order_show_no_row():
    """Also where data are given for something else."""
    swapped = ROWS.astype(np.float32), {"x": [ROWS]}, [ROWS], Source(lambda i: ROWS[i])
    for rows in swapped:
        for name in ("mechanism", "optimizer", "spent", "callbacks", "precision"):
            refused(lambda: fit((ROWS,), **{name: rows}), ".")  # noqa: B023
        for name in ("steps_per_call", "target_epsilon"):
            refused(lambda: fit((ROWS,), **{name: rows}), name)  # noqa: B023
        options = dict(l2_clip_norm=1.0, normalize_by=1.0)
        for name in (*options, "microbatch_size", "clip_rule"):
            given = options | {name: rows}
            refused(lambda: dpadambc.clipped_grad(first, **given), ".")  # noqa: B023
        refused(lambda: dpadambc.add_dp_noise(1.0, key=rows), "key")  # noqa: B023
        refused(lambda: dpadambc.add_dp_noise(rows, key=jax.random.key(0)), ".")  # noqa: B023
        refused(lambda: training.Step(first, rows, optax.sgd(1.0)), "mechanism")  # noqa: B023
        refused(lambda: training.Step(rows, MECHANISM, optax.sgd(1.0)), "loss_fn")  # noqa: B023
        refused(lambda: training.Sharded(None, rows), "sharding")  # noqa: B023
        refused(lambda: training.PublicScore(rows, (ROWS,)), "score_fn")  # noqa: B023
        refused(
            lambda: dpadambc.PoissonGaussian(  # noqa: B023
                l2_clip_norm=1.0,
                noise_multiplier=rows,  # noqa: B023
                sampling_prob=0.5,
                iterations=2,
                normalize_by=1,
            ),
            "noise_multiplier",
        )


def test_the_control_jax_shows_the_rows():
    """Negative control: what is caught early would be in JAX's own errors."""
    shown = []
    for name in ("structured", "longdouble", "objects", "table", "strings"):
        wrong = WRONG[name]()
        try:
            jax.device_put(wrong), jnp.asarray(wrong), jax.jit(lambda x: x)(wrong)
        except Exception as error:
            shown += [str(MARK)[:4] in text for text in texts(error)]
    assert any(shown)


TAKEN = {
    "bool": lambda: ROWS > MARK + 3,
    "int8": lambda: ROWS.astype(np.int8),
    "uint8": lambda: ROWS.astype(np.uint8),
    "uint64": lambda: ROWS.astype(np.uint64),
    "float16": lambda: ROWS.astype(np.float16),
    "float64": lambda: ROWS.astype(np.float64),
    "bfloat16": lambda: jnp.asarray(ROWS, jnp.bfloat16),
    "NumPy's bfloat16": lambda: np.asarray(jnp.asarray(ROWS, jnp.bfloat16)),
    "int4": lambda: np.asarray(jnp.asarray(ROWS, jnp.int4)),
    "float8": lambda: jnp.asarray(ROWS, jnp.float8_e4m3fn),
    "complex": lambda: np.stack([ROWS, ROWS], 1).astype(np.float32).view(np.complex64),
    "keys": lambda: jax.random.split(jax.random.key(0), N),
    "a view": lambda: np.stack([ROWS, ROWS], 1)[:, ::-1],
    "read only": lambda: np.broadcast_to(np.float32(1), (N, 3)),
    "jax": lambda: jnp.asarray(ROWS),
    "fields": lambda: {name: structured()[name] for name in structured().dtype.names},
    "pictures": lambda: np.stack([np.asarray(picture(x)) for x in ROWS]),
}


def sum_of_numbers(w, tree):
    """A loss of any tree: its numbers in float32, without keys."""
    is_number = lambda x: not is_key(x)
    columns = filter(is_number, jax.tree.leaves(tree))
    return w * sum(jnp.sum(jnp.real(x).astype(float)) for x in columns)


def test_arrays_of_numbers_are_taken():
    """One run has a column of each kind; its error would name the column."""
    data = {name: make() for name, make in TAKEN.items()}
    assert fit((data,), sum_of_numbers).iterations == 2


@pytest.mark.parametrize("name", TAKEN)
def test_an_array_of_numbers_is_no_other_for_the_checks(name):
    data = TAKEN[name]()
    for whole in ((data,), {"x": data}):
        leaves.check(data=whole)
        assert training_data.num_examples(whole) == N
        assert jax.tree.map(jnp.shape, training_data.one_example(whole))


def same(one, two):
    np.testing.assert_array_equal(one.params, two.params)


def test_a_file_that_is_mapped_is_an_array(tmp_path):
    same(fit((on_disk(tmp_path),)), fit((ROWS.astype(np.float32),)))


class Encoding(collections.UserDict):
    """As the tokenizers of Hugging Face return it."""


class Batch(dict):
    """A dictionary of its own class, which is no tree for JAX."""


def mapping(kind, columns, tmp_path):
    if kind == "npz":
        np.savez(tmp_path / "columns.npz", **columns)
        return np.load(tmp_path / "columns.npz")
    kinds = {"UserDict": collections.UserDict, "Encoding": Encoding, "Batch": Batch}
    kinds |= {"FrozenDict": core.freeze, "OrderedDict": collections.OrderedDict}
    kinds |= {
        "ChainMap": collections.ChainMap,
        "defaultdict": lambda x: collections.defaultdict(list, x),
    }
    return kinds[kind](columns)


KINDS = ["UserDict", "Encoding", "Batch", "ChainMap", "npz"]
COLUMNS = {"ids": np.stack([ROWS % 7, ROWS % 5], 1), "label": ROWS.astype(float)}
LABELS = COLUMNS["label"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mapping_is_a_dictionary(kind, tmp_path):
    make = lambda: mapping(kind, COLUMNS, tmp_path)
    for around in (
        lambda x: x,
        lambda x: (x, LABELS),
        lambda x: {"inputs": x},
    ):
        found, expected = leaves.with_dictionaries(around(make())), around(COLUMNS)
        chex.assert_trees_all_equal(found, expected)
    if kind == "npz":
        return
    row = lambda i: {name: x[i] for name, x in COLUMNS.items()}
    rows = [mapping(kind, row(i), tmp_path) for i in range(N)]
    chex.assert_trees_all_equal(leaves.stacked(rows), COLUMNS)


def error_of_table(table, row, label):
    return (table[row["ids"]].mean() - label) ** 2


def test_a_run_on_mappings_is_one_on_dictionaries(tmp_path):
    run = functools.partial(fit, loss=error_of_table, params=jnp.zeros(7))
    mapped = mapping("npz", COLUMNS, tmp_path), LABELS
    same(run(mapped), run((COLUMNS, LABELS)))
    row = lambda i: {name: x[i] for name, x in COLUMNS.items()}
    rows = lambda make: Source(lambda i: (make(row(i)), LABELS[i]))
    same(run(rows(collections.UserDict)), run(rows(dict)))


def test_trees_of_jax_stay_as_they_are(tmp_path):
    kinds = ("FrozenDict", "OrderedDict", "defaultdict")
    made = tuple(mapping(kind, COLUMNS, tmp_path) for kind in kinds)
    found = leaves.with_dictionaries(made)
    assert list(map(type, found)) == list(map(type, made))
    loss = lambda table, *rows: sum(
        error_of_table(table, row, row["label"]) for row in rows
    )
    assert fit(made, loss, params=jnp.zeros(7)).iterations == 2


def test_a_source_stays_a_source():
    source = Source(lambda i: ROWS[i])
    assert training_data.is_source(source) and training_data.is_source(OnDisk(ROWS))
    for data in (collections.UserDict(x=ROWS), core.freeze({"x": ROWS}), {"x": ROWS}):
        assert not training_data.is_source(data)
    assert leaves.with_dictionaries(source) is source
    rows = ROWS.astype(np.float32)
    same(fit(OnDisk(rows)), fit(Source(lambda i: rows[i])))


def test_settings_that_are_numbers_may_be_frozen():
    frozen = {"rate": 2, "scale": 0.5, "on": True, "array": np.ones(3), "none": None}
    loss = lambda w, frozen, x: w * x * frozen["rate"] * frozen["scale"]
    assert fit((ROWS.astype(np.float32),), loss, frozen=frozen).iterations == 2


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_parameters_are_told_of_pairs(dtype):
    loss = lambda w, x: jnp.mean(jnp.fft.irfft(jnp.fft.rfft(x) * w["k"]) ** 2)
    x = np.ones((N, 16), np.float32)
    wrong = {"k": np.ones(9, dtype)}
    for call in (
        lambda: fit((x,), loss, params=wrong),
        lambda: dpadambc.per_example_grad(loss)(wrong, x),
        lambda: dpadambc.per_example_grad(loss)({"k": 1j}, x),
    ):
        with pytest.raises(TypeError, match="imaginary"):
            call()
    pairs = {"re": jnp.ones(9), "im": jnp.ones(9)}
    of_pairs = lambda w, x: loss({"k": w["re"] + 1j * w["im"]}, x)
    assert fit((x,), of_pairs, params=pairs).iterations == 2


def test_data_have_no_missing_leaf():
    data = ROWS.astype(float), {"a": ROWS[:, None], "b": None}
    with pytest.raises(TypeError, match=r"data\[1\]\['b'\].*NoneType"):
        fit(data)
    with pytest.raises(TypeError, match=r"data\[i\]\[1\].*NoneType"):
        fit(Source(lambda i: (float(ROWS[i]), None)))
    loss = lambda w, frozen, x: w * x + (frozen["b"] or 0)  # near miss: no example
    assert fit(data[:1], loss, frozen={"a": 1.0, "b": None}).iterations == 2
