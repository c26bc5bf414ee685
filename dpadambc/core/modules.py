"""The trained part of the parameters, where a module of Flax has other variables.

A module of Flax NNX holds its weights together with running statistics, counts and
keys. `nnx.grad` differentiates the weights, and so does this library: the rest is an
argument that all examples share, gets no noise and stays as it is. The variables of
Flax Linen are plain dictionaries, so those of a layer's state are refused by their
names.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

# The names that layers of Flax Linen have for variables that no gradient trains.
_STATE_OF_LINEN = ("batch_stats", "cache", "intermediates", "perturbations")


class Rest(NamedTuple):
    """All but the trained variables of a module; empty for an array.

    Attributes:
      graph: the module without variables, an `nnx.GraphDef`.
      variables: the variables that are not trained, an `nnx.State`.
    """

    graph: Any = None
    variables: Any = None


def _is_rest(x: Any) -> bool:
    return isinstance(x, Rest)


def _nnx() -> Any:
    """Returns the module `flax.nnx`, where anything has imported it."""
    return sys.modules.get("flax.nnx")


def _is_node(x: Any) -> bool:
    """Returns whether a node of a tree is a module, variable or state of Flax NNX.

    A state of arrays alone, as `nnx.as_pure` makes it, is a tree like any other.
    """
    if (nnx := _nnx()) is None:
        return False
    is_variable = lambda x: isinstance(x, nnx.Variable)
    if isinstance(x, nnx.State):
        return any(map(is_variable, jax.tree.leaves(x, is_leaf=is_variable)))
    return is_variable(x) or isinstance(x, nnx.Pytree)


def _parts(node: Any, wrt: Any) -> tuple[Any, Rest]:
    """Splits a node into its trained variables and the rest; an array is trained."""
    if not _is_node(node):
        return node, Rest()
    nnx = _nnx()
    graph, trained, rest = nnx.split(node, nnx.Param if wrt is None else wrt, ...)
    return trained, Rest(graph, rest)


def _refuse_state_of_linen(params: Any) -> None:
    is_mapping = lambda x: isinstance(x, Mapping) and "params" in x
    state = lambda x: sorted(x.keys() & _STATE_OF_LINEN) if is_mapping(x) else []
    leaves = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda x: bool(state(x))
    )
    for path, found in leaves:
        if names := state(found):
            raise TypeError(
                f"Expected params{jax.tree_util.keystr(path)} without the collections"
                f" {names} of Flax Linen, which no gradient trains. Give"
                " variables['params'] as params, and the others as frozen, or as an"
                " argument that is no batch."
            )


def split(params: Any, wrt: Any = None) -> tuple[Any, Any]:
    """Splits the parameters into the trained part and the rest.

    Args:
      params: any pytree, in which modules, states and variables of Flax NNX may be.
      wrt: which of their variables are trained, as in `nnx.grad`: a filter of Flax;
        `nnx.Param` by default. Arrays outside of modules are trained.

    Returns:
      The same tree with an `nnx.State` of the trained variables in place of a module,
      as `nnx.grad` returns; and a pytree for `merge`.

    Raises:
      ValueError: if no variable is trained, or there is none that `wrt` could choose.
      TypeError: if there are variables of Flax Linen that no gradient trains.
    """
    _refuse_state_of_linen(params)
    nodes, structure = jax.tree.flatten(params, is_leaf=_is_node)
    parts = [_parts(node, wrt) for node in nodes]
    has_nodes = any(map(_is_node, nodes))
    if has_nodes and not jax.tree.leaves([trained for trained, _ in parts]):
        raise ValueError(
            "Expected params with variables to train, nnx.Param or those that wrt says,"
            f" got none for wrt={wrt}."
        )
    if wrt is not None and not has_nodes:
        raise ValueError(
            f"Expected params of Flax NNX, since wrt={wrt} chooses among its variables,"
            " got none. Give what is not trained as another argument."
        )
    trained = structure.unflatten([part for part, _ in parts])
    return trained, structure.unflatten([rest for _, rest in parts])


def merge(trained: Any, rest: Any) -> Any:
    """Merges the two parts that `split` returned; the trained part may be new.

    Variables are copied: those of one trace cannot hold arrays of another.
    """

    def merged(rest: Rest, trained: Any) -> Any:
        if rest.graph is None:
            return trained
        return _nnx().merge(rest.graph, trained, rest.variables, copy=True)

    return jax.tree.map(merged, rest, trained, is_leaf=_is_rest)


def names(params: Any, wrt: Any = None) -> list[str]:
    """Returns the paths of the parameters that are trained."""
    leaves = jax.tree_util.tree_leaves_with_path(split(params, wrt)[0])
    return [jax.tree_util.keystr(path) for path, _ in leaves]


def split_arguments(
    args: Sequence[Any], numbers: Sequence[int], wrt: Any
) -> tuple[list[Any], Any]:
    """Splits the arguments of a loss, some of which are parameters, by `split`."""
    trained, rest = split({i: args[i] for i in numbers}, wrt)
    return [trained.get(i, x) for i, x in enumerate(args)], rest


def merge_arguments(args: Sequence[Any], rest: Any) -> list[Any]:
    """Merges the arguments that `split_arguments` split, with new parameters."""
    whole = merge({i: args[i] for i in rest}, rest)
    return [whole.get(i, x) for i, x in enumerate(args)]


def not_trained(args: Sequence[Any], wrt: Any) -> dict[Any, Any]:
    """Returns the variables of modules in arguments that are not trained, by path.

    It leaves out the draws of `nnx.RNN` for its first carry, which is zero.
    """
    nodes = list(filter(_is_node, jax.tree.leaves(args, is_leaf=_is_node)))
    if nodes:
        nnx = _nnx()
        wrt = nnx.Any(nnx.Param if wrt is None else wrt, nnx.WithTag("carry"))
    variables = [_parts(node, wrt)[1].variables for node in nodes]
    return dict(jax.tree_util.tree_leaves_with_path(variables))


def refuse_written(before: dict[Any, Any], after: dict[Any, Any]) -> None:
    """Raises if a loss wrote a variable that is not trained: it would be lost."""
    written = [path[1:] for path, x in before.items() if after.get(path, x) is not x]
    if written:
        names = ", ".join(map(jax.tree_util.keystr, written))
        raise ValueError(
            f"Expected loss_fn to write no variable, got one that writes {names}. Call"
            " nnx.Dropout with rngs=key, and take nnx.BatchNorm with"
            " use_running_average=True, or nnx.GroupNorm."
        )


def refuse_shared(params: Any) -> None:
    """Raises if a variable is in several places of a module, which JAX would separate.

    `jax.jit` returns a module as a tree in which each place has its own variable.
    """
    trees = jax.tree.leaves(params, is_leaf=_is_node)
    for tree in filter(_is_node, trees):
        if len(jax.tree.leaves(tree)) != len(jax.tree.leaves(_nnx().split(tree)[1])):
            raise ValueError(
                "Expected params with each variable in one place, got a module that"
                " shares some. Split it, graph, state = nnx.split(module), train state,"
                " and merge them in the loss."
            )
