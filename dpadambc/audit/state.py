"""What is kept of a step, in the state or in a checkpoint, has noise."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.audit import draws as _drawn
from dpadambc.audit import examined as _examined
from dpadambc.audit import flow as _flow
from dpadambc.audit import noise_tests as _noise_tests
from dpadambc.audit import recorder as _recorder
from dpadambc.audit import steps as _steps
from dpadambc.audit.finding import Finding, combined, not_tested, within
from dpadambc.audit.pipeline import Pipeline

_CHECK = "state"


def state(pipeline: Pipeline) -> Finding:
    """Traces the step: all that depends on the examples must pass through the noise.

    It follows every value that depends on an example to the additions of noise, and
    past them to the outputs of the step: parameters, moments, averages, all that a
    checkpoint would hold. An addition counts if its noise is of the order that the
    mechanism claims; `noise` and `sensitivity` say whether it is enough. Then it
    replays the step with other data and with other keys: an output that changes with
    the data must change with the keys, unless the noise is taken out again. (A step
    that takes no mask has no batch without examples to begin from, and is not
    replayed.)

    Args:
      pipeline: whose step is traced.

    Returns:
      A `Finding`: how many arrays have no noise, and the path of the first. *Not
      tested* if the step cannot be traced, or a callback tells the host of examples.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import audit
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.1,
      ...     iterations=100, normalize_by=6)
      >>> keep_norm = optax.GradientTransformation(
      ...     lambda params: jnp.zeros([]),
      ...     lambda g, _, params: (g, optax.tree.norm(dpadambc.materialize(g))))
      >>> def make_optimizer(key):
      ...     clip = dpadambc.clip_per_example(1.0, normalize_by=6)
      ...     noise = dpadambc.add_dp_noise(mechanism, key=key)
      ...     return optax.chain(clip, keep_norm, noise, optax.sgd(0.1))
      >>> pipeline = audit.Pipeline.of_chain(
      ...     lambda w, x: jnp.tanh(w @ x), jnp.zeros(50), (jnp.ones((64, 50)),),
      ...     mechanism, make_optimizer)
      >>> print(audit.state(pipeline))
      FAIL        state: [2][1] is made of the data without noise (1 of 5 arrays).
    """
    try:
        return of_examined(_examined.examine(pipeline))
    except (_steps.NotTraceable, _recorder.NotRecordable) as error:
        return not_tested(_CHECK, f"{error}")


def of_examined(found: _examined.Examined) -> Finding:
    """The finding for a step that has been traced."""
    followed = found.followed
    bare = [path.removeprefix("[1]") for path in followed.of(_flow.Label.DATA)]
    opaque = followed.of(_flow.Label.OPAQUE)
    fails_if = "fails if an array that the step returns is made of examples alone"
    total = f"{len(followed.labels)} arrays"
    sentence = (
        f"{bare[0]} is made of the data without noise ({len(bare)} of {total})."
        if bare
        else f"All {total} that are kept have noise, or nothing of the data."
    )
    of_arrays = within(_CHECK, len(bare), 0, sentence, fails_if)
    if bare:
        return of_arrays
    if opaque:
        return not_tested(_CHECK, _noise_tests.UNFOLLOWED)
    parts = [of_arrays]
    if found.pipeline.takes_mask and found.noise:
        parts.append(_replayed(found))
    if followed.tells_host:
        told = "a callback tells the host what has no noise; what it does is not seen."
        parts.append(not_tested(_CHECK, told))
    return combined(_CHECK, parts)


# All of them leave the sign of a noised number as it was once in 2**24 times.
_KEYS = 24
_FURTHER = 1e3


def _with_keys_of(state: Any, other: Any) -> Any:
    """The state with the keys of another."""
    choose = lambda x, y: y if _flow.label_of_public(x) == _flow.Label.NOISE else x
    return jax.tree.map(choose, state, other)


def _replayed(found: _examined.Examined) -> Finding:
    """Whether what follows the data follows the keys too: noise may cancel on its way.

    Compared with the step on no data at all, so that nothing outweighs the noise.
    """
    private = found.followed.of(_flow.Label.PRIVATE)
    step = jax.jit(found.steps.step)
    kept = lambda state, data: {
        path: np.asarray(x, float)
        for path, x in zip(
            found.followed.labels, jax.tree.leaves(step(state, data)), strict=True
        )
        if path in private and jnp.issubdtype(x.dtype, jnp.floating) and x.itemsize > 2
    }
    empty, *others = found.neighbors
    start = kept(found.state, empty)
    by_data = [kept(found.state, data) for data in others]
    init, keys = (
        jax.jit(found.pipeline.init),
        jax.random.split(jax.random.key(1), _KEYS),
    )
    by_key = [kept(_with_keys_of(found.state, init(key)), empty) for key in keys]
    apart = lambda ends, path: max(
        np.nan_to_num(np.linalg.norm(end[path] - start[path]), posinf=0.0)
        for end in ends
    )
    z = _drawn.multiplier(found.pipeline.mechanism, 0)
    bare = [
        path.removeprefix("[1]")
        for path in start
        if apart(by_data, path) * min(z, 1.0) > _FURTHER * apart(by_key, path)
    ]
    sentence = (
        f"{bare[0]} follows the data, but hardly the keys: the noise is not in it."
        if bare
        else "All arrays that follow the data follow the keys of the noise."
    )
    fails_if = (
        f"fails if an array moves {_FURTHER:g} times as far with the data as with any"
        f" of {_KEYS} keys"
    )
    return within(_CHECK, len(bare), 0, sentence, fails_if)
