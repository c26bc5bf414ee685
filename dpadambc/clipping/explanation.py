"""The cost of the per-example gradients of a loss, before anything runs."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpadambc.clipping import kernels, memory
from dpadambc.clipping.plan import Plan, Programs, aligned, planned, readable
from dpadambc.core import leaves, validate
from dpadambc.core.gradient import PerExampleGradient, is_per_example
from dpadambc.core.per_example import Argnums, Arguments, per_example_grad
from dpadambc.engine import rounding, weighted
from dpadambc.engine.forms import Dense, Full

_NO_GRADIENT, _MATERIALIZED = Full.rule, "materialized"
_BEHIND_THE_NOISE = (
    "Leave the penalty out of the loss: its gradient is public, so it belongs behind"
    " the noise, where optax.add_decayed_weights adds exactly that of an L2 penalty,"
    " unclipped and at no cost to epsilon. See docs/recipes/masks.md."
)


@dataclasses.dataclass(frozen=True)
class ParameterCost:
    """The memory of one parameter's gradients.

    Attributes:
      name: the path of the parameter.
      shape: the shape of the parameter.
      rule: the method by which the norms are computed, as `explain` lists them.
      factored_bytes: the memory of the factors, for the batch.
      materialized_bytes: the memory of one gradient for each example of the batch.
      is_formed: whether it is a kernel, and its gradients are arrays although they are
        products: the loss multiplies the data by a function of the kernel.
      is_looping: whether the loss multiplies the data by it in a loop of unknown
        length, such as the steps of an ODE solver.
      is_penalized: whether it is a kernel that occurs in a term of the loss without
        data.
    """

    name: str
    shape: tuple[int, ...]
    rule: str
    factored_bytes: int
    materialized_bytes: int
    is_formed: bool
    is_looping: bool
    is_penalized: bool

    @property
    def kind(self) -> tuple[Any, ...]:
        """A key that is equal for the parameters of repeated layers."""
        name = re.sub(r"\d+", "*", self.name)
        return name, self.shape, self.rule, self.factored_bytes, self.is_penalized


@dataclasses.dataclass(frozen=True)
class Products:
    """The products of the clip on one platform: see `engine.rounding`.

    Attributes:
      platform: "cuda", "tpu" or "cpu".
      algorithms: the algorithms requested from JAX, for the dtypes of the model.
      given_away: the fraction of C that the bound on rounding takes from the clipped
        gradient of the example, if it is longer than C; None for shapes.
    """

    platform: str
    algorithms: tuple[str, ...]
    given_away: float | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of `explain`, which prints as tables.

    Attributes:
      parameters: one row for each parameter.
      batch_size: the number of examples that the table is for.
      factored_bytes: the temporaries of the clipped gradient of the batch, compiled for
        the default device; with an optimizer, of the step.
      is_compiled: whether the compiler states the memory; else `factored_bytes` is the
        sum of all distinct factors.
      ordinary_bytes: the temporaries of the gradient, or step, without privacy; None if
        the compiler does not state them, or if JAX cannot map the loss over a batch.
      without_gradient: a sentence for each parameter without influence on the loss.
      costly: a sentence for each kernel whose gradients are materialized; else one
        where the ordinary gradient, itself included, takes less than half of the
        memory.
      products: the products of the clip, one row for each platform.
      plan: the programs that were compared, if there is a memory limit.
    """

    parameters: tuple[ParameterCost, ...]
    batch_size: int
    factored_bytes: int
    is_compiled: bool
    ordinary_bytes: int | None
    without_gradient: tuple[str, ...]
    costly: tuple[str, ...]
    products: tuple[Products, ...]
    plan: Plan | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings: `without_gradient` and `costly`."""
        return (*self.without_gradient, *self.costly)

    @property
    def rules(self) -> dict[str, str]:
        """The rule of each parameter, by name."""
        return {row.name: row.rule for row in self.parameters}

    @property
    def materialized_bytes(self) -> int:
        """The bytes of one gradient for each example and parameter."""
        return sum(row.materialized_bytes for row in self.parameters)

    @property
    def microbatch_size(self) -> int:
        """The largest microbatch that stays within the memory limit.

        Raises:
          ValueError: if none does, or there was no limit to plan for.
        """
        if self.plan is None:
            raise ValueError(
                "Expected a limit to plan for: explain(..., memory_limit=bytes)."
            )
        if self.plan.chosen is None:
            raise ValueError(self.plan.reason)
        return self.plan.chosen.microbatch_size

    def __str__(self) -> str:
        header = "parameter", "shape", "rule", "factored", "materialized"
        of_all = readable(self.factored_bytes), readable(self.materialized_bytes)
        label = "all, as compiled" if self.is_compiled else "all, shared factors once"
        totals = [(label, "", "", *of_all)]
        if self.ordinary_bytes is not None:
            without = readable(self.ordinary_bytes)
            totals.append(("without privacy", "", "", without, ""))
        rows = aligned([header, *_folded(self.parameters), *totals], num_left=3)
        warned = (f"warning: {text}" for text in self.warnings)
        share = lambda x: "-" if x is None else f"{x:.2%}"
        row = lambda x: (x.platform, ", ".join(x.algorithms), share(x.given_away))
        header = "platform", "products of the clip", "of C given away"
        products = aligned([header, *map(row, self.products)], num_left=2)
        tables = *rows, *warned, "", *products
        plan = () if self.plan is None else ("", str(self.plan))
        return "\n".join((f"batch of {self.batch_size}", *tables, *plan))


def _folded(parameters: Sequence[ParameterCost]) -> list[tuple[str, ...]]:
    """Returns a row for each kind of parameter, the most expensive first."""
    kinds = sorted(_by_kind(parameters), key=lambda kind: _total(kind[1]), reverse=True)
    return [
        (name, str(few[0].shape), few[0].rule, *map(readable, _total(few)))
        for name, few in kinds
    ]


def _num_bytes(leaf: PerExampleGradient) -> dict[int, int]:
    """Returns the bytes of each open array of factors, by the array's identity."""
    pairs = zip(jax.tree.leaves(leaf.sealed), leaf.dtypes, strict=True)
    return {id(x): math.prod(x.shape) * jnp.dtype(d).itemsize for x, d in pairs}


def _has_arrays(grad: Any) -> bool:
    """Returns whether a part is an array, but not because that is the smaller form."""
    is_array = lambda x: isinstance(x, Dense)
    parts = jax.tree.leaves(grad, is_leaf=is_array)
    return any(is_array(part) and part.origin != "direct" for part in parts)


def _cost(
    name: str, leaf: PerExampleGradient, batch_size: int, uses: kernels.Uses
) -> ParameterCost:
    is_kernel = name in uses.multiplying
    is_matrix = sum(n > 1 for n in leaf.shape) > 1
    return ParameterCost(
        name=name,
        shape=leaf.shape,
        rule=leaf.rule,
        factored_bytes=sum(_num_bytes(leaf).values()),
        materialized_bytes=batch_size * math.prod(leaf.shape) * leaf.dtype.itemsize,
        is_formed=is_kernel and is_matrix and _has_arrays(leaf.sealed),
        is_looping=name in uses.looping,
        is_penalized=is_kernel and name in uses.penalized,
    )


def _by_kind(rows: Sequence[ParameterCost]) -> list[tuple[str, list[ParameterCost]]]:
    """Groups the parameters of repeated layers, with a name for each group."""
    kinds: dict[Any, list[ParameterCost]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    return [
        (few[0].name if len(few) == 1 else f"{few[0].kind[0]} ({len(few)})", few)
        for few in kinds.values()
    ]


def _total(rows: Sequence[ParameterCost]) -> tuple[int, int]:
    factored = sum(row.factored_bytes for row in rows)
    return factored, sum(row.materialized_bytes for row in rows)


def _costly(rows: list[ParameterCost]) -> tuple[str, ...]:
    sentences = []
    for name, few in _by_kind(rows):
        rule, (factored, materialized) = few[0].rule, _total(few)
        if _MATERIALIZED in rule and few[0].is_penalized:
            sentences.append(
                f"{name} is in a penalty, so a gradient is formed for each example:"
                f" {readable(materialized)}. {_BEHIND_THE_NOISE}"
            )
        elif _MATERIALIZED in rule:
            sentences.append(
                f"{name} has no rule for how the loss uses it ({rule}), so a gradient"
                f" is formed for each example: {readable(materialized)}."
            )
        elif few[0].is_formed and few[0].is_looping:
            sentences.append(
                f"{name} is formed for each example, in a loop of unknown length"
                f" ({rule}): {readable(factored)}. A jax.lax.scan over so many steps"
                " keeps its factors."
            )
        elif few[0].is_formed:
            sentences.append(
                f"{name} is formed for each example, as reverse mode has it ({rule}):"
                f" {readable(factored)}. The loss multiplies the data by a function of"
                " it; change the activations instead, where that is the same."
            )
    return tuple(sentences)


def _more_than_twice(
    private: int | None, ordinary: int | None, gradient: float
) -> tuple[str, ...]:
    """Returns a sentence where the ordinary gradient takes under half of the memory."""
    if private is None or ordinary is None or private <= 2 * (ordinary + gradient):
        return ()
    return (
        f"The clipped gradient takes {readable(private)}, and the ordinary one"
        f" {readable(ordinary)}. If the loss makes a kernel of parameters, a @ b say,"
        " multiply the data by one after the other, where that is the same; else take"
        " microbatches.",
    )


def explain(
    loss_fn: Callable[..., Any],
    *args: Any,
    batch_size: int,
    argnums: Argnums = 0,
    has_aux: bool = False,
    batch_argnums: Argnums | None = None,
    prng_argnum: int | None = None,
    memory_limit: float | None = None,
    optimizer: optax.GradientTransformation | None = None,
    precision: rounding.Precision = None,
    wrt: Any = None,
) -> Explanation:
    """Explains the form and the memory of the per-example gradients of a loss.

    It compiles the gradient of the batch with and without privacy, for the memory of
    the two on the default device, and does not run it. With a memory limit it compiles
    more, to find the largest `microbatch_size` that fits. If the arguments are arrays,
    it computes the gradient of the one example, to state the fraction that the bound on
    rounding takes.

    The rules: `gram` and `outer product` keep the two factors of a kernel's gradient,
    `lookup` ids and rows, `convolution: gram` the input and the output gradient.
    `direct` is a gradient that is materialized because it is about as small as its
    factors. The name of a primitive (`reduce_sum`, `mul`) is a gradient that reverse
    mode materializes in any case; for a kernel it is one of the `warnings`. So is
    `materialized: ...`, a gradient without a rule.

    Args:
      loss_fn: the loss of one example; see `per_example_grad`.
      *args: the arguments of `loss_fn` for *one* example, arrays or
        `jax.ShapeDtypeStruct`.
      batch_size: the number of examples for which the bytes are counted.
      argnums: which positional arguments are differentiated.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      batch_argnums: which positional arguments will be batches; by default all others.
      prng_argnum: which positional argument is a PRNG key, if any.
      memory_limit: the limit in bytes, for arguments, outputs and temporaries.
      optimizer: the optimizer of the clipped gradient, such as
        `optax.chain(add_dp_noise(mechanism.noise_stddev, key=key), adam_bc(...))`, to
        plan the memory of the whole step, which updates parameters and state in place;
        by default the plan is for the gradient. A plan knows no mechanism, so give the
        noise its level.
      precision: the precision of products in the clip; see `clip_per_example`.
      wrt: which variables of modules of Flax NNX; see `per_example_grad`.

    Returns:
      An `Explanation`: `print` it, or read its attributes. One row stands for layers
      that are alike, and says how many. With a memory limit the plan compares the
      chosen microbatch with its neighbors, the ordinary gradient and `jax.vmap`.

    Raises:
      ValueError: as `per_example_grad`, and for a `precision` without a bound;
        `microbatch_size` does, if not even one example fits.
      TypeError: as `per_example_grad`.
      RuntimeError: if there is a limit, and the compiler does not state the memory.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> def loss_fn(params, x):
      ...     return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]))
      >>> params = {"w": jnp.zeros((784, 1024)), "b": jnp.zeros(1024)}
      >>> found = dpadambc.explain(loss_fn, params, jnp.ones(784), batch_size=256)
      >>> print(found)  # doctest: +ELLIPSIS
      batch of 256
      parameter         shape        rule           factored  materialized
      ['w']             (784, 1024)  outer product   1.85 MB        822 MB
      ['b']             (1024,)      direct          1.05 MB       1.05 MB
      all, as compiled                               4... MB        823 MB
      without privacy                                1... MB
      <BLANKLINE>
      platform  products of the clip  of C given away
      cuda      TF32_TF32_F32                   0.20%
      tpu       BF16_BF16_F32                   0.39%
      cpu       HIGHEST                         0.00%
    """
    validate.count(least=1, batch_size=batch_size)
    validate.precision(precision)
    if memory_limit is not None:
        validate.positive(memory_limit=memory_limit)
    elif optimizer is not None:
        raise ValueError("Expected a memory_limit to plan for, with an optimizer.")
    arguments = Arguments(argnums, batch_argnums, prng_argnum, wrt)
    grad_fn = per_example_grad(
        loss_fn,
        argnums,
        has_aux,
        batch_argnums=batch_argnums,
        prng_argnum=prng_argnum,
        wrt=wrt,
    )
    leaves.check(args=args)
    rows, distinct, dtypes = [], {}, set()

    def trace(*batched):
        grads = grad_fn(*batched)
        grads = grads[0] if has_aux else grads
        uses = kernels.uses(loss_fn, arguments, args)
        paths = jax.tree_util.tree_leaves_with_path(grads, is_leaf=is_per_example)
        for path, leaf in paths:
            name = jax.tree_util.keystr(path) or "params"
            rows.append(_cost(name, leaf, batch_size, uses))
            distinct.update(_num_bytes(leaf))
            of_numbers = [d for d in leaf.dtypes if jnp.issubdtype(d, jnp.floating)]
            dtypes.add(jnp.result_type(*of_numbers))
        distinct["bytes"] = sum(distinct.values())

    shape_of = lambda x: (batch_size, *jnp.shape(x))
    several = lambda x: jax.ShapeDtypeStruct(shape_of(x), jnp.result_type(x))
    batched = [
        jax.tree.map(several, x) if i in arguments.batched(args) else x
        for i, x in enumerate(args)
    ]
    jax.eval_shape(trace, *batched)
    programs = Programs(
        loss_fn, arguments, has_aux, tuple(batched), batch_size, optimizer, precision
    )
    plan = None if memory_limit is None else planned(programs, memory_limit)
    private, ordinary = _temporaries(programs, plan, rows)
    gradient = sum(row.materialized_bytes for row in rows) / batch_size
    without_gradient = tuple(
        f"{row.name} gets no gradient: the loss does not depend on it. Noise will move"
        " it all the same; do not train it."
        for row in rows
        if row.rule == _NO_GRADIENT
    )
    return Explanation(
        parameters=tuple(rows),
        batch_size=batch_size,
        factored_bytes=distinct["bytes"] if private is None else private,
        is_compiled=private is not None,
        ordinary_bytes=ordinary,
        without_gradient=without_gradient,
        costly=_costly(rows) or _more_than_twice(private, ordinary, gradient),
        products=_products(grad_fn, arguments, args, dtypes, precision),
        plan=plan,
    )


# Underflowing squares set the bound on a gradient of zero.
_UNSEEN = 1e-15
# The length of an axis beyond which XLA aborts the process in a product.
_LONGEST = 2**31


def _temporaries(
    programs: Programs, plan: Plan | None, rows: Sequence[ParameterCost]
) -> tuple[int | None, int | None]:
    """Returns the temporaries with and without privacy, as far as they are known."""
    if plan is not None:
        return plan.factored[0].temporary_bytes, plan.ordinary.temporary_bytes
    held_whole = (x for x in rows if x.factored_bytes >= x.materialized_bytes)
    is_too_long = any(math.prod(row.shape) >= _LONGEST for row in held_whole)
    if is_too_long or not memory.is_stated_by_compiler():
        return None, None
    private = programs.factored(programs.batch_size).temporary_bytes
    try:
        return private, programs.ordinary().temporary_bytes
    except NotImplementedError:  # JAX cannot map all losses over a batch
        return private, None


def _products(
    grad_fn: Callable[..., Any],
    parts: Arguments,
    args: Any,
    dtypes: Any,
    precision: Any,
) -> tuple[Products, ...]:
    """Returns the rows of all platforms: their constants, in exact arithmetic."""
    platforms = {**rounding.by_platform(precision), "cpu": rounding.FULL}

    @jax.jit
    def squares(*args):
        grads = jax.tree.leaves(grad_fn(*args), is_leaf=is_per_example)
        opened = [leaf.open() for leaf in grads if is_per_example(leaf)]
        exact = dict(algorithm=jax.lax.Precision.HIGHEST, dtype=None)
        unit = lambda unit: dataclasses.replace(unit, **exact)
        in_exact = lambda units: rounding.Units(unit(units.wide), unit(units.narrow))
        of = lambda units: weighted.squared_norms(in_exact(units), opened)[0]
        return jax.tree.map(of, platforms)

    shares: dict[str, Any] = dict.fromkeys(platforms)
    if not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args)):
        alone, batched = lambda x: jnp.asarray(x)[None], parts.batched(args)
        of = lambda i, x: jax.tree.map(alone, x) if i in batched else x
        each = squares(*(of(i, x) for i, x in enumerate(args)))
        bounds = {name: float(x) ** 0.5 for name, x in each.items()}
        share = lambda x: 1 - bounds["cpu"] / x if x > _UNSEEN else 0.0
        shares = {name: share(x) for name, x in bounds.items()}
    names = lambda units: sorted({str(units.of(dtype).algorithm) for dtype in dtypes})
    rows = platforms.items()
    return tuple(Products(name, tuple(names(x)), shares[name]) for name, x in rows)
