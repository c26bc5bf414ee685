"""Of a module of Flax NNX its `nnx.Param` are trained, and nothing else."""

import collections
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core, nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dpadambc
from dpadambc import audit, training
from dpadambc.core import identity, modules
from tests import common

pytestmark = pytest.mark.guarantee

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
MECHANISM = common.poisson_gaussian(
    noise_multiplier=1.0, sampling_prob=0.5, iterations=4, normalize_by=30.0
)


class Scale(nnx.Variable):
    """A kind of variable that is no parameter for Flax."""


class Net(nnx.Module):
    """Statistics, a stream of keys, an array and an own kind beside the parameters."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.norm.mean[...] = jnp.arange(4.0)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)
        self.scale = Scale(jnp.full((), 2.0))
        self.offset = nnx.data(jnp.ones(()))

    def __call__(self, x):
        x = self.dropout(self.norm(x))
        return self.scale[...] * self.out(x)[0] + self.offset


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(5, 4, rngs=rngs)
        self.kernel = self.table.embedding

    def __call__(self, x):
        return (x @ self.kernel[...].T).sum() + self.table(jnp.int32(1)).sum()


def net():
    model = Net(nnx.Rngs(0))
    model.eval()
    return model


def square(model, x):
    return model(x) ** 2


def pure(tree):
    """The arrays of a tree by path; keys as words."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    words = lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    show = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {show(path).removesuffix("/value"): words(x) for path, x in leaves}


TRAINED = {"norm/bias", "norm/scale", "out/bias", "out/kernel"}


def fit(loss_fn, params, data=(X,), **options):
    options = {"optimizer": optax.sgd(1.0), "mechanism": MECHANISM} | options
    return training.fit(
        loss_fn, params, data, key=jax.random.key(0), target_delta=1e-3, **options
    )


def total(params, x):
    """A loss of any tree, in which every number has a gradient."""
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(params)) * x[0]


def moved(before, after):
    before, after = pure(before), pure(after)
    assert before.keys() == after.keys()
    return {name for name, x in before.items() if not np.array_equal(x, after[name])}


@pytest.mark.parametrize("method", ["factored", common.slow("vmap")])
@pytest.mark.parametrize(
    "wrap", [common.slow(lambda f: f, id="by hand"), pytest.param(nnx.jit, id="jit")]
)
def test_the_gradient_is_that_of_flax(method, wrap):
    model = net()
    grads = wrap(dpadambc.per_example_grad(square, method=method))(model, X)
    expected = [nnx.grad(square)(model, x) for x in X]
    assert jax.tree.structure(dpadambc.materialize(grads)) == jax.tree.structure(
        expected[0]
    )
    got = pure(dpadambc.materialize(grads))
    assert got.keys() == TRAINED
    for name in got:
        one_by_one = np.stack([pure(x)[name] for x in expected])
        np.testing.assert_allclose(got[name], one_by_one, rtol=1e-4, atol=1e-5)


def test_what_is_not_trained_counts_in_no_norm():
    """Negative control: with the other variables the norm is larger."""
    model = net()
    norms = lambda **options: dpadambc.per_example_norms(
        dpadambc.per_example_grad(square, **options)(model, X)
    )
    several = nnx.Any(nnx.Param, nnx.BatchStat, Scale)
    assert np.all(norms(wrt=several) > 1.01 * norms())


@pytest.mark.parametrize("microbatch_size", [common.slow(None), 7])
def test_clipped_grad_of_a_module(microbatch_size):
    options = dict(l2_clip_norm=1.0, normalize_by=1.0, microbatch_size=microbatch_size)
    model = net()
    sums = dpadambc.clipped_grad(square, **options)(model, X)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    by_hand = dpadambc.clipped_grad(
        lambda params, rest, x: square(nnx.merge(graph, params, rest, copy=True), x),
        batch_argnums=2,
        **options,
    )(params, rest, X)
    got, expected = (
        pure(dpadambc.materialize(sums)),
        pure(dpadambc.materialize(by_hand)),
    )
    assert got.keys() == TRAINED
    for name, x in got.items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps_per_call", [1, common.slow(2)])
def test_fit_trains_the_parameters_alone(steps_per_call):
    model = net()
    before = pure(model)
    result = fit(square, model, steps_per_call=steps_per_call)
    assert isinstance(result.params, Net)
    assert moved(net(), result.params) == TRAINED
    assert not moved(net(), model)
    assert before.keys() == pure(model).keys()
    result.params(X[0])  # it is a module


def test_fit_of_a_module_is_fit_of_its_parameters():
    model = net()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    by_hand = lambda params, rest, x: square(nnx.merge(graph, params, rest), x)
    options = dict(
        mechanism=common.poisson_gaussian(
            noise_multiplier=0.0, sampling_prob=1.0, iterations=4, normalize_by=60.0
        )
    )
    one = pure(nnx.state(fit(square, model, **options).params, nnx.Param))
    two = pure(fit(by_hand, params, frozen=rest, **options).params)
    for name in TRAINED:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "wrt, names",
    [
        common.slow(nnx.BatchStat, {"norm/mean", "norm/var"}, id="type"),
        pytest.param(
            (Scale, nnx.PathContains("out")),
            {"scale", "out/bias", "out/kernel"},
            id="several",
        ),
        common.slow(
            nnx.All(nnx.Param, nnx.PathContains("norm")),
            {"norm/scale", "norm/bias"},
            id="path",
        ),
    ],
)
def test_wrt_chooses_others(wrt, names):
    optimizer = optax.adam(0.1)
    result = fit(square, net(), wrt=wrt, optimizer=optimizer)
    assert moved(net(), result.params) == names
    assert pure(result.state.opt_state[0].mu).keys() == names
    for grads in (
        dpadambc.per_example_grad(square, wrt=wrt)(net(), X),
        dpadambc.clipped_grad(square, l2_clip_norm=1.0, normalize_by=1.0, wrt=wrt)(
            net(), X
        ),
    ):
        assert pure(dpadambc.materialize(grads)).keys() == names
    rows = dpadambc.explain(square, net(), X[0], batch_size=60, wrt=wrt).parameters
    assert len(rows) == len(names)


def test_runs_that_train_other_variables_draw_other_batches():
    words = lambda wrt: np.asarray(
        jax.random.key_data(fit(square, net(), wrt=wrt).state.sampling_key)
    ).tolist()
    one, again, other = map(words, (nnx.Param, nnx.Param, nnx.BatchStat))
    assert one == again != other


def test_a_state_or_a_variable_is_split_as_a_module_is():
    graph, state = nnx.split(net())
    loss = lambda state, x: square(nnx.merge(graph, state), x)
    result = fit(loss, state)
    assert isinstance(result.params, nnx.State)
    assert moved(state, result.params) == TRAINED
    several = {
        "w": nnx.Param(jnp.ones(4)),
        "mean": nnx.BatchStat(jnp.ones(4)),
        "b": 1.0,
    }
    loss = lambda p, x: (p["w"][...] @ (x - p["mean"][...]) + p["b"]) ** 2
    result = fit(loss, jax.tree.map(jnp.asarray, several))
    assert moved(jax.tree.map(jnp.asarray, several), result.params) == {"w", "b"}


def test_modules_within_a_tree_beside_arrays():
    params = {"net": net(), "bias": jnp.zeros(()), "none": None}
    loss = lambda params, x: (params["net"](x) + params["bias"]) ** 2
    result = fit(loss, params)
    assert moved(params, result.params) == {"bias"} | {f"net/{x}" for x in TRAINED}
    grads = dpadambc.per_example_grad(loss)(params, X)
    expected = nnx.grad(loss)(params, X[0])
    got = jax.tree.structure(dpadambc.materialize(grads))
    assert got == jax.tree.structure(expected)


LINEAR = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
WHOLE = {
    "linear": LINEAR,
    "param": nnx.Param(jnp.ones(4)),
    "state": nnx.state(LINEAR),
    "pure state": nnx.as_pure(nnx.state(LINEAR)),
    "dictionary": nnx.to_pure_dict(nnx.state(LINEAR)),
    "adapters": nnx.state(nnx.LoRALinear(4, 1, lora_rank=1, rngs=nnx.Rngs(0))),
}


@pytest.mark.parametrize("name", WHOLE)
def test_near_misses_are_split_off_whole(name):
    trained, _ = modules.split(WHOLE[name])
    assert pure(trained).keys() == pure(WHOLE[name]).keys()


@pytest.mark.parametrize("name", common.rest_slow(WHOLE, quick=1))
def test_near_misses_are_trained_whole(name):
    params = WHOLE[name]
    assert moved(params, fit(total, params).params) == pure(params).keys()


def test_the_optimizer_of_flax_takes_the_gradient():
    model = net()
    tx = optax.chain(
        dpadambc.clip_per_example(1.0, normalize_by=30.0),
        dpadambc.add_dp_noise(0.01, key=jax.random.key(0)),
        optax.sgd(0.1),
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = dpadambc.per_example_grad(square)(model, x)
        optimizer.update(model, grads)

    step(model, optimizer, X)
    assert moved(net(), model) == TRAINED


def test_a_chain_of_optax_takes_the_state_of_the_parameters():
    model = net()
    tx = dpadambc.dp_sgd(0.1, MECHANISM, key=jax.random.key(0))
    params = nnx.state(model, nnx.Param)
    mask = np.zeros(len(X), bool)
    grads = dpadambc.per_example_grad(square)(model, X, is_padding_example=mask)
    updates, _ = tx.update(grads, tx.init(params), params, is_padding_example=mask)
    nnx.update(model, optax.apply_updates(params, updates))
    assert moved(net(), model) == TRAINED


def test_a_variable_in_two_places_has_one_gradient():
    model = Tied(nnx.Rngs(0))
    grads = dpadambc.materialize(dpadambc.per_example_grad(square)(model, X))
    expected = [nnx.grad(square)(model, x) for x in X]
    (got,), rows = jax.tree.leaves(grads), [jax.tree.leaves(x)[0] for x in expected]
    np.testing.assert_allclose(got, np.stack(rows), rtol=1e-4, atol=1e-5)


def test_a_variable_in_two_places_would_come_apart_in_a_run():
    with pytest.raises(ValueError, match="params"):
        fit(square, Tied(nnx.Rngs(0)))
    step = training.Step(square, MECHANISM, optax.sgd(0.1))
    with pytest.raises(ValueError, match="params"):
        step.init(Tied(nnx.Rngs(0)), key=jax.random.key(0))
    graph, state = nnx.split(Tied(nnx.Rngs(0)))
    assert len(jax.tree.leaves(state)) == 1
    fit(lambda state, x: square(nnx.merge(graph, state), x), state)


def test_checkpoints_and_releases_of_a_module(tmp_path):
    run = lambda: fit(square, net(), checkpoints=training.Checkpoints(tmp_path / "run"))
    first, again = run(), run()
    assert again.resumed_from == 4 and not moved(first.params, again.params)
    training.save_release(tmp_path / "model.npz", first)
    release = training.load_release(tmp_path / "model.npz", like=net())
    assert isinstance(release.params, Net) and not moved(release.params, first.params)
    assert fit(square, release).spent.runs[:1] == first.spent.runs


@pytest.mark.slow
def test_a_search_over_runs_of_a_module():
    model = net()
    found = training.search(
        square,
        model,
        (X,),
        MECHANISM,
        optax.sgd,
        [0.1, 0.2],
        trials=dpadambc.accounting.FixedTrials(2),
        score=training.PublicScore(lambda m, x: m(x), (X.copy(),)),
        key=jax.random.key(0),
        target_delta=1e-3,
        trials_at_once=2,
    )
    assert moved(net(), found.best.params) == TRAINED


@pytest.mark.slow
def test_the_audit_of_a_module():
    model = net()
    pipeline = audit.Pipeline.of_fit(square, model, (X,), MECHANISM, optax.sgd(0.1))
    assert pure(pipeline.params).keys() == TRAINED
    report = audit.run(pipeline)
    assert report.passed is not False, report


def test_explain_names_what_multiplies_data_in_a_module():
    rule = lambda model, loss: (
        dpadambc.explain(loss, model, jnp.ones(40), batch_size=4).parameters
    )
    model = nnx.Linear(40, 40, use_bias=False, rngs=nnx.Rngs(0))
    masked = lambda w, x: jnp.sum(x @ (w * jnp.tril(jnp.ones((40, 40))))) ** 2
    (one,) = rule(model, lambda model, x: masked(model.kernel[...], x))
    (two,) = rule(model.kernel[...], masked)
    assert dataclasses.replace(one, name=two.name) == two


def test_explain_counts_the_trained_alone():
    found = dpadambc.explain(
        square,
        net(),
        X[0],
        batch_size=60,
        memory_limit=1e9,
        optimizer=dpadambc.add_dp_noise(1.0, key=jax.random.key(0)),
    )
    assert len(found.parameters) == len(TRAINED) and found.microbatch_size == 60


@pytest.mark.parametrize(
    "wrt, params",
    [
        (nnx.LoRAParam, net()),
        (None, nnx.Dropout(0.1, rngs=nnx.Rngs(0))),
        (nnx.Param, {"w": jnp.zeros(4)}),
    ],
    ids=["none of this kind", "no parameters", "no module"],
)
def test_a_choice_of_nothing_is_refused(wrt, params):
    loss = lambda params, x: x[0]
    for call in (
        lambda: fit(loss, params, wrt=wrt),
        lambda: dpadambc.per_example_grad(loss, wrt=wrt)(params, X),
        lambda: dpadambc.explain(loss, params, X[0], batch_size=2, wrt=wrt),
    ):
        with pytest.raises(ValueError, match="params"):
            call()


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(x)
        return nn.Dense(1)(x)[0]


VARIABLES = Linen().init(jax.random.key(0), X[0])


@pytest.mark.parametrize(
    "params",
    [
        VARIABLES,
        core.freeze(VARIABLES),
        {"encoder": VARIABLES, "head": jnp.zeros(3)},
        {"params": VARIABLES["params"], "cache": {"index": jnp.zeros(())}},
    ],
    ids=["dict", "FrozenDict", "within", "cache"],
)
def test_the_state_of_linen_layers_is_refused(params):
    loss = lambda params, x: Linen().apply(params, x) ** 2
    for call in (
        lambda: fit(loss, params),
        lambda: dpadambc.per_example_grad(loss)(params, X),
        lambda: dpadambc.clipped_grad(loss, l2_clip_norm=1.0, normalize_by=1.0)(
            params, X
        ),
        lambda: dpadambc.explain(loss, params, X[0], batch_size=2),
    ):
        with pytest.raises(TypeError, match="params"):
            call()


def test_the_way_out_that_the_message_names():
    loss = lambda params, others, x: Linen().apply({"params": params, **others}, x) ** 2
    others = {"batch_stats": VARIABLES["batch_stats"]}
    result = fit(loss, VARIABLES["params"], frozen=others)
    assert len(moved(VARIABLES["params"], result.params)) == 4


@pytest.mark.parametrize(
    "params",
    [
        {"params": VARIABLES["params"]},
        {"params": jnp.ones(4), "head": jnp.ones(4)},
        {"params": {"w": jnp.ones(4)}, "adapters": {"w": jnp.ones(4)}},
        {"cache": jnp.ones(4), "w": jnp.ones(4)},
        collections.OrderedDict(params={"w": jnp.ones(4)}),
    ],
    ids=["params alone", "arrays", "own names", "no params", "ordered"],
)
def test_trees_that_are_no_variables_of_linen_are_trained(params):
    step = training.Step(total, MECHANISM, optax.sgd(1.0))
    assert identity.traced_programs(step, params, None, (X,))
    trained, _ = modules.split(params)
    assert pure(trained).keys() == pure(params).keys()


def test_split_and_merge_are_inverse():
    model = net()
    for tree in (model, nnx.state(model), {"a": model, "b": jnp.ones(3)}, jnp.ones(3)):
        trained, rest = modules.split(tree)
        assert not moved(tree, modules.merge(trained, rest))
        same = jax.tree.structure(modules.merge(trained, rest))
        assert same == jax.tree.structure(tree)


@pytest.mark.parametrize("kind", [AxisType.Auto, common.slow(AxisType.Explicit)])
def test_a_module_that_is_split_over_devices(kind):
    mechanism = common.poisson_gaussian(
        noise_multiplier=0.0, sampling_prob=1.0, iterations=2, normalize_by=60.0
    )
    options = dict(mechanism=mechanism, optimizer=optax.sgd(1.0, momentum=0.9))
    model = net()
    one = fit(square, model, **options)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(kind,))
    model = jax.device_put(model, training.fully_sharded(model, mesh, "data"))
    data = training.Sharded((X,), NamedSharding(mesh, PartitionSpec("data")))
    two = fit(square, model, data, **options)
    assert isinstance(two.params, Net)
    kernel = two.params.out.kernel[...]
    moment = two.state.opt_state[0].trace["out"]["kernel"][...]
    assert kernel.sharding.spec[0] == moment.sharding.spec[0] == "data"
    expected = pure(one.params)
    for name, x in pure(two.params).items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-5, atol=1e-6)


class Writing(nnx.Module):
    """Layers that draw from a stream of their own, or keep statistics."""

    def __init__(self, layer, rngs):
        self.layer, self.out = layer, nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x, **options):
        return self.out(self.layer(x, **options))[0]


@pytest.mark.parametrize(
    ("layer", "options", "variable"),
    [
        (nnx.Dropout(0.5, rngs=nnx.Rngs(0)), {}, "count"),
        (nnx.BatchNorm(4, rngs=nnx.Rngs(0)), {}, "mean"),
        (nnx.Dropout(0.5, rngs=nnx.Rngs(0)), {"deterministic": True}, None),
        (nnx.Dropout(0.5, rngs=nnx.Rngs(0)), {"rngs": jax.random.key(0)}, None),
        (nnx.BatchNorm(4, rngs=nnx.Rngs(0)), {"use_running_average": True}, None),
        (nnx.LayerNorm(4, rngs=nnx.Rngs(0)), {}, None),
        (nnx.RNN(nnx.GRUCell(4, 4, rngs=nnx.Rngs(0))), {}, None),
    ],
)
def test_a_loss_writes_no_variable_that_is_not_trained(layer, options, variable):
    model, is_rnn = Writing(layer, nnx.Rngs(0)), isinstance(layer, nnx.RNN)
    rows = X[:, None] if is_rnn else X
    loss = lambda model, x: jnp.sum(model(x, **options) ** 2)
    frozen = lambda w, model, x: jnp.sum(w * model(x, **options))
    calls = (
        lambda: dpadambc.per_example_grad(loss)(model, rows),
        lambda: dpadambc.per_example_grad(loss, method="vmap")(model, rows),
        lambda: dpadambc.per_example_grad(frozen, batch_argnums=2)(1.0, model, rows),
        lambda: fit(loss, model, (rows,)),
        lambda: fit(frozen, 1.0, (rows,), frozen=model),
    )
    for call in calls:
        if variable is None:
            call()
        else:
            with pytest.raises(ValueError, match=variable):
                call()


def test_a_loss_may_change_its_arguments_and_record_what_it_likes():
    def loss(model, example):
        y = example.pop("y")
        model.out.seen = nnx.Intermediate(y)
        return (model(**example) - y) ** 2

    data = {"x": X, "y": X[:, 0]}
    model = net()
    grads = dpadambc.per_example_grad(loss)(model, data)
    plain = lambda model, example: (model(example["x"]) - example["y"]) ** 2
    expected = dpadambc.per_example_grad(plain)(model, data)
    np.testing.assert_array_equal(
        dpadambc.per_example_norms(grads), dpadambc.per_example_norms(expected)
    )


def test_a_loss_of_a_model_that_it_closes_over_trains_nothing():
    model = net()
    closed = lambda params, x: square(model, x)
    with pytest.raises(ValueError, match="closes over"):
        dpadambc.per_example_grad(closed)(net(), X)
    with pytest.raises(ValueError, match="closes over"):
        fit(closed, net())
    part = lambda params, x: square(model, x) * params["used"]  # near miss
    dpadambc.per_example_grad(part)({"used": 1.0, "unused": 1.0}, X)
