"""The noise in all that a step keeps, in the state or in a checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.audit import draws
from dpadambc.audit.finding import Finding, combined, not_tested, within
from dpadambc.audit.flow import Label, label_of_public
from dpadambc.audit.noise_tests import UNFOLLOWED
from dpadambc.audit.pipeline import Pipeline
from dpadambc.audit.recorder import NotRecordable
from dpadambc.audit.steps import NotTraceable
from dpadambc.audit.whole_step import WholeStep, whole_step

_CHECK = "state"
_KEYS = 24  # all of them leave the sign of a noised number once in 2**24 times
_FURTHER = 1e3


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
        return of_whole_step(whole_step(pipeline))
    except (NotTraceable, NotRecordable) as error:
        return not_tested(_CHECK, f"{error}")


def of_whole_step(step: WholeStep) -> Finding:
    """The finding for a step that has been traced."""
    followed = step.measured.followed
    bare = [path.removeprefix("[1]") for path in followed.paths(Label.DATA)]
    total = f"{len(followed.labels)} arrays"
    sentence = f"All {total} that are kept have noise, or nothing of the data."
    if bare:
        sentence = (
            f"{bare[0]} is made of the data without noise ({len(bare)} of {total})."
        )
    fails_if = "fails if an array that the step returns is made of examples alone"
    of_arrays = within(_CHECK, len(bare), 0, sentence, fails_if)
    if bare:
        return of_arrays
    if followed.paths(Label.OPAQUE):
        return not_tested(_CHECK, UNFOLLOWED)
    parts = [of_arrays]
    if step.pipeline.takes_mask and step.measured.noise:
        parts.append(_replayed(step))
    if followed.tells_host:
        reason = "a callback tells the host a value without noise; its use is unknown."
        parts.append(not_tested(_CHECK, reason))
    return combined(_CHECK, parts)


def _replayed(step: WholeStep) -> Finding:
    """Whether all that follows the data follows the keys: noise may cancel on its way.

    Compared with the step on no data at all, so that nothing outweighs the noise.
    """
    found, init = step.measured, jax.jit(step.pipeline.init)
    private, program = found.followed.paths(Label.PRIVATE), jax.jit(found.steps.step)

    def kept(state, data):
        leaves = jax.tree.leaves(program(state, data))
        is_wide = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and x.itemsize > 2
        named = zip(found.followed.labels, leaves, strict=True)
        own = ((p, x) for p, x in named if p in private and is_wide(x))
        return {p: np.asarray(x, float) for p, x in own}

    def with_keys_of(other):
        choose = lambda x, y: y if label_of_public(x) == Label.NOISE else x
        return jax.tree.map(choose, found.state, other)

    empty, *others = found.neighbors
    start, by_data = kept(found.state, empty), [kept(found.state, x) for x in others]
    keys = jax.random.split(jax.random.key(1), _KEYS)
    by_key = [kept(with_keys_of(init(key)), empty) for key in keys]
    apart = lambda ends, path: max(
        np.nan_to_num(np.linalg.norm(end[path] - start[path]), posinf=0.0)
        for end in ends
    )
    z = min(draws.multiplier(found.mechanism, 0), 1.0)
    bare = [
        path.removeprefix("[1]")
        for path in start
        if apart(by_data, path) * z > _FURTHER * apart(by_key, path)
    ]
    sentence = "All arrays that follow the data follow the keys of the noise."
    if bare:
        sentence = f"{bare[0]} follows the data, but hardly the keys: it has no noise."
    fails_if = f"fails if data move an array {_FURTHER:g} times as far as {_KEYS} keys"
    return within(_CHECK, len(bare), 0, sentence, fails_if)
