"""The argument names of mechanisms, and advice for the wrong ones."""

import functools
import inspect
import types
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import dp_accounting
import optax

T = TypeVar("T")

IN_PLACE = ("epochs", "batch_size", "num_examples")


class PublicNumbers(TypedDict, total=False):
    """The fields of all mechanisms, and the numbers in place of some of them."""

    l2_clip_norm: float | None
    noise_multiplier: float | optax.Schedule | None
    sampling_prob: float | None
    iterations: int | None
    epochs: float | None
    batch_size: float | None
    num_examples: int | None
    normalize_by: float | None
    batches_per_epoch: int | None
    participations: int | None
    truncated_batch_size: int | None
    max_terms: int | None
    strategy_coefficients: tuple[float, ...] | None
    noising_coefficients: tuple[float, ...] | None
    neighboring_relation: dp_accounting.NeighboringRelation | None
    clip_rule: Any


_RENAMED = {
    **dict.fromkeys(("clip_norm", "l2_norm_clip", "max_grad_norm"), "l2_clip_norm"),
    **{"lr": "learning_rate", "epsilon": "target_epsilon", "delta": "target_delta"},
}
_NEEDED = {
    "key": "Take training.secret_key(), another for each run.",
    "target_delta": "Take well below 1 / num_examples, such as 1e-6 of 100,000.",
}
_OF_STEPS = ("epochs", "num_epochs", "batch_size", "iterations", "steps", "num_steps")


def _refuse(name: str, known: Collection[str]) -> None:
    """Raises for a name that stands for a known one, or for a number of the mechanism.

    Python raises for all others.
    """
    if (right := _RENAMED.get(name)) in known:
        raise TypeError(f"Expected {right}=, got {name}=. Rename it.")
    if name == "noise_multiplier" and "noise_stddev" in known:
        raise TypeError(
            "Expected noise_stddev=, got noise_multiplier=. Give the mechanism, which"
            " knows the sensitivity and the normalizer."
        )
    if name in _OF_STEPS and {"mechanism", "iterations"} & {*known}:
        raise TypeError(
            f"Expected the steps and the sampling as fields of the mechanism, got"
            f" {name}=. Give it iterations = epochs * num_examples / batch_size, or"
            " make it by of_epochs or calibrate, which take epochs, batch_size and"
            " num_examples."
        )


def explained(called: T) -> T:
    """Wraps a function or a class, so that it explains frequent wrong names."""
    made: Any = called
    call = made.__init__ if isinstance(made, type) else made
    known = inspect.signature(call).parameters
    needed = {name for name, x in known.items() if x.kind == x.KEYWORD_ONLY}
    needed -= {name for name, x in known.items() if x.default is not x.empty}

    @functools.wraps(call)
    def checked(*args: Any, **named: Any) -> Any:
        for name in named.keys() - known:
            _refuse(name, known)
        for name in sorted(_NEEDED.keys() & needed - named.keys()):
            raise TypeError(f"Expected {name}=, got none. {_NEEDED[name]}")
        return call(*args, **named)

    if isinstance(made, type):
        made.__init__ = checked
        return called
    return cast(Any, checked)


def _signature(function: Any, kind: type) -> inspect.Signature:
    """Joins the keywords of a class method with the fields of the class, optional."""
    first, *own = inspect.signature(function).parameters.values()
    fields = inspect.signature(kind).parameters
    found = {x.name: x for x in own if x.kind == inspect.Parameter.KEYWORD_ONLY}
    for name in (*fields, *IN_PLACE):
        hint = PublicNumbers.__annotations__.get(name)
        field = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint)
        field = fields.get(name, field)
        is_needed = field.default is inspect.Parameter.empty
        found.setdefault(name, field.replace(default=None) if is_needed else field)
    return inspect.Signature([first, *found.values()], return_annotation=kind)


if TYPE_CHECKING:
    of_fields = classmethod
else:

    class of_fields(classmethod):
        """A class method whose signature shows the fields of the class."""

        def __get__(self, instance, kind=None):
            function, kind = self.__func__, kind or type(instance)

            @functools.wraps(function)
            def made(*args, **named):
                return function(*args, **named)

            made.__signature__ = _signature(function, kind)
            del made.__wrapped__  # its source has fewer defaults
            return types.MethodType(explained(made), kind)
