"""The networks to time: each as the loss of one example and as that of a batch."""

from benchmarks.speed.models.images import mixer, resnet18, unet
from benchmarks.speed.models.problem import Problem, check_losses
from benchmarks.speed.models.small import cnn5, gcn, lstm, mlp
from benchmarks.speed.models.transformer import decoder, encoder, transformer

__all__ = [
    "Problem",
    "check_losses",
    "cnn5",
    "decoder",
    "encoder",
    "gcn",
    "lstm",
    "mixer",
    "mlp",
    "resnet18",
    "transformer",
    "unet",
]
