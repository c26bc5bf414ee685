"""The problems that are timed, by name; each is built when it is called."""

import functools
from collections.abc import Callable, Mapping

from benchmarks.speed import models

Sizes = Mapping[str, Callable[[], models.Problem]]

_large = functools.partial(
    models.transformer, width=1024, layers=12, heads=16, length=256
)

_decoder = functools.partial(models.decoder, width=512, layers=8, heads=8)

CPU: Sizes = {
    "transformer-64": functools.partial(models.transformer, 64),
    "transformer-256": functools.partial(models.transformer, 256),
    "decoder-16": functools.partial(_decoder, 16),
    "decoder-64": functools.partial(_decoder, 64),
    "decoder-384": functools.partial(models.decoder, 16),
    "decoder-2048": functools.partial(_decoder, 4, layers=2, length=2048),
    "encoder-64": functools.partial(models.encoder, 16, 64),
    "encoder-256": functools.partial(models.encoder, 16, 256),
    "mlp-256": functools.partial(models.mlp, 256),
    "mlp-1024": functools.partial(models.mlp, 1024),
    "cnn5-256": functools.partial(models.cnn5, 256),
    "resnet18-16": functools.partial(models.resnet18, 16),
    "unet-16": functools.partial(models.unet, 16),
    "mixer-16": functools.partial(models.mixer, 16),
    "gcn": models.gcn,
    "lstm-64": models.lstm,
}

GPU: Sizes = {
    "transformer-16": functools.partial(_large, 16),
    "transformer-128": functools.partial(_large, 128),
    "mlp-4096": functools.partial(models.mlp, 4096),
    "cnn5-2048": functools.partial(models.cnn5, 2048),
    "resnet18-512": functools.partial(models.resnet18, 512),
    "unet-256": functools.partial(models.unet, 256),
    "encoder-512": functools.partial(models.encoder, 512, 64),
    "decoder-32": functools.partial(
        models.decoder, 32, 768, 12, 12, length=256, vocabulary=32_000
    ),
    "gcn": functools.partial(models.gcn, 10_000),
    "lstm-1024": functools.partial(models.lstm, 1024),
}


def by_name(of_gpu: bool = False) -> Sizes:
    """Returns the problems of both tables; of one in both, that of a GPU if asked."""
    return {**CPU, **GPU} if of_gpu else {**GPU, **CPU}
