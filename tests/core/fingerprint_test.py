"""Programs that differ have records that differ."""

import jax
import jax.numpy as jnp

from dpadambc.core import fingerprint


def difference_of(first, second):
    """Two of sixty values, named b to z and then ba to bz and so on when printed."""

    def program(x):
        values = [x]
        for _ in range(60):
            values.append(jnp.sin(values[-1]))
        return values[1 + first] - values[1 + second]

    return program


def test_the_order_of_operands_is_part_of_a_program():
    """Where a space is all that parts their names: `sub b bb` and `sub bb b`."""
    one, other = difference_of(0, 26), difference_of(26, 0)
    texts = [str(jax.make_jaxpr(f)(1.0)) for f in (one, other)]
    # The control: without spaces, the two are one text.
    assert len({"".join(text.split()) for text in texts}) == 1
    checksum = lambda program: fingerprint.of_traced(jax.make_jaxpr(program)(1.0))
    assert checksum(one) != checksum(other)
    assert checksum(one) == checksum(one)
