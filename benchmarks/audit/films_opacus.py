"""The noise of Opacus, for `films`; in an interpreter that has both and this project.

PyTorch's generator fills blocks of 16 float32 numbers by Box and Muller: of two uniform
numbers u and v with 24 bits each, r cos(2 π v) and r sin(2 π v) stand 8 places apart,
where r² = -2 log(1 - u). So two coordinates of noise alone tell their u and v, up to
rounding. Whether such a pair gives them bit by bit, the generator itself says: its
state is set so that it draws these u and v next.
"""

# pyright: basic, reportMissingImports=false
# PyTorch and Opacus are no dependencies of this project.

import functools
import importlib.metadata
import itertools

import numpy as np
import torch
from opacus.optimizers import DPOptimizer

from benchmarks.audit import films
from benchmarks.audit.films import BATCH, L2_CLIP_NORM, NOISE_MULTIPLIER

STDDEV = L2_CLIP_NORM * NOISE_MULTIPLIER  # of the sum
WORDS = 608  # 38 blocks; the state has 624 words, and makes new ones for the last
NEAR = list(itertools.product(range(-4, 5), range(-3, 4)))


def release(gradients: np.ndarray, seed: int, secure_mode: bool = False) -> np.ndarray:
    """The gradient that its optimizer steps by."""
    param = torch.nn.Parameter(torch.zeros(gradients.shape[1:]))
    optimizer = DPOptimizer(
        torch.optim.SGD([param], lr=0.1),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=L2_CLIP_NORM,
        expected_batch_size=BATCH,
        generator=torch.Generator().manual_seed(seed),
        secure_mode=secure_mode,
    )
    param.grad_sample = torch.tensor(gradients)
    optimizer.pre_step()
    return np.asarray(param.grad)


def _untempered(outputs: np.ndarray) -> np.ndarray:
    """The words of a state of MT19937 that come out as these."""
    x = outputs ^ outputs >> 18
    x ^= x << 15 & 0xEFC60000
    low = x
    for _ in range(4):  # 7 more bits each time
        low = x ^ low << 7 & 0x9D2C5680
    high = low
    for _ in range(2):  # 11 more
        high = low ^ high >> 11
    return high & 0xFFFFFFFF


def normals(uniforms: np.ndarray) -> np.ndarray:
    """What PyTorch's generator makes of draws of 24 bits, shape (WORDS,), int64."""
    generator = torch.Generator()
    state = generator.get_state().numpy()
    # How many words are left, whether it is seeded, the next one, and the words.
    state[8:12].view(np.int32)[0] = 624
    state[16:24].view(np.int64)[0] = 0
    words = _untempered(np.append(uniforms, np.zeros(624 - WORDS, np.int64)))
    state[24 : 24 + 8 * 624].view(np.int64)[:] = words
    generator.set_state(torch.from_numpy(state))
    return torch.normal(0.0, STDDEV, (WORDS,), generator=generator).numpy()


def is_possible(noised: np.ndarray) -> np.ndarray:
    """Which coordinates are a half of a pair that the generator makes."""
    blocks = (noised * np.float32(BATCH)).reshape(-1, 2, 8)
    pairs = blocks.transpose(1, 0, 2).reshape(2, -1)
    x, y = pairs.astype(np.float64) / STDDEV
    u = np.round(2**24 * -np.expm1(-(x**2 + y**2) / 2)).astype(np.int64)
    v = np.round(2**24 * np.arctan2(y, x) / (2 * np.pi)).astype(np.int64)
    is_made = np.zeros(x.shape, bool)
    for du, dv in NEAR:
        near = np.stack([np.clip(u + du, 0, 2**24 - 1), (v + dv) % 2**24])
        is_made |= (_pairs(near) == pairs).all(axis=0)
    halves = is_made.reshape(-1, 1, 8).repeat(2, axis=1)
    return halves.reshape(noised.shape)


def _pairs(uniforms: np.ndarray) -> np.ndarray:
    """The same for any number of pairs, shape (2, pairs)."""
    half = WORDS // 2
    count = uniforms.shape[1]
    filled = np.pad(uniforms, ((0, 0), (0, -count % half)))
    parts = filled.reshape(2, -1, half // 8, 8).transpose(1, 2, 0, 3)
    made = np.stack([normals(part.ravel()) for part in parts])
    made = made.reshape(-1, half // 8, 2, 8).transpose(2, 0, 1, 3)
    return made.reshape(2, -1)[:, :count]


def contenders() -> dict[tuple[str, str], films.Contender]:
    packages = ("opacus", "torch")
    opacus, pytorch = (importlib.metadata.version(x) for x in packages)
    version = f"{opacus}, PyTorch {pytorch}"
    secure = functools.partial(release, secure_mode=True)
    return {
        ("Opacus", version): films.Contender(release, is_possible),
        ("Opacus, secure_mode", version): films.Contender(secure, is_possible),
    }
