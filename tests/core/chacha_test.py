"""The cipher is the published one, and its kind of key goes where JAX's own go."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpadambc.core import chacha, keys

pytestmark = pytest.mark.guarantee


def words(hexadecimal):
    return np.frombuffer(bytes.fromhex(hexadecimal), np.uint32)


ZEROS = "00" * 32
# RFC 8439: key, counter, nonce, block. The first is of section 2.3.2, the others are of
# appendix A.1.
PUBLISHED = [
    (
        bytes(range(32)).hex(),
        1,
        "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        ZEROS,
        0,
        "000000000000000000000000",
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        ZEROS,
        1,
        "000000000000000000000000",
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        "00" * 31 + "01",
        1,
        "000000000000000000000000",
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        "00ff" + "00" * 30,
        2,
        "000000000000000000000000",
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    (
        ZEROS,
        0,
        "000000000000000000000002",
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
]


@pytest.mark.parametrize(("key", "counter", "nonce", "expected"), PUBLISHED)
def test_blocks_are_those_that_the_standard_prints(key, counter, nonce, expected):
    counters = jnp.array([counter, counter + 1], jnp.uint32)
    found = chacha.blocks(jnp.asarray(words(key)), counters, jnp.asarray(words(nonce)))
    np.testing.assert_array_equal(found[:, 0], words(expected))
    assert (found[:, 1] != words(expected)).all()


KEY = jax.random.wrap_key_data(np.arange(8, dtype=np.uint32), impl=chacha.KIND)


def test_draws_keys_and_folded_numbers_have_no_words_in_common():
    """One nonce for all would give a key that is also a draw."""
    drawn = jax.random.bits(KEY, (16_000,), jnp.uint32)
    other = [
        jax.random.key_data(jax.random.split(KEY, 1_000)),
        jax.random.key_data(
            jax.vmap(jax.random.fold_in, (None, 0))(KEY, np.arange(99))
        ),
        jax.random.key_data(keys.folded_in(KEY, np.uint32([0, 7]))),
        jax.random.key_data(KEY),
    ]
    rows = [np.asarray(x).reshape(-1, 8) for x in (drawn, *other)]
    rows = [tuple(row) for x in rows for row in x.tolist()]
    assert len(set(rows)) == len(rows) == 2_000 + 1_000 + 99 + 1 + 1


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5), (7, 32), (2, 3, 16), (33,)])
def test_every_word_of_a_draw_is_its_own(shape):
    found = np.asarray(jax.random.bits(KEY, shape, jnp.uint32))
    assert found.shape == shape and len(np.unique(found)) == found.size


def test_a_draw_may_not_be_longer_than_its_counter():
    draw = lambda size: jax.eval_shape(
        lambda key: chacha.draw(key, (size,)), jax.random.key_data(KEY)
    )
    with pytest.raises(ValueError, match="words"):
        draw(2**37)
    assert draw(2**35).shape == (2**35,)


def test_each_pair_of_words_gives_another_key():
    pairs = [[0, 0], [0, 1], [1, 0], [2**31, 5], [5, 2**31]]
    found = [jax.random.key_data(keys.folded_in(KEY, np.uint32(x))) for x in pairs]
    assert len({tuple(x.tolist()) for x in found}) == len(pairs)
    np.testing.assert_array_equal(
        found[3],
        chacha.blocks(
            jax.random.key_data(KEY), jnp.uint32(2**31), np.uint32([2, 5, 0])
        )[:8],
    )


def test_vmap_over_keys_draws_what_each_key_draws():
    several = jax.random.split(KEY, 3)
    together = jax.vmap(lambda key: jax.random.normal(key, (40,)))(several)
    alone = jnp.stack([jax.random.normal(key, (40,)) for key in several])
    np.testing.assert_allclose(together, alone, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_bits_of_every_width_are_fair(dtype):
    found = np.asarray(jax.random.bits(KEY, (40_000,), dtype))
    bits = np.unpackbits(found.view(np.uint8))
    assert abs(bits.mean() - 0.5) * 2 * bits.size**0.5 < 4


def test_bits_of_64_are_fair_under_x64(x64):
    found = np.asarray(jax.random.bits(KEY, (40_000,), jnp.uint64))
    bits = np.unpackbits(found.view(np.uint8)).reshape(-1, 64)
    assert np.abs(bits.mean(0) - 0.5).max() * 2 * 40_000**0.5 < 5


def test_a_seed_of_64_bits_keeps_them(x64):
    words_of = lambda seed: tuple(
        np.asarray(jax.random.key_data(jax.random.key(seed, impl=chacha.KIND))).tolist()
    )
    assert words_of(2**40 + 7)[:2] == (7, 2**8)
    assert words_of(7)[:2] == (7, 0)
